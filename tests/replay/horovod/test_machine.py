"""The simulator's semantics on graphs small enough to know the answer."""

from dataclasses import replace

import batching_device
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample import measured, schedule

from dpro_search.costmodel.collectives.horovod import CommCosts
from dpro_search.replay.horovod import machine
from dpro_search.replay.horovod.timeline import replay_horovod
from dpro_search.replay.iterations import DRAWS, iteration_times, sample_order
from dpro_search.space.plan import Plan
from dpro_search.space.rank_classes import alike
from dpro_search.space.tensorflow.fusion_moves import contiguous_groups
from dpro_search.space.tensorflow.horovod_job import HorovodJob
from tests.every_case import every_case

FREE = {
    "alpha_busy_us": 0.0, "alpha_more_us": 0.0, "alpha_tail_us": 0.0, "beta_busy_us": 1e-9, "beta_tail_us": 1e-9,
    "negotiate_busy_us": np.array([1.0]), "negotiate_idle_us": np.array([1.0]),
    "dispatch_us": 0.0,
    "copy_in_us": 0.0, "copy_out_us": 0.0, "cpu_us": 0.0, "cycle_cpu_us": 0.0, "collective_cpu_us": 0.0, "residual_pct": 0.0,
}  # fmt: skip


def graph(*, ranks=2, main_us=(1000.0, 1000.0), post_us=((500.0, 900.0),) * 2, sizes=(100.0, 100.0), update_us=0.0, **changes):
    """Ranks that post units at given core times; every unit's update takes `update_us` on each rank."""
    costs = CommCosts(**(FREE | changes.pop("costs", {})))
    units = len(sizes)
    post = np.array(post_us, dtype=float)[None, :, :]
    settings_ = {"fusion_threshold_bytes": 1e9, "exact_groups": False, "cycle_us": 10.0} | changes
    settings_ = {
        "core": np.arange(ranks), "on_core": np.ones(ranks, dtype=np.int64), "class_of_rank": np.arange(ranks), **settings_,
    }  # fmt: skip
    return HorovodJob(
        main_us=np.array([main_us], dtype=float),
        host_us=np.zeros((1, ranks)),
        post_us=np.sort(post, axis=2),
        post_order=np.argsort(post, axis=2, kind="stable"),
        unit_bytes=np.array(sizes, dtype=float),
        unit_tensors=np.ones(units, dtype=np.int64),
        release_class=np.repeat(np.arange(ranks), units),
        release_work_us=np.full((1, ranks * units), float(update_us)),
        release_ptr=np.arange(ranks * units + 1),
        release_unit=np.tile(np.arange(units), ranks),
        comm=costs,
        **settings_,
    )


def iteration_us(*args, **kwargs) -> float:
    return replay_horovod(graph(*args, **kwargs)).iteration_us


def test_without_communication_an_iteration_takes_its_compute():
    assert iteration_us() == pytest.approx(1000, abs=30)  # up to two cycles and an agreement


def test_the_slowest_rank_sets_the_pace():
    assert iteration_us(main_us=(1000.0, 2000.0), post_us=((500.0, 900.0), (500.0, 1900.0))) == pytest.approx(2000, abs=30)


def test_updates_are_work_of_the_core():
    assert iteration_us(update_us=100.0) == pytest.approx(1200, abs=30)


def test_a_transfer_that_compute_hides_costs_nothing():
    assert iteration_us(post_us=((100.0, 100.0),) * 2, costs={"beta_busy_us": 1.0, "beta_tail_us": 1.0}) == pytest.approx(
        1000, abs=30
    )


def test_a_transfer_after_the_last_gradient_is_exposed():
    late = {"post_us": ((1000.0, 1000.0),) * 2, "costs": {"beta_busy_us": 1.0, "beta_tail_us": 1.0}}
    assert iteration_us(**late) == pytest.approx(1200, abs=30)


def test_busy_ranks_and_the_tail_have_different_speeds():
    late = {"post_us": ((1000.0, 1000.0),) * 2, "costs": {"beta_busy_us": 5.0, "beta_tail_us": 2.0}}
    assert iteration_us(**late) == pytest.approx(1400, abs=30)


