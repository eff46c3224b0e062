"""Every sampler keeps the contract; what single ones promise beyond it."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
from bus_objective import BusObjective, KnobObjective, tensors_of
from sampler_contract import MIXED, SamplerContract

from dpro_search.collect.trace import CommSettings
from dpro_search.errors import InputError
from dpro_search.search import run_search
from dpro_search.search.samplers import SAMPLERS, sampler_for
from dpro_search.space.plan import Plan
from dpro_search.space.transformations import PlanningFacts, PlanSpace
from dpro_search.space.transformations.horovod import TensorFusion


class TestAuto(SamplerContract):
    name = "auto"


class TestCriticalPath(SamplerContract):
    name = "critical-path"
    knobs = False


class TestMcmc(SamplerContract):
    name = "mcmc"


class TestNsga2(SamplerContract):
    name = "nsga2"


class TestOptuna(SamplerContract):
    name = "optuna"


def test_every_sampler_is_held_to_the_contract() -> None:
    assert sorted(kind.name for kind in SamplerContract.__subclasses__()) == sorted(SAMPLERS)


@functools.cache
def exhaustive_optimum_us() -> float:
    """Of all contiguous groupings at all cycle times of a fine grid."""
    names = [tensor.name for tensor in MIXED]
    return min(
        BusObjective(MIXED).predict(Plan.of(tensor_groups=_cut(names, cuts), cycle_time_us=float(cycle_us))).iteration_us
        for cuts in itertools.product((False, True), repeat=len(names) - 1)
        for cycle_us in np.geomspace(500, 50_000, 30)
    )


@pytest.mark.parametrize("seed", range(3))
def test_auto_comes_within_2_percent_of_the_exhaustive_optimum(seed: int, tmp_path: Path) -> None:
    result = run_search(BusObjective(MIXED), trials=300, seed=seed, out=tmp_path / "run", trace_digest="bus")
    assert result.plans[0].prediction.iteration_us <= 1.02 * exhaustive_optimum_us()


def test_the_critical_path_alone_leads_to_the_best_fusion_within_a_few_trials(tmp_path: Path) -> None:
    """60 alike gradients that are ready faster than a bus with a high latency takes them one by one."""
    objective = BusObjective(
        tensors_of([40_000] * 60), CommSettings(fusion_threshold_bytes=0, cycle_time_us=1000.0), compute_us=100.0
    )
    collected: list[float] = []
    run_search(
        objective,
        trials=12,
        sampler="critical-path",
        out=tmp_path / "run",
        trace_digest="bus",
        on_trial=lambda trial: collected.append(trial.prediction.iteration_us),
    )
    at_once = objective.predict(Plan(tensor_groups=(tuple(tensor.name for tensor in objective.tensors),))).iteration_us
    assert min(collected) < at_once < collected[0]


def test_without_a_replay_there_is_no_critical_path() -> None:
    with pytest.raises(InputError, match="a job with one knob has no tensor fusion"):
        sampler_for(KnobObjective().space, "critical-path", 0)


def test_auto_uses_every_sampler_and_the_portfolio_itself(tmp_path: Path) -> None:
    origins: list[str] = []
    objective = BusObjective(MIXED, CommSettings(fusion_threshold_bytes=0, cycle_time_us=5000.0))
    run_search(objective, trials=150, out=tmp_path / "run", trace_digest="bus", on_trial=lambda trial: origins.append(trial.origin))
    assert origins[:2] == ["recorded", "auto"], "first the recorded setting, then the library's default"
    for name in ("optuna", "mcmc", "critical-path"):
        assert origins.count(name) >= 12, name


def test_auto_spends_few_trials_on_a_sampler_that_proposes_more_slowly_than_plans_are_replayed(tmp_path: Path) -> None:
    origins: list[str] = []
    objective = BusObjective(MIXED, CommSettings(fusion_threshold_bytes=0, cycle_time_us=5000.0))
    run_search(objective, trials=500, out=tmp_path / "run", trace_digest="bus", on_trial=lambda trial: origins.append(trial.origin))
    assert 12 < origins.count("optuna") < 100


class Grouped(BusObjective):
    """Groupings are all that plans can change: the outer knobs have some dozen values."""

    @property
    def space(self) -> PlanSpace:
        job = PlanningFacts(name="a bus", tensors=self.tensors, values={"fusion_threshold_bytes": 0, "tensor_groups": None})
        return PlanSpace(job, (TensorFusion(job),))


def test_auto_gives_the_trials_of_a_sampler_that_has_nothing_new_to_the_others(tmp_path: Path) -> None:
    plans: list[Plan] = []
    objective = Grouped(tensors_of([40_000, 400_000, 8_000] * 10), CommSettings(fusion_threshold_bytes=0, cycle_time_us=1000.0))
    run_search(objective, trials=600, out=tmp_path / "run", trace_digest="bus", on_trial=lambda trial: plans.append(trial.plan))
    assert len(set(plans)) == 600


def test_an_unknown_sampler_is_named() -> None:
    with pytest.raises(InputError, match=r"sampler 'grid' is unknown \(known: auto, critical-path, mcmc, nsga2, optuna\)"):
        sampler_for(BusObjective(MIXED).space, "grid", 0)


def _cut(names: list[str], cuts: tuple[bool, ...]) -> tuple[tuple[str, ...], ...]:
    groups = [[names[0]]]
    for name, cut in zip(names[1:], cuts, strict=True):
        if cut:
            groups.append([])
        groups[-1].append(name)
    return tuple(tuple(group) for group in groups)
