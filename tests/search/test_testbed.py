"""What the real runs of `experiments.search.testbed` are made to say, and in which order they are made; no job runs here."""

from collections.abc import Mapping

import msgspec
import pytest

from dpro_search.space.plan import Plan
from experiments.search import testbed
from experiments.search.testbed_case import DEFAULT, GRID, PLAN, XLA, Case, Measured, Setup, open_case
from experiments.search.testbed_jobs import SCHEMES
from experiments.search.testbed_report import judged

SETUP = Setup(scheme="ps", workload="vgg16", rate="2gbit", python="python")
AS_RECORDED, FAST, GOOD = Plan(), Plan.of(p3=True, slice_threshold=400_000), Plan.of(bigarray_bound=100_000)
PREDICTED_US = {Plan(): 400e3, FAST: 300e3, GOOD: 330e3}


def run(milliseconds, plan=AS_RECORDED, losses=(3.0, 2.0, 1.0), **fields):
    times = tuple(milliseconds * 1e3 for _ in range(10))
    return Measured(plan=plan, iteration_us=times, losses=tuple((str(value), 1e-6) for value in losses), **fields)


def result(runs, grid=()):
    return judged(SETUP, 30, runs, grid, PREDICTED_US.get, gain_certain=True)


def rows(found):
    return {row.name: row for row in found.rows}


def test_gains_are_parts_of_the_defaults_iteration_and_stand_beside_the_predicted_ones():
    result_of_case = result(
        {DEFAULT: [run(396), run(404), run(400)], PLAN: [run(288, FAST), run(288, FAST)], GRID: [run(300, GOOD)]}
    )
    plan = rows(result_of_case)[PLAN]
    assert plan.gain_pct == pytest.approx(28)
    assert plan.predicted_gain_pct == pytest.approx(25)
    assert result_of_case.gain_error == pytest.approx(3)
    assert result_of_case.noise_pct == pytest.approx(1)
    assert result_of_case.as_fast_as_grid


def test_a_plan_may_be_slower_than_the_best_of_the_grid_by_the_noise_and_no_more():
    base = [run(396), run(404)]
    assert result({DEFAULT: base, PLAN: [run(302.5, FAST)], GRID: [run(300, GOOD)]}).as_fast_as_grid
    assert not result({DEFAULT: base, PLAN: [run(304, FAST)], GRID: [run(300, GOOD)]}).as_fast_as_grid


def test_what_failed_is_said_and_not_compared():
    result_of_case = result({DEFAULT: [run(400)], PLAN: [run(300, FAST)], XLA: [Measured(failed="rank 1 ended")], GRID: []})
    assert set(rows(result_of_case)) == {DEFAULT, PLAN}
    assert result_of_case.missing == {XLA: "rank 1 ended", GRID: "not run yet"}
    assert result_of_case.as_fast_as_grid is None


def test_a_contender_that_trains_something_else_is_said_to():
    result_of_case = result({DEFAULT: [run(400), run(400)], PLAN: [run(300, FAST, losses=(3.0, 2.5, 2.4))]})
    assert "differ, by more than" in rows(result_of_case)[PLAN].losses
    assert "agree" in rows(result_of_case)[DEFAULT].losses


def test_the_grid_tells_how_far_predictions_are_off_and_whether_they_order_its_settings():
    plans = {Plan.of(bigarray_bound=bound): 100.0 * bound for bound in (1, 2, 3, 4)}
    grid = [run(1.25 * us / 1e3, plan) for plan, us in plans.items()]
    judgement = judged(SETUP, 30, {DEFAULT: [run(400)]}, grid, {**plans, Plan(): 1.0}.get, gain_certain=False)
    assert (judgement.agreement.tau, judgement.agreement.settings) == (pytest.approx(1), 4)
    assert judgement.agreement.error_pct == judgement.agreement.largest_error_pct == pytest.approx(20)


def test_what_the_autotuner_chose_is_the_row_with_the_highest_score():
    names = ("hierarchical_allreduce", "torus_allreduce", "cache_enabled", "cycle_time_ms", "tensor_fusion_threshold", "score")
    header = ",".join(names)
    log = f"{header}\n0,0,1,5,4,90.5\n0,0,0,12.5,32,120\n0,0,1,25,16,100\n"
    chosen = Plan.of(fusion_threshold_bytes=32 * 2**20, cycle_time_us=12_500.0), {"HOROVOD_CACHE_CAPACITY": "0"}
    assert testbed.autotuned(log) == chosen
    assert testbed.autotuned(f"{header}\n") is None


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_grid_has_thirty_settings_that_the_job_can_follow(scheme):
    assert len(set(scheme.grid)) == 30
    if scheme.at_once > 1:
        assert all(isinstance(scheme.setting(plan), Mapping) for plan in scheme.grid)


def put(path, measured):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(measured))


def test_the_best_of_the_grid_runs_again_and_does_not_change_meanwhile(tmp_path):
    case = open_case(tmp_path / "case", SETUP)
    put(case.grid_file(0), run(350, GOOD))
    put(case.grid_file(1), run(310, FAST))
    assert case.best_of_grid() == FAST
    put(case.round_file(GRID, 0), run(320, FAST))
    put(case.grid_file(2), run(300, GOOD))
    assert case.best_of_grid() == FAST


def test_who_is_far_behind_at_first_leaves_but_the_default_and_the_plan_stay(tmp_path):
    case = open_case(tmp_path / "case", SETUP)
    for name, milliseconds in ((DEFAULT, 400), (XLA, 900), (GRID, 410), (PLAN, 900)):
        put(case.round_file(name, 0), run(milliseconds))
    assert [name for name in (DEFAULT, XLA, GRID, PLAN) if case.in_the_race(name)] == [DEFAULT, GRID, PLAN]


def test_a_folder_is_of_one_case(tmp_path):
    open_case(tmp_path / "case", SETUP)
    assert open_case(tmp_path / "case") == Case(tmp_path / "case", SETUP)
    with pytest.raises(ValueError, match="other options"):
        open_case(tmp_path / "case", msgspec.structs.replace(SETUP, steps=30))
