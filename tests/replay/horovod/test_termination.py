"""Every replay of Horovod ends: with times, or with one line that says what did not end."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample import measured, sample

from dpro_search.costmodel.collectives.horovod import CommCosts
from dpro_search.errors import GraphError
from dpro_search.replay.horovod import machine
from dpro_search.replay.horovod.timeline import replay_horovod
from dpro_search.space.plan import Plan
from dpro_search.space.tensorflow.apply_plan import apply
from dpro_search.space.tensorflow.horovod_job import HorovodJob

# Durations that break loops: none, denormal, below and above the machine's tolerances, so long that short steps change nothing.
WORST_US = [0.0, 5e-324, 1e-9, 1e-7, 1e-6, 1.0, 999.9999999, 1e3, 1e9, 1e16, 1e300]


def job(*, main_us, post_us, work_us=0.0, released=None, cycle_us=1000.0, **costs):
    """Ranks that enqueue units of 4 MB at core times [ranks, units]; `released`: (rank, unit) pairs that update work waits for."""
    post = np.array(post_us, dtype=float)[None]
    ranks, units = post.shape[1:]
    pairs = [(r, u) for r in range(ranks) for u in range(units)] if released is None else sorted(released)
    known = dict.fromkeys(("alpha_busy_us", "alpha_more_us", "alpha_tail_us", "dispatch_us", "copy_in_us", "copy_out_us"), 0.0)
    known |= dict.fromkeys(("cpu_us", "cycle_cpu_us", "collective_cpu_us", "residual_pct"), 0.0)
    known |= {"beta_busy_us": 0.008, "beta_tail_us": 0.008}
    known |= dict.fromkeys(("negotiate_busy_us", "negotiate_idle_us"), np.array([100.0]))
    return HorovodJob(
        class_of_rank=np.arange(ranks),
        core=np.arange(ranks),
        on_core=np.ones(ranks, dtype=np.int64),
        main_us=np.array([main_us], dtype=float),
        host_us=np.zeros((1, ranks)),
        post_us=np.sort(post, axis=2),
        post_order=np.argsort(post, axis=2, kind="stable"),
        unit_bytes=np.full(units, 4e6),
        unit_tensors=np.ones(units, dtype=np.int64),
        release_class=np.array([rank for rank, _ in pairs], dtype=np.int64),
        release_work_us=np.full((1, len(pairs)), float(work_us)),
        release_ptr=np.arange(len(pairs) + 1),
        release_unit=np.array([unit for _, unit in pairs], dtype=np.int64),
        fusion_threshold_bytes=0.0,
        exact_groups=False,
        cycle_us=cycle_us,
        comm=CommCosts(**(known | costs)),
    )


@pytest.fixture
def few_events(monkeypatch):
    """The machine gives up early."""
    monkeypatch.setattr(machine, "MOST_EVENTS", 20_000)


@pytest.mark.parametrize("late_us", [2e-6, 0.5, 1e6])
def test_a_gradient_that_is_enqueued_after_the_last_op_is_sent_at_its_end(late_us):
    replayed = replay_horovod(job(main_us=[5000.0, 5000.0], post_us=[[100.0, 5000.0 + late_us]] * 2))
    at_end = replay_horovod(job(main_us=[5000.0, 5000.0], post_us=[[100.0, 5000.0]] * 2))
    assert replayed.iteration_us == pytest.approx(at_end.iteration_us)


def test_a_rank_whose_update_takes_no_time_waits_for_its_gradient_all_the_same():
    """Without that it ran ahead, enqueued the gradient twice, and the other rank waited for ever for a third."""
    whole = measured()
    costs = whole.costs
    slow = replace(costs, beta_busy_us=costs.beta_busy_us * 400, beta_tail_us=costs.beta_tail_us * 400)
    first, second = whole.graph.profiles
    free = tuple(replace(release, work_us=np.zeros_like(release.work_us)) for release in second.releases)

    def iteration_us(releases):
        graph = replace(whole.graph, profiles=(first, replace(second, releases=releases)))
        return replay_horovod(apply(Plan(), graph, slow, (sample().horovod_settings, whole.cluster))).iteration_us

    assert iteration_us(()) == iteration_us(free)


def test_ranks_of_different_length_that_wait_for_nothing_end_with_one_line(few_events):
    unanswered = job(main_us=[1000.0, 90_000.0], post_us=[[500.0], [80_000.0]], released=[(1, 0)])
    with pytest.raises(GraphError, match=r"iteration \d+ of rank 1 did not end within 20000 events"):
        replay_horovod(unanswered)


@pytest.mark.parametrize("main_us", [np.inf, 1e300])
def test_a_step_without_end_is_one_line(main_us, few_events):
    with pytest.raises(GraphError, match="iteration 0 of rank 1 did not end"):
        replay_horovod(job(main_us=[1000.0, main_us], post_us=[[500.0]] * 2))


@pytest.mark.parametrize("main_us", [np.nan, np.inf, -1.0, 1e13])
def test_a_core_time_that_is_no_duration_is_one_line(main_us):
    whole = measured()
    first, second = whole.graph.profiles
    wrong = replace(second, main_us=np.full_like(second.main_us, main_us))
    graph = replace(whole.graph, profiles=(first, wrong))
    with pytest.raises(GraphError, match=r"core time \(compute\) that is no duration"):
        apply(Plan(), graph, whole.costs, (sample().horovod_settings, whole.cluster))


@pytest.mark.parametrize("cycle_us", [0.0, 1e-300, 1e9])
def test_a_cycle_of_any_length_ends(cycle_us):
    assert replay_horovod(job(main_us=[1000.0] * 2, post_us=[[500.0]] * 2, cycle_us=cycle_us)).iteration_us >= 1000.0


DURATIONS = st.sampled_from(WORST_US) | st.floats(0, 1e7)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_durations_give_times_or_one_line(data, few_events):
    ranks, units = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    cost = st.sampled_from([0.0, 1e-9, 1e-3, 1.0, 1e6])
    pairs = [(r, u) for r in range(ranks) for u in range(units)]
    case = job(
        main_us=data.draw(st.lists(DURATIONS, min_size=ranks, max_size=ranks)),
        post_us=data.draw(st.lists(st.lists(DURATIONS, min_size=units, max_size=units), min_size=ranks, max_size=ranks)),
        work_us=data.draw(DURATIONS),
        released=data.draw(st.sets(st.sampled_from(pairs))),
        cycle_us=data.draw(DURATIONS),
        alpha_busy_us=data.draw(cost),
        alpha_tail_us=data.draw(cost),
        copy_in_us=data.draw(cost),
        cpu_us=data.draw(cost),
        cycle_cpu_us=data.draw(cost),
        beta_busy_us=data.draw(st.sampled_from([1e-9, 0.008, 1e6])),
        negotiate_busy_us=np.array(data.draw(st.lists(DURATIONS, min_size=1, max_size=3))),
        burst_us=data.draw(cost),
        poll_share=data.draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    with suppress(GraphError):
        replayed = replay_horovod(case, iterations=4)
        assert np.isfinite(replayed.iterations_us).all()
        assert (replayed.iterations_us >= 0).all()
