"""Bus bandwidth of groups of ranks, on profiles whose transfers are known."""

import pytest
from importer_kit import shared_trace
from kineto_files import COLLECTIVES, START, Profile, distributed

from dpro_search.collect.readers.kineto.importer import read
from dpro_search.collect.trace import Trace
from dpro_search.graph.recorded_collectives import group_speeds, slow_groups

ALLREDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"


def job(tmp_path, *, elements: int = 1 << 20) -> Trace:
    """Pairs of six ranks all-reduce 4 MiB; the second of a pair enqueues 100 us late, and ranks 2 and 3 take 8 times as long."""
    paths = []
    for rank in range(6):
        group = rank // 2
        profile = Profile(pid=100 + rank, device=rank)
        about = {
            "Collective name": "allreduce", "In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float",
            "Process Group Name": str(group), "Process Group Ranks": f"[{2 * group}, {2 * group + 1}]",
        }  # fmt: skip
        for number in range(3):
            begin, late_us = START + 10_000 * number, 100 * (rank % 2)
            profile.step(number, begin, 9_000)
            end = begin + 300 + (8000 if group == 1 else 1000)
            profile.kernel("gemm", begin + 20, 50, launched=begin + 10)
            enqueued = begin + 200 + late_us
            profile.kernel(ALLREDUCE, enqueued, end - enqueued, launched=begin + 100, stream=COLLECTIVES, **about)
        paths.append(profile.write(tmp_path / f"rank{rank}.json", header={**distributed(rank, 6), "host_name": "one"}))
    return read(paths)


def test_the_time_starts_when_the_last_rank_has_posted(tmp_path):
    speeds = group_speeds(job(tmp_path))
    assert [speed.ranks for speed in speeds] == [(2, 3), (0, 1), (4, 5)]
    assert [speed.time_us for speed in speeds] == pytest.approx([8000, 1000, 1000])
    assert speeds[1].bus_bps == pytest.approx((4 << 20) * 8 / 1e-3)  # of two ranks, a link carries each byte once
    assert (speeds[0].collective, speeds[0].count, speeds[0].bytes_per_step) == ("allreduce", 3, 4 << 20)


def test_a_group_far_below_the_others_is_slow(tmp_path):
    ((speed, usual_bps),) = slow_groups(group_speeds(job(tmp_path)))
    assert speed.ranks == (2, 3)
    assert usual_bps == pytest.approx(8 * speed.bus_bps)


def test_small_collectives_tell_nothing_of_a_link(tmp_path):
    assert group_speeds(job(tmp_path, elements=1000)) == ()


def test_the_collectives_of_eight_real_ranks_have_a_bandwidth():
    speeds = group_speeds(shared_trace("kineto_dlrm_8ranks"))
    assert {speed.collective for speed in speeds} <= {"allreduce", "alltoall"}
    assert all(speed.ranks == tuple(range(8)) and 1e9 < speed.bus_bps < 3e12 for speed in speeds)
    assert slow_groups(speeds) == []
