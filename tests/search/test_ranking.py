"""Limits, fronts, quantiles, and when a search has found what it is going to find."""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec
import numpy as np
import pytest
from bus_objective import BusObjective, KnobObjective, prediction_of, tensors_of
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.collect.trace import CommSettings, Floats
from dpro_search.errors import InputError
from dpro_search.search import SearchResult, Trial, run_search
from dpro_search.search.result import beats, by_quantile, pareto_front, rank_plans
from dpro_search.search.samplers._base import cost_us
from dpro_search.search.study import expected_gain, is_settled
from dpro_search.space.plan import Plan, Prediction

SMALL = BusObjective(tensors_of([8_000] * 40), CommSettings(fusion_threshold_bytes=0, cycle_time_us=20_000.0), compute_us=50.0)


class Limited(KnobObjective):
    """What needs more than a limit is infeasible."""

    limit_bytes = 2**21

    def predict(self, plan: Plan) -> Prediction:
        prediction = super().predict(plan)
        needs = prediction.peak_memory_bytes or 0
        return msgspec.structs.replace(prediction, infeasible="needs too much") if needs > self.limit_bytes else prediction


class Risky(BusObjective):
    """Plans of one group are faster on average, and slower in unfavourable draws."""

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0) -> Floats:
        draws = np.random.default_rng(seed).random(samples)
        risky = plan.tensor_groups is not None and len(plan.tensor_groups) < 5
        return self.predict(plan).iteration_us * (1 + (5 if risky else 0.1) * draws)


def trials_of(points: list[tuple[float, int | None]]) -> list[Trial]:
    return [
        Trial(number=i, origin="mcmc", plan=Plan.of(cycle_time_us=i + 1.0), prediction=prediction_of(us, Plan(), 0.01, memory))
        for i, (us, memory) in enumerate(points)
    ]


@pytest.mark.parametrize("sampler", ["auto", "mcmc", "nsga2", "optuna"])
def test_the_best_plan_keeps_the_limit(sampler: str, tmp_path: Path) -> None:
    """Without a limit the best knob is at 8 MiB; within it, at the limit."""
    result = run_search(Limited(), trials=60, sampler=sampler, out=tmp_path / "run", trace_digest="knob")
    assert result.feasible
    best = result.plans[0].plan.get("bucket_cap_bytes") or 0
    assert Limited.limit_bytes / 2 <= best <= Limited.limit_bytes
    assert all(ranked.prediction.infeasible is None for ranked in result.plans)


def test_where_nothing_fits_the_smallest_is_shown_with_the_reason() -> None:
    class Tight(Limited):
        limit_bytes = 0

    objective = Tight()
    trials = [
        Trial(number=i, origin="mcmc", plan=plan, prediction=objective.predict(plan))
        for i, plan in enumerate([Plan(), Plan.of(bucket_cap_bytes=2**23), Plan.of(bucket_cap_bytes=2**17)])
    ]
    ranked = rank_plans(trials, trials[0].prediction)
    assert ranked[0].plan == Plan.of(bucket_cap_bytes=2**17)
    assert ranked[0].prediction.infeasible == "needs too much"
    assert not any(plan.gain_certain for plan in ranked)


def test_infeasible_plans_cost_more_than_any_other_and_less_memory_is_better() -> None:
    slow = prediction_of(1e9, Plan(), 0.01, 100)
    large, larger = (msgspec.structs.replace(prediction_of(1.0, Plan(), 0.01, size), infeasible="no") for size in (200, 300))
    assert cost_us(slow) < cost_us(large) < cost_us(larger)


@given(st.lists(st.tuples(st.floats(1, 1e6), st.integers(0, 10**6)), min_size=2, max_size=40))
def test_nothing_on_the_front_is_beaten_and_everything_else_is(points: list[tuple[float, int]]) -> None:
    trials = trials_of([(us, memory) for us, memory in points])
    front = {ranked.trial for ranked in pareto_front(trials, trials[0].prediction)}
    if len({memory for _, memory in points}) < 2:
        assert not front
        return
    for number, (us, memory) in enumerate(points):
        better = [p for p in points if p[0] <= us and p[1] <= memory and p != (us, memory)]
        assert (number in front) <= (not better)
        if number not in front:
            assert better or points.index((us, memory)) != number


