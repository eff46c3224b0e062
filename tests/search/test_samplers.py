"""What every sampler promises: determinism by seed, the ask/tell order, valid plans; and that they find good ones."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
from bus_objective import DEFAULT_SETTINGS, BusObjective, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.collect.trace import CommSettings
from dpro_search.errors import InputError
from dpro_search.search.objective import Objective
from dpro_search.search.samplers import SAMPLERS, make_sampler
from dpro_search.search.samplers._base import as_change
from dpro_search.search.study import run_search
from dpro_search.space.plan import Plan

MIXED = tensors_of([4_000_000, 40_000, 400_000, 8_000, 1_200_000, 40_000, 4_000, 2_400_000, 64_000, 16_000])


def proposals(objective: Objective, name: str, seed: int, count: int) -> list[Plan]:
    """Drive a sampler as a study does."""
    sampler = make_sampler(name, objective.tensors, objective.recorded, seed)
    sampler.observe(Plan(), objective.predict(Plan()))
    plans = []
    for _ in range(count):
        proposal = sampler.ask()
        sampler.tell(proposal, objective.predict(proposal.plan))
        plans.append(proposal.plan)
    return plans


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_same_seed_gives_the_same_plans(name: str) -> None:
    objective = BusObjective(MIXED)
    assert proposals(objective, name, 7, 60) == proposals(objective, name, 7, 60)


@pytest.mark.parametrize("name", SAMPLERS)
def test_another_seed_gives_other_plans(name: str) -> None:
    objective = BusObjective(MIXED)
    assert proposals(objective, name, 7, 60) != proposals(objective, name, 8, 60)


@pytest.mark.parametrize("name", SAMPLERS)
@given(
    sizes_bytes=st.lists(st.integers(0, 10**8), min_size=1, max_size=12),
    threshold_bytes=st.integers(0, 2**28),
    cycle_us=st.sampled_from([100.0, 1000.0, 3456.7, 90_000.0]),
    grouped=st.booleans(),
)
@settings(max_examples=10, deadline=None)
def test_any_recording_gets_plans_of_its_own_tensors(
    name: str, sizes_bytes: list[int], threshold_bytes: int, cycle_us: float, grouped: bool
) -> None:
    tensors = tensors_of(sizes_bytes)
    recorded = CommSettings(
        fusion_threshold_bytes=threshold_bytes,
        cycle_time_us=cycle_us,
        groups=(tuple(t.name for t in tensors),) if grouped else None,
    )
    for plan in proposals(BusObjective(tensors, recorded), name, 0, 20):
        if plan.tensor_groups is not None:
            assert sorted(n for g in plan.tensor_groups for n in g) == sorted(t.name for t in tensors)
        assert plan == as_change(plan, recorded), "a field repeats the recording"


@pytest.mark.parametrize("name", SAMPLERS)
def test_few_trials_are_spent_on_plans_that_are_known(name: str) -> None:
    plans = proposals(BusObjective(MIXED), name, 3, 100)
    assert len(set(plans)) > 90


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_improves_a_bad_recording(name: str, tmp_path: Path) -> None:
    bad = CommSettings(fusion_threshold_bytes=0, cycle_time_us=20_000.0)
    objective = BusObjective(tensors_of([8_000] * 60), bad, compute_us=50.0)
    result = run_search(objective, trials=100, sampler=name, out=tmp_path / "run", trace_digest="bus")
    assert result.plans[0].speedup > 2
    assert result.gain_certain


@functools.cache
def exhaustive_optimum_us() -> float:
    """Of all contiguous groupings at all cycle times of a fine grid."""
    names = [tensor.name for tensor in MIXED]
    return min(
        BusObjective(MIXED).predict(Plan(tensor_groups=_cut(names, cuts), cycle_time_us=float(cycle_us))).iteration_us
        for cuts in itertools.product((False, True), repeat=len(names) - 1)
        for cycle_us in np.geomspace(500, 50_000, 30)
    )


@pytest.mark.parametrize("seed", range(3))
def test_auto_comes_within_2_percent_of_the_exhaustive_optimum(seed: int, tmp_path: Path) -> None:
    result = run_search(BusObjective(MIXED), trials=300, seed=seed, out=tmp_path / "run", trace_digest="bus")
    assert result.plans[0].prediction.iteration_us <= 1.02 * exhaustive_optimum_us()


def test_auto_uses_every_sampler_and_the_portfolio_itself(tmp_path: Path) -> None:
    origins: list[str] = []
    objective = BusObjective(MIXED, CommSettings(fusion_threshold_bytes=0, cycle_time_us=5000.0))
    run_search(objective, trials=150, out=tmp_path / "run", trace_digest="bus", on_trial=lambda trial: origins.append(trial.origin))
    assert origins[:2] == ["recorded", "auto"], "first the recorded setting, then the library's default"
    assert origins.count("optuna") >= 30
    assert origins.count("mcmc") >= 30


def test_an_unknown_sampler_is_named() -> None:
    with pytest.raises(InputError, match=r"sampler 'grid' is unknown \(known: auto, mcmc, optuna\)"):
        make_sampler("grid", MIXED, DEFAULT_SETTINGS, 0)


def _cut(names: list[str], cuts: tuple[bool, ...]) -> tuple[tuple[str, ...], ...]:
    groups = [[names[0]]]
    for name, cut in zip(names[1:], cuts, strict=True):
        if cut:
            groups.append([])
        groups[-1].append(name)
    return tuple(tuple(group) for group in groups)