def test_a_link_that_has_rested_is_ahead_of_its_rate_by_its_burst():
    late = {"post_us": ((1000.0, 1000.0),) * 2, "costs": {"beta_busy_us": 1.0, "beta_tail_us": 1.0, "burst_us": 50.0}}
    assert iteration_us(**late) == pytest.approx(1150, abs=30)
    assert iteration_us(**late, fusion_threshold_bytes=0.0) == pytest.approx(1150, abs=30)  # the second is not spared it again


def test_a_latency_shorter_than_the_burst_is_hidden():
    wire = {"beta_busy_us": 1.0, "beta_tail_us": 1.0, "alpha_tail_us": 200.0, "alpha_busy_us": 200.0}
    crowded = {"post_us": ((1000.0,) * 4,) * 2, "sizes": (1000.0,) * 4, "fusion_threshold_bytes": 0.0}
    assert iteration_us(**crowded, costs=wire) == pytest.approx(5800, abs=60)
    assert iteration_us(**crowded, costs=wire | {"burst_us": 300.0}) == pytest.approx(5000 - 100, abs=60)


@given(st.floats(0, 5000), st.floats(10, 3000), st.lists(st.floats(1, 2000), min_size=1, max_size=5))
def test_a_link_is_ahead_of_its_rate_by_no_more_than_its_burst_however_long_it_sends(burst_us, main_us, sizes):
    posts = ((main_us,) * len(sizes),) * 2
    costs = {"beta_busy_us": 1.0, "beta_tail_us": 1.0, "burst_us": burst_us}
    job = graph(main_us=(main_us,) * 2, post_us=posts, sizes=tuple(sizes), costs=costs, fusion_threshold_bytes=0.0)
    took_us = replay_horovod(job, iterations=64).iterations_us.sum()
    assert took_us >= 64 * sum(sizes) * (1 - 1e-6) - burst_us  # what was saved up is used once, in however many iterations


def test_communication_on_the_core_slows_the_compute_that_it_overlaps():
    costs = {"beta_busy_us": 1.0, "beta_tail_us": 1.0, "cpu_us": 0.5}
    assert iteration_us(post_us=((100.0, 100.0),) * 2, costs=costs) == pytest.approx(1000 + 0.5 * 200, abs=30)


def test_copies_stop_the_compute():
    assert iteration_us(post_us=((100.0, 100.0),) * 2, costs={"copy_in_us": 0.5, "copy_out_us": 0.25}) == pytest.approx(
        1150, abs=30
    )


def test_agreements_without_a_pause_never_stop_the_ranks_on_a_full_core():
    costs = {"cycle_cpu_us": 50.0, "negotiate_busy_us": np.array([10.0]), "negotiate_idle_us": np.array([10.0])}
    crowded = graph(core=np.array([0, 0]), cycle_us=1.0, costs=costs)
    assert replay_horovod(crowded, iterations=4).iteration_us < 2000 / 0.1 * 1.1


def test_without_fusion_every_unit_pays_the_latency():
    late = {"post_us": ((1000.0, 1000.0),) * 2, "costs": {"alpha_tail_us": 300.0}}
    fused, alone = iteration_us(**late), iteration_us(**late, fusion_threshold_bytes=0.0)
    assert alone - fused == pytest.approx(300, abs=5)


@pytest.mark.parametrize(("from_bytes", "ratio", "expected_us"), [((0.0,), (3.0,), 2500.0), ((0.0, 150.0), (3.0, 1.0), 1500.0)])
def test_an_all_reduce_takes_as_many_times_longer_as_its_size_says(from_bytes, ratio, expected_us):
    late = {"post_us": ((1000.0, 1000.0),) * 2, "costs": {"alpha_tail_us": 300.0, "beta_busy_us": 1.0, "beta_tail_us": 1.0}}
    ratios = {"ratio_from_bytes": np.array(from_bytes), "ratio": np.array(ratio)}
    assert iteration_us(**late) == pytest.approx(1500, abs=30)  # 300 us and 200 bytes
    assert iteration_us(**late, **ratios) == pytest.approx(expected_us, abs=30)


@given(st.lists(st.floats(1, 2000), min_size=1, max_size=5), st.floats(0, 300), st.floats(0.1, 2))
def test_ratios_of_1_change_nothing(sizes, alpha_us, beta_us):
    usual = {"post_us": ((500.0,) * len(sizes),) * 2, "sizes": tuple(sizes), "fusion_threshold_bytes": 1000.0}
    costs = {"alpha_tail_us": alpha_us, "alpha_busy_us": alpha_us, "beta_busy_us": beta_us, "beta_tail_us": beta_us}
    ones = {"ratio_from_bytes": np.array([0.0, 100.0, 1000.0]), "ratio": np.ones(3)}
    assert iteration_us(**usual, costs=costs, **ones) == iteration_us(**usual, costs=costs)