def test_the_front_is_a_table_in_the_run_folder(tmp_path: Path) -> None:
    result = run_search(KnobObjective(), trials=40, sampler="nsga2", out=tmp_path / "run", trace_digest="knob")
    with (tmp_path / "run" / "pareto.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [int(row["peak_memory_bytes"]) for row in rows] == [r.prediction.peak_memory_bytes for r in result.front]
    assert len(rows) > 3
    assert SearchResult.load(tmp_path / "run") == result
    run_search(SMALL, trials=5, sampler="mcmc", out=tmp_path / "other", trace_digest="bus")
    assert not (tmp_path / "other" / "pareto.csv").exists()


def test_how_often_one_plan_beats_another() -> None:
    odds = beats(np.array([[1.0, 4.0, 2.0, 5.0], [2.0, 3.0, 2.0, 6.0]]))
    assert odds[0, 1] == pytest.approx(2.5 / 4)
    assert odds[1, 0] == pytest.approx(1.5 / 4)
    np.testing.assert_allclose(odds + odds.T, 1.0)


def test_ranked_by_a_quantile_a_risky_plan_falls_behind(tmp_path: Path) -> None:
    objective = Risky(SMALL.tensors, SMALL.recorded, compute_us=50.0)
    options = {"trials": 60, "sampler": "mcmc", "trace_digest": "bus"}
    by_time = run_search(objective, out=tmp_path / "a", **options)  # type: ignore[arg-type]
    by_quantile = run_search(objective, out=tmp_path / "b", quantile=0.9, **options)  # type: ignore[arg-type]
    assert len(by_time.plans[0].plan.tensor_groups or ()) < 5 <= len(by_quantile.plans[0].plan.tensor_groups or ())
    at = [ranked.quantile_us or 0.0 for ranked in by_quantile.plans]
    assert at == sorted(at)
    assert len(by_quantile.beats) == len(by_quantile.plans)
    assert 0 <= (by_quantile.plans[0].beats_recorded or -1) <= 1


def test_ranking_keeps_each_plan() -> None:
    ranked = rank_plans(trials_of([(100.0, None), (200.0, None), (300.0, None)]), prediction_of(300.0, Plan(), 0.01))
    times = np.array([[5.0, 5.0], [1.0, 1.0], [3.0, 3.0], [2.0, 2.0]])
    ordered, share = by_quantile(ranked, times, 0.5)
    assert [plan.trial for plan in ordered] == [1, 2, 0]
    assert [plan.beats_recorded for plan in ordered] == [1.0, 0.0, 0.0]
    assert share[0].tolist() == [0.5, 1.0, 1.0]


@pytest.mark.parametrize("quantile", [0.0, 1.0, 7.0])
def test_a_quantile_is_between_0_and_1(quantile: float, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--quantile"):
        run_search(SMALL, trials=5, out=tmp_path / "run", trace_digest="bus", quantile=quantile)


def test_a_job_that_is_replayed_without_random_draws_is_refused_before_it_is_searched(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--quantile: this job cannot be replayed with resampled durations"):
        run_search(SMALL, trials=5, out=tmp_path / "run", trace_digest="bus", quantile=0.9)
    assert not (tmp_path / "run").exists()


def test_the_expected_gain_is_what_the_later_half_gained() -> None:
    assert expected_gain([100.0, 80.0, 80.0, 80.0]) == 0
    assert expected_gain([100.0, 100.0, 90.0, 50.0]) == 1
    assert not is_settled(trials_of([(100.0, None)] * 63))
    assert is_settled(trials_of([(100.0, None)] * 64))
    assert not is_settled(trials_of([(100.0 - i, None) for i in range(64)]))


def test_a_search_that_expects_nothing_more_ends_and_can_be_continued(tmp_path: Path) -> None:
    unsure = BusObjective(SMALL.tensors, SMALL.recorded, compute_us=50.0, noise=0.05)
    first = run_search(unsure, trials=500, sampler="mcmc", out=tmp_path / "run", trace_digest="bus", until_settled=True)
    assert first.stopped == "settled"
    assert 64 <= first.trials < 500
    longer = run_search(unsure, trials=first.trials + 10, sampler="mcmc", out=tmp_path / "run", trace_digest="bus")
    assert (longer.stopped, longer.trials) == ("finished", first.trials + 10)


def test_a_folder_of_a_search_with_other_options_is_refused(tmp_path: Path) -> None:
    run_search(SMALL, trials=5, sampler="mcmc", out=tmp_path / "run", trace_digest="bus", options={"memory_limit_bytes": "7"})
    with pytest.raises(InputError, match="another options"):
        run_search(SMALL, trials=5, sampler="mcmc", out=tmp_path / "run", trace_digest="bus")


def test_a_lossless_plan_is_listed_beside_lossy_ones():
    lossy = [Plan.of(cycle_time_us=us).changed(compression="fp16") for us in (1_000.0 + 100 * number for number in range(12))]
    plans = [Plan(), *lossy, Plan.of(cycle_time_us=5_000.0)]
    trials = [
        Trial(
            number=number,
            origin="mcmc",
            plan=plan,
            prediction=prediction_of(100.0 - 5 * (13 - number) if number else 100.0, plan, 0.01, None),
        )
        for number, plan in enumerate(plans)
    ]
    ranked = rank_plans(trials, trials[0].prediction)
    assert len(ranked) == 10
    assert [one.plan.is_lossy for one in ranked] == [True] * 9 + [False]
    assert ranked[-1].plan == plans[-1]
