"""What every sampler promises, as tests: a new sampler subclasses `SamplerContract`, names itself, and is tested.

class TestMine(SamplerContract):
    name = "mine"
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from bus_objective import BusObjective, KnobObjective, tensors_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro_search.collect.trace import CommSettings
from dpro_search.search import Objective, Trial, run_search
from dpro_search.search.samplers import sampler_for
from dpro_search.space.plan import Plan
from dpro_search.space.transformations import horovod_space

MIXED = tensors_of([4_000_000, 40_000, 400_000, 8_000, 1_200_000, 40_000, 4_000, 2_400_000, 64_000, 16_000])


class SamplerContract:
    """Tests of one sampler."""

    name: str  # As `sampler_for` knows it.
    knobs: bool = True  # Whether it also searches jobs that nothing can guide.

    def proposals(self, objective: BusObjective, seed: int, count: int) -> list[Plan]:
        """Drive the sampler as a study does."""
        sampler = sampler_for(objective.space, self.name, seed, objective)
        sampler.observe(Plan(), objective.predict(Plan()))
        plans = []
        for _ in range(count):
            proposal = sampler.ask()
            sampler.tell(proposal, objective.predict(proposal.plan))
            plans.append(proposal.plan)
        return plans

    def test_the_same_seed_gives_the_same_plans_and_another_gives_others(self) -> None:
        objective = BusObjective(MIXED)
        plans = self.proposals(objective, 7, 60)
        assert plans == self.proposals(objective, 7, 60)
        assert plans != self.proposals(objective, 8, 60)

    @given(
        sizes_bytes=st.lists(st.integers(0, 10**8), min_size=1, max_size=12),
        threshold_bytes=st.integers(0, 2**28),
        cycle_us=st.sampled_from([100.0, 1000.0, 3456.7, 90_000.0]),
        grouped=st.booleans(),
    )
    @settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    def test_any_recording_gets_legal_plans_that_say_no_more_than_they_change(
        self, sizes_bytes: list[int], threshold_bytes: int, cycle_us: float, grouped: bool
    ) -> None:
        tensors = tensors_of(sizes_bytes)
        recorded = CommSettings(
            fusion_threshold_bytes=threshold_bytes,
            cycle_time_us=cycle_us,
            groups=(tuple(t.name for t in tensors),) if grouped else None,
        )
        space = horovod_space(tensors, recorded)
        for plan in self.proposals(BusObjective(tensors, recorded), 0, 20):
            assert space.refusal(plan) is None
            assert plan == space.simplest(plan), "a field repeats the recording"
            if plan.tensor_groups is not None:
                assert sorted(n for g in plan.tensor_groups for n in g) == sorted(t.name for t in tensors)

    def test_few_trials_are_spent_on_plans_that_are_known(self) -> None:
        assert len(set(self.proposals(BusObjective(MIXED), 3, 100))) > 90

    def test_open_proposals_again_before_it_is_told_it_goes_on(self) -> None:
        """With several workers some asks are open; tells come in their order."""
        objective = BusObjective(MIXED)
        sampler = sampler_for(objective.space, self.name, 1, objective)
        sampler.observe(Plan(), objective.predict(Plan()))
        open_proposals = []
        for _ in range(60):
            open_proposals.append(sampler.ask())
            if len(open_proposals) > 4:
                proposal = open_proposals.pop(0)
                sampler.tell(proposal, objective.predict(proposal.plan))
        assert len({proposal.plan for proposal in open_proposals}) == len(open_proposals), "an open plan was proposed again"

    def test_it_improves_a_bad_recording(self) -> None:
        bad = CommSettings(fusion_threshold_bytes=0, cycle_time_us=20_000.0)
        objective = BusObjective(tensors_of([8_000] * 60), bad, compute_us=50.0)
        (*_, last) = self._searched(objective, 100)
        baseline, best = last
        assert baseline / best > 2

    def test_it_finds_the_value_of_a_single_knob(self) -> None:
        """Any kind of job is a space; nothing in a sampler is about Horovod."""
        if not self.knobs:
            return
        (*_, last) = self._searched(KnobObjective(), 40)
        assert last[1] < 105_000

    def test_a_space_that_is_soon_exhausted_is_no_trap(self) -> None:
        if not self.knobs:
            return
        objective = KnobObjective()
        sampler = sampler_for(objective.space, self.name, 0)
        sampler.observe(Plan(), objective.predict(Plan()))
        for _ in range(120):
            proposal = sampler.ask()
            sampler.tell(proposal, objective.predict(proposal.plan))

    def _searched(self, objective: Objective, trials: int) -> Iterator[tuple[float, float]]:
        """(recorded, best so far) after each trial of a search."""
        collected: list[Trial] = []
        with tempfile.TemporaryDirectory() as folder:
            run_search(
                objective, trials=trials, sampler=self.name, out=Path(folder) / "run", trace_digest="bus", on_trial=collected.append
            )
        for number in range(1, len(collected) + 1):
            yield collected[0].prediction.iteration_us, min(trial.prediction.iteration_us for trial in collected[:number])