def test_exact_groups_never_fuse():
    late = {"post_us": ((1000.0, 1000.0),) * 2, "costs": {"alpha_tail_us": 300.0}}
    assert iteration_us(**late, exact_groups=True) == pytest.approx(iteration_us(**late, fusion_threshold_bytes=0.0), abs=5)


def test_a_long_cycle_delays_what_just_missed_it():
    assert iteration_us(post_us=((1000.0, 1000.0),) * 2, cycle_us=5000.0) >= 2500


def test_ranks_on_one_core_share_it():
    assert iteration_us(core=np.array([0, 0])) == pytest.approx(2000, abs=50)


@every_case(
    ("sizes", "threshold", "expected"),
    [
        ([4, 4, 4], 12, [0, 0, 0]),
        ([4, 4, 4], 8, [0, 0, 1]),
        ([4, 4, 4], 0, [0, 1, 2]),
        ([4, 9, 4], 8, [0, 1, 2]),  # a unit that does not fit, and would not fit beside the skipped, closes the collective
        ([2, 7, 2, 7], 9, [0, 0, 1, 1]),
        ([1, 8, 1], 8, [0, 1, 2]),
        ([1, 5, 1, 5], 5, [0, 1, 2, 3]),
        ([20, 1, 1], 8, [0, 1, 1]),
    ],
)
def test_fusion_follows_the_controllers_rule(sizes, threshold, expected):
    group = np.full(len(sizes), -1, dtype=np.int64)
    count = machine.fuse(np.array(sizes, dtype=float), float(threshold), False, group)
    assert group.tolist() == expected
    assert count == max(expected) + 1


def test_a_unit_that_is_skipped_may_be_passed_by_smaller_ones():
    group = np.full(3, -1, dtype=np.int64)
    machine.fuse(np.array([5.0, 4.0, 1.0]), 8.0, False, group)
    assert group.tolist() == [0, 1, 1]  # 5 + 4 > 8 and closes the first
    group[:] = -1
    machine.fuse(np.array([2.0, 6.5, 1.0]), 8.4, False, group)
    assert group.tolist() == [0, 1, 1]


@st.composite
def graphs(draw):
    ranks = draw(st.integers(1, 4))
    units = draw(st.integers(1, 6))
    main = [draw(st.integers(100, 5000)) for _ in range(ranks)]
    post = [[draw(st.integers(1, main[r])) for _ in range(units)] for r in range(ranks)]
    sizes = [draw(st.integers(1, 1000)) for _ in range(units)]
    costs = {
        "alpha_busy_us": draw(st.floats(0, 500)),
        "alpha_tail_us": draw(st.floats(0, 100)),
        "beta_busy_us": draw(st.floats(0.1, 3)),
        "beta_tail_us": draw(st.floats(0.1, 1)),
        "cpu_us": draw(st.floats(0, 0.1)),
    }
    return graph(
        ranks=ranks, main_us=main, post_us=post, sizes=sizes, update_us=float(draw(st.integers(0, 50))), costs=costs,
        fusion_threshold_bytes=float(draw(st.integers(0, 3000))), cycle_us=float(draw(st.integers(1, 2000))),
    )  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(graphs())
def test_nothing_starts_before_its_cause_and_no_iteration_beats_its_compute(case):
    timeline = replay_horovod(case, iterations=6, log=True)
    updates = case.release_work_us.sum() / case.ranks
    assert timeline.iteration_us >= case.main_us.max() + updates - 1e-3
    for kind, _, _, _, _, start, end in timeline.log:
        assert end >= start
        assert kind in (
            *range(machine.COPY_IN, machine.COPY_OUT + 1),
            machine.LOG_POST,
            machine.LOG_MAIN,
            machine.LOG_STEP,
        )
    returns = timeline.log[timeline.log[:, machine.LOG_KIND] == machine.LOG_POST]
    per_unit = np.unique(returns[:, [machine.LOG_COLLECTIVE, machine.LOG_UNIT]], axis=0)
    assert len(returns) == len(per_unit) * case.ranks  # a unit returns to all ranks together
    for collective in np.unique(returns[:, machine.LOG_COLLECTIVE]):
        rows = returns[returns[:, machine.LOG_COLLECTIVE] == collective]
        copies = timeline.log[
            (timeline.log[:, machine.LOG_KIND] == machine.COPY_IN) & (timeline.log[:, machine.LOG_COLLECTIVE] == collective)
        ]
        assert len(copies) <= 1
        if len(copies):
            assert rows[:, machine.LOG_START].max() <= copies[0, machine.LOG_START] + 1e-6  # all ranks had posted


