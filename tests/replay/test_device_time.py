"""Where the devices' time goes, on profiles whose times are known."""

import numpy as np
import pytest
from kineto_files import COLLECTIVES, Profile, distributed

from dpro_search.collect.readers.kineto.importer import read
from dpro_search.collect.trace import Trace
from dpro_search.graph.recorded_collectives import lateness
from dpro_search.replay.device_time import RankTime, covered, mean_breakdown_us, mean_times, rank_times
from tests.profiles import profiled, replay_of

BEGIN = 1_700_000_000_000_000
ALLREDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"


def job(tmp_path, ranks: int = 2) -> Trace:
    """Steps of 1000 us: compute 0-300; an all-reduce, enqueued by rank 1 at 400, rank 0 at 200, which ends at 500; compute 600-700,
    launched at 550."""
    paths = []
    for rank in range(ranks):
        profile = Profile(pid=100 + rank, device=rank)
        for number in range(9):
            begin = BEGIN + 1000 * number
            enqueued = begin + 200 + 200 * rank
            profile.step(number, begin - 20, 990)
            profile.kernel("gemm", begin, 300, launched=begin - 10)
            profile.kernel(ALLREDUCE, enqueued, begin + 500 - enqueued, launched=begin, stream=COLLECTIVES)
            profile.kernel("adam", begin + 600, 100, launched=begin + 550)
        paths.append(profile.write(tmp_path / f"rank{rank}.json", header=distributed(rank, ranks)))
    return read(paths)


def times_of(trace: Trace) -> tuple[RankTime, ...]:
    return rank_times(replay_of(profiled(trace)).timeline())


def test_the_parts_of_an_iteration_add_up_and_are_what_happened(tmp_path):
    early, late = times_of(job(tmp_path))
    for row in (early, late):
        assert row.compute_us + row.exposed_communication_us + row.waiting_for_ranks_us + row.idle_us == pytest.approx(1000)
        assert row.compute_us == pytest.approx(400)
        assert row.exposed_communication_us == pytest.approx(100)
    assert early.waiting_for_ranks_us == pytest.approx(100)
    assert late.waiting_for_ranks_us == pytest.approx(0)
    assert (early.idle_us, late.idle_us) == pytest.approx((400, 500))


def test_idle_time_is_the_hosts_where_nothing_was_launched_when_it_began(tmp_path):
    early, late = times_of(job(tmp_path))
    assert early.host_bound_us == pytest.approx(400)  # before the step's first kernel, and before the update
    assert late.host_bound_us == pytest.approx(400)  # not the gap before the all-reduce, which had long been launched


def test_the_late_rank_costs_what_the_others_wait(tmp_path):
    early, late = lateness(job(tmp_path))
    assert (early.last_pct, late.last_pct) == (0, 100)
    assert late.cost_us == pytest.approx(200)
    assert early.waited_us == pytest.approx(200)
    assert (early.cost_us, late.waited_us) == (0, 0)


def test_a_rank_alone_has_no_known_waiting(tmp_path):
    trace = job(tmp_path, ranks=1)
    (alone,) = times_of(trace)
    assert alone.waiting_for_ranks_us == 0
    assert alone.exposed_communication_us == pytest.approx(200)
    assert lateness(trace) == ()


def test_covered_counts_overlaps_once():
    assert covered(np.array([0.0, 5.0, 20.0]), np.array([10.0, 8.0, 30.0])) == 20
    assert covered(np.zeros(0), np.zeros(0)) == 0


def test_means_keep_the_sum(tmp_path):
    times = times_of(job(tmp_path))
    doubled = tuple(RankTime(rank=row.rank, **{name: 2 * us for name, us in parts_of(row).items()}) for row in times)
    assert sum(mean_breakdown_us(mean_times([times, doubled])).values()) == pytest.approx(1500)


def parts_of(row: RankTime) -> dict[str, float]:
    return {name: getattr(row, name) for name in RankTime.__struct_fields__ if name != "rank"}


def test_a_rank_that_does_nothing_in_one_of_the_steps_has_the_mean_of_the_others() -> None:
    parts = (
        "compute_us",
        "exposed_communication_us",
        "waiting_for_ranks_us",
        "unknown_us",
        "idle_us",
        "host_bound_us",
        "transfer_us",
    )
    one, two = (RankTime(rank=rank, **dict.fromkeys(parts, us)) for rank, us in ((0, 10.0), (2, 40.0)))
    mean_rows = mean_times([[one], [RankTime(rank=0, **dict.fromkeys(parts, 20.0)), two]])
    assert [(row.rank, row.compute_us) for row in mean_rows] == [(0, 15.0), (2, 40.0)]