@settings(deadline=None, max_examples=10)
@given(graphs())
def test_the_compiled_simulator_equals_the_plain_one(case):
    compiled = replay_horovod(case, iterations=4, log=True)
    original, fuse = machine.simulate, machine.fuse
    try:
        machine.simulate, machine.fuse = original.py_func, fuse.py_func
        plain = replay_horovod(case, iterations=4, log=True)
    finally:
        machine.simulate, machine.fuse = original, fuse
    np.testing.assert_allclose(plain.iterations_us, compiled.iterations_us, rtol=1e-9)
    np.testing.assert_allclose(plain.log, compiled.log, rtol=1e-9, atol=1e-6)


def test_the_same_seed_gives_the_same_timeline():
    case = graph(costs={"negotiate_busy_us": np.array([1.0, 50.0, 300.0])})
    np.testing.assert_array_equal(replay_horovod(case, seed=3).iterations_us, replay_horovod(case, seed=3).iterations_us)


@st.composite
def jobs_with_ranks_alike(draw):
    """A job of up to 8 ranks of up to 3 profiles on shared cores, with every rank followed: (job, profile of each rank)."""
    ranks, profiles, units = draw(st.integers(1, 8)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    main = [draw(st.integers(100, 5000)) for _ in range(profiles)]
    post = [[draw(st.integers(1, main[p])) for _ in range(units)] for p in range(profiles)]
    profile = [draw(st.integers(0, profiles - 1)) for _ in range(ranks)]
    core = [draw(st.integers(0, ranks - 1)) for _ in range(ranks)]
    job = graph(
        ranks=ranks, main_us=[main[p] for p in profile], post_us=[post[p] for p in profile], sizes=[100] * units,
        update_us=float(draw(st.integers(0, 50))), core=np.unique(core, return_inverse=True)[1],
        fusion_threshold_bytes=float(draw(st.integers(0, 400))), cycle_us=float(draw(st.integers(1, 2000))),
        costs={
            "alpha_busy_us": draw(st.floats(0, 500)), "beta_busy_us": draw(st.floats(0.1, 3)), "cpu_us": draw(st.floats(0, 0.1)),
            "beta_tail_us": 0.1, "copy_in_us": draw(st.floats(0, 0.5)), "cycle_cpu_us": draw(st.floats(0, 50)),
        },
    )  # fmt: skip
    return job, np.array(profile)


def folded(job, profile):
    """The same job with one rank of each class."""
    classes = alike(profile, job.core)
    kept = np.isin(job.release_class, classes.first_rank)
    release_ptr, release_unit = job.release_ptr[: kept.sum() + 1], job.release_unit[np.repeat(kept, np.diff(job.release_ptr))]
    return replace(
        job, class_of_rank=classes.class_of_rank, core=classes.core, on_core=classes.on_core,
        main_us=job.main_us[:, classes.first_rank], host_us=job.host_us[:, classes.first_rank],
        post_us=job.post_us[:, classes.first_rank], post_order=job.post_order[:, classes.first_rank],
        release_class=classes.class_of_rank[job.release_class[kept]], release_work_us=job.release_work_us[:, kept],
        release_ptr=release_ptr, release_unit=release_unit,
    )  # fmt: skip


@settings(deadline=None, max_examples=100)
@given(jobs_with_ranks_alike())
def test_following_one_rank_of_each_class_changes_nothing(case):
    job, profile = case
    whole, few = (replay_horovod(one, iterations=4, log=True) for one in (job, folded(job, profile)))
    np.testing.assert_array_equal(few.iterations_us, whole.iterations_us)
    assert few.rank_breakdown_us == whole.rank_breakdown_us
    followed = np.isin(whole.log[:, machine.LOG_RANK], [-1, *few.log[:, machine.LOG_RANK]])
    np.testing.assert_array_equal(few.log, whole.log[followed])


def test_ten_thousand_ranks_of_two_profiles_are_two_classes():
    classes = alike(np.arange(10240) % 2, np.arange(10240))
    assert classes.first_rank.tolist() == [0, 1]
    assert classes.on_core.tolist() == [1, 1]


def test_a_rank_that_shares_its_core_is_not_like_one_that_has_its_own():
    classes = alike(np.array([0, 0, 0, 1, 0]), np.array([0, 0, 1, 2, 2]))
    assert classes.class_of_rank.tolist() == [0, 0, 1, 2, 3]
    assert classes.on_core.tolist() == [2, 1, 1, 1]
    assert classes.core[2] == classes.core[3]


def test_work_that_takes_no_time_ends_an_iteration_when_its_gradient_returns():
    late = {"post_us": ((1000.0, 1000.0),) * 2, "costs": {"beta_tail_us": 1.0}, "cycle_us": 5000.0}
    without, with_work = iteration_us(**late), iteration_us(**late, update_us=1e-3)
    assert without == pytest.approx(with_work, abs=1)


def test_a_post_is_logged_at_its_instant_though_it_is_no_event():
    timeline = replay_horovod(graph(costs={"cpu_us": 0.1, "beta_busy_us": 1.0, "beta_tail_us": 1.0}), iterations=4, log=True)
    steps = timeline.log[timeline.log[:, machine.LOG_KIND] == machine.LOG_STEP]
    posts = timeline.log[timeline.log[:, machine.LOG_KIND] == machine.LOG_POST]
    begun = steps[steps[:, machine.LOG_RANK] == 0, machine.LOG_START]
    first = np.sort(posts[(posts[:, machine.LOG_RANK] == 0) & (posts[:, machine.LOG_UNIT] == 0), machine.LOG_START])
    np.testing.assert_allclose(first - begun, 500.0, atol=1e-6)  # nothing took the core from the first half of the step


def twin(job, iterations):
    """What the batching device makes of a job: fields of `IterationTimes`, and its number of events."""
    rng = np.random.default_rng(0)
    *simulation, events = batching_device.simulate(job, sample_order(rng, job.samples, iterations), rng.random(DRAWS))
    return iteration_times(*simulation, job.class_of_rank), events


@st.composite
def all_costs(draw):
    """Values for the terms of `CommCosts` that are 0 in most tests."""
    names = "alpha_more_us", "dispatch_us", "collective_cpu_us", "cycle_cpu_us", "burst_us"
    us = {name: draw(st.floats(0, 300)) for name in names}
    per_byte = {name: draw(st.floats(0, 0.5)) for name in ("copy_in_us", "copy_out_us")}
    drawn = {name: np.array(draw(st.lists(st.floats(1, 500), min_size=1, max_size=3))) for name in ("busy", "idle")}
    negotiations = {f"negotiate_{name}_us": samples for name, samples in drawn.items()}
    return us | per_byte | negotiations | {"poll_share": draw(st.sampled_from([0.0, 0.4]))}


@settings(deadline=None, max_examples=60)
@given(st.one_of(graphs(), jobs_with_ranks_alike().map(lambda case: folded(*case))), all_costs())
def test_the_machine_has_the_times_of_a_graph_with_a_batching_device(case, costs):
    case = replace(case, comm=replace(case.comm, **costs), ratio_from_bytes=np.array([0.0, 500.0]), ratio=np.array([1.5, 0.8]))
    (expected, _), replayed = twin(case, 4), replay_horovod(case, iterations=4)
    np.testing.assert_allclose(replayed.iterations_us, expected["iterations_us"], rtol=1e-9, atol=1e-4)
    for row, other in zip(replayed.rank_breakdown_us, expected["rank_breakdown_us"], strict=True):
        assert row == pytest.approx(other, rel=1e-9, abs=1e-4)


PLANS = [Plan(), Plan.of(fusion_threshold_bytes=0), Plan(tensor_groups=contiguous_groups(measured().graph.tensors, 4))]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("changes", [(), ("ranks=4", "cores=2", "rate=1gbit")])
def test_the_machine_has_the_times_of_a_batching_device_for_plans_of_the_sample(plan, changes):
    case = schedule(plan, *changes).job
    (expected, _), replayed = twin(case, 2), replay_horovod(case, iterations=2)
    np.testing.assert_allclose(replayed.iterations_us, expected["iterations_us"], rtol=1e-12)
