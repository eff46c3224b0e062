"""Profiles of several ranks: which files are whose, collectives that belong together, and clocks."""

import json
import tracemalloc

import numpy as np
import pytest
from importer_kit import check_trace, plain, shared_trace, shared_traces
from kineto_files import COLLECTIVES, MAIN, START, Profile, collective_job, distributed, one, small_job

from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.readers.kineto import importer as kineto
from dpro_search.collect.readers.kineto.importer import read
from dpro_search.collect.trace import CollectiveKind, EventKind, Trace
from dpro_search.errors import InputError


def test_collectives_are_matched_and_their_sizes_read(tmp_path):
    about = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "BFloat16"}
    group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
    paths = [
        collective_job(rank, **about, **group).write(tmp_path / f"{rank}.json", header=distributed(rank, 2)) for rank in (0, 1)
    ]
    trace = read(paths)
    parts = trace.events.select(trace.events.kind == EventKind.COLLECTIVE)
    assert sorted(parts.collective) == sorted([*range(10), *range(10)])
    assert set(parts.size_bytes) == {2000}
    assert [tensor.name for tensor in trace.tensors] == [f"allreduce/0#{i}" for i in range(10)]


def test_sizes_that_only_the_host_recorded_are_found_and_unknown_ones_are_minus_one(tmp_path):
    profile = collective_job(0, parts=2)
    dims = {"Input Dims": [[[3, 5]], []], "Input type": ["c10::BFloat16", ""]}
    profile.add("user_annotation", "nccl:all_reduce", START + 85, 20, MAIN, {"Input Dims": [[394, 2]], "Input type": ["float"]})
    profile.add("user_annotation", "nccl:all_reduce", START + 1085, 20, MAIN, dims)
    trace = read([profile.write(tmp_path / "trace.json")])
    assert trace.events.size_bytes[trace.events.kind == EventKind.COLLECTIVE].tolist() == [394 * 2 * 4, -1]


def test_a_collective_that_one_rank_never_posts_stays_alone(tmp_path):
    whole, short = collective_job(0, **{"Seq": 0}), collective_job(1, **{"Seq": 0})
    for profile in (whole, short):
        parts = [record for record in profile.records if record["name"].startswith("nccl")]
        for number, record in enumerate(parts):
            record["args"]["Seq"] = number
    short.records.remove(next(record for record in short.records if record["args"].get("Seq") == 4))
    trace = read([p.write(tmp_path / f"{r}.json", header=distributed(r, 2)) for r, p in enumerate((whole, short))])
    parts = trace.events.select(trace.events.kind == EventKind.COLLECTIVE)
    assert (parts.collective < 0).sum() == 1
    assert len(np.unique(parts.collective)) == 10


def test_merged_profiles_with_colliding_ids_are_taken_apart(tmp_path):
    merged = Profile()
    for rank in range(2):
        merged.records += collective_job(rank, late_us=3, shift_us=2 * rank).records
    ids = [record["args"].get("correlation") for record in merged.records]
    assert len(set(ids)) < len(ids) / 2  # both ranks count from 1
    together = read([merged.write(tmp_path / "merged.json")])
    check_trace(together)
    apart = read([collective_job(rank, late_us=3, shift_us=2 * rank).write(tmp_path / f"rank{rank}.json") for rank in range(2)])
    assert together.meta.ranks == 2
    assert len(together.events) == len(apart.events)
    assert len(together.dependencies) == len(apart.dependencies)
    assert len(np.unique(together.events.collective)) == len(np.unique(apart.events.collective)) == 11


def test_ranks_come_from_the_file_names_where_the_header_has_none(tmp_path):
    for name in ("node3_rank1.json", "node3_rank0.json"):
        small_job().write(tmp_path / name)
    assert import_trace([tmp_path]).meta.ranks == 2


def test_files_that_do_not_tell_their_ranks_are_refused(tmp_path):
    paths = [small_job().write(tmp_path / name) for name in ("a.json", "b.json")]
    with pytest.raises(InputError, match="neither its distributedInfo nor its name has the rank's number"):
        read(paths)


def test_large_files_are_read_in_processes_with_the_same_result(tmp_path, monkeypatch):
    paths = [collective_job(rank, late_us=5).write(tmp_path / f"rank{rank}.json") for rank in range(3)]
    expected = read(paths)
    monkeypatch.setattr(kineto, "_WORTH_PROCESSES", 0)
    trace = read(paths)
    assert trace.meta == expected.meta
    np.testing.assert_array_equal(trace.events.start_us, expected.events.start_us)


def test_hundreds_of_ranks_take_memory_that_grows_as_their_number(tmp_path):
    """The clocks of 800 ranks took memory and time with the square and the cube of the ranks."""

    def peak_bytes(ranks):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        shifts_us = np.random.default_rng(0).uniform(-1e6, 1e6, ranks)
        for rank in range(ranks):
            job = collective_job(rank % 2, shift_us=float(shifts_us[rank]))
            job.write(folder / f"rank{rank}.json", header=distributed(rank, ranks))
        tracemalloc.start()
        trace = read(sorted(folder.iterdir()))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        check_trace(trace)
        assert trace.meta.ranks == ranks
        assert len(np.unique(trace.events.collective)) == 11
        offset_us = np.array(trace.meta.clock.offset_us) - (shifts_us - shifts_us[0])
        assert (np.abs(offset_us) <= np.array(trace.meta.clock.residual_us) + 1).all()
        return peak

    assert peak_bytes(280) < 6 * peak_bytes(70)


def test_missing_ranks_are_told(tmp_path):
    trace = read([small_job().write(tmp_path / "trace.json", header=distributed(3, 8))])
    assert (trace.meta.ranks, trace.meta.numbers, trace.meta.world_size) == (1, (3,), 8)
    assert "only rank 3 was imported: how long collectives wait for ranks 0 to 2, 4 to 7" in trace.meta.warnings[0]
    assert trace.meta.hosts == ("",)


def test_two_different_files_of_one_rank_are_refused_and_copies_count_once(tmp_path):
    paths = [
        small_job(shift_us=shift, pid=pid).write(tmp_path / f"{i}.json", header=distributed(0, 2))
        for i, (shift, pid) in enumerate(((0, 100), (0, 100), (5e6, 200)))
    ]
    assert read(paths[:2]).meta.dropped["copies of a rank's file"] == 1
    with pytest.raises(InputError, match="rank 0 again, after"):
        read(paths)


def test_profiles_of_different_jobs_are_refused(tmp_path):
    paths = [small_job().write(tmp_path / f"{world}.json", header=distributed(world - 2, world)) for world in (2, 4)]
    with pytest.raises(InputError, match=r"of a job with 4 ranks, but .* is not"):
        read(paths)


@pytest.mark.parametrize("shift_us", [0.0, 1_600.0, 11_500_000.0, -11_500_000.0])
def test_a_shifted_clock_is_recovered_within_the_residual(tmp_path, shift_us):
    paths = [
        collective_job(rank, late_us=40, shift_us=shift_us * rank).write(tmp_path / f"rank{rank}.json", header=distributed(rank, 2))
        for rank in range(2)
    ]
    clock = read(paths).meta.clock
    assert clock.offset_us[1] == pytest.approx(shift_us, abs=max(clock.residual_us[1], 1.0))
    assert clock.residual_us[1] < 20


def test_ranks_without_a_common_collective_keep_their_clocks_and_say_so(tmp_path):
    trace = read([small_job().write(tmp_path / f"rank{rank}.json", header=distributed(rank, 2)) for rank in range(2)])
    assert "clocks are not aligned" in " ".join(trace.meta.warnings)
    assert trace.meta.clock.residual_us[1] > 500


def dlrm_with_a_shifted_clock(shift_us: float, rank: int, folder) -> Trace:
    """The profiles of eight ranks, one of them with another clock."""
    paths = sorted((shared_traces() / "kineto_dlrm_8ranks").glob("*.gz"))
    value = json.loads(plain(paths[rank]))
    for record in value["traceEvents"]:
        if "ts" in record:
            record["ts"] += shift_us
    moved = folder / paths[rank].name
    moved.write_text(json.dumps(value))
    paths[rank] = moved
    return read(paths)


def test_dlrm_all_collectives_are_matched_on_all_ranks_and_end_together():
    trace = shared_trace("kineto_dlrm_8ranks")
    parts = trace.events.select(trace.events.kind == EventKind.COLLECTIVE)
    numbers, counts = np.unique(parts.collective, return_counts=True)
    assert numbers.tolist() == list(range(8))
    assert counts.tolist() == [8] * 8
    for number in range(8):
        assert np.ptp(parts.end_us[parts.collective == number]) < 8
    assert (parts.size_bytes > 0).all()


@pytest.mark.parametrize(("shift_us", "rank"), [(11_500_000, 2), (1_600, 5)])
def test_dlrm_a_shifted_clock_is_recovered(tmp_path, shift_us, rank):
    usual = shared_trace("kineto_dlrm_8ranks").meta.clock
    shifted = dlrm_with_a_shifted_clock(shift_us, rank, tmp_path).meta.clock
    for other in range(8):
        expected = usual.offset_us[other] + shift_us * (other == rank)
        assert shifted.offset_us[other] == pytest.approx(expected, abs=max(usual.residual_us[other], 1.0))
    assert max(shifted.residual_us) < 10


def test_ddp_buckets_have_the_sizes_that_the_kernels_say():
    trace = shared_trace("kineto_single/ddp_resnet50_a100_rank0of2.json.gz")
    buckets = [tensor for tensor in trace.tensors if tensor.name.startswith("allreduce")]
    assert len(buckets) == 5
    assert sum(tensor.size_bytes for tensor in buckets) == 4 * 25_557_032


@pytest.mark.parametrize(
    ("kernel", "label"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "allgather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reducescatter"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "broadcast"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "sendrecv"),
        ("ncclSymkDevKernel_AllReduce_RSxLDMC_AGxST_sum_bf16(ncclSymkDevWorkArgs)", "allreduce"),
    ],
)
def test_collectives_are_told_from_their_kernels_names(tmp_path, kernel, label):
    profile = Profile()
    profile.step(0, START, 900)
    profile.kernel(kernel, START + 20, 30, launched=START + 10, stream=COLLECTIVES)
    trace = read([profile.write(tmp_path / "trace.json")])
    assert [tensor.name for tensor in trace.tensors] == [f"{label}#0"]


def test_what_nccl_runs_for_a_group_of_one_rank_is_a_collective(tmp_path):
    """Its name is not that of NCCL's other kernels; the profiler notes what it is part of."""
    profile = small_job()
    name = "__nv_static_32__b4148644_10_onerank_cu_fdf47990__ZN43_GLOBAL__N__oneRankReduceI13FuncPreMulSumIfEEEvPvS3_mmb"
    note = {"Collective name": "allreduce", "In msg nelems": 250, "dtype": "Float", "Group size": 1, "Process Group Ranks": "[0]"}
    profile.kernel(name, START + 170, 5, launched=START + 165, stream=COLLECTIVES, **note)
    trace = read([profile.write(tmp_path / "rank0.json", header=distributed(0, 1))])
    event = one(trace, name)
    assert trace.events.kind[event] == EventKind.COLLECTIVE
    assert trace.events.collective_kind[event] == CollectiveKind.ALL_REDUCE
    assert trace.events.size_bytes[event] == 1000


class TestCyclesOfOneProcess:
    """`tensorboard_trace_handler` writes a file for each profiling cycle, named by host, process and time."""

    def cycles(self, folder, **second):
        small_job().write(folder / "node_100.1700000000000.pt.trace.json")
        small_job(shift_us=1e6, **second).write(folder / "node_100.1700000001000.pt.trace.json")
        return folder

    def test_they_are_no_ranks(self, tmp_path):
        with pytest.raises(InputError, match=r"1700000001000.pt.trace.json: a second profiling cycle of the process of node_100"):
            import_trace([self.cycles(tmp_path)])

    def test_nor_are_they_where_the_rank_is_known(self, tmp_path):
        for number in range(2):
            profile = small_job(shift_us=1e6 * number)
            profile.write(tmp_path / f"cycle{number}.json", header=distributed(0, 1))
        with pytest.raises(InputError, match=r"a second profiling cycle of the process of cycle0\.json"):
            import_trace([tmp_path])

    def test_each_can_be_imported_alone(self, tmp_path):
        folder = self.cycles(tmp_path)
        assert all(import_trace([path]).meta.ranks == 1 for path in folder.iterdir())

    def test_ranks_that_say_so_are_ranks(self, tmp_path):
        for rank in range(2):
            small_job(shift_us=1e6 * rank).write(tmp_path / f"rank{rank}.json")
        assert import_trace([tmp_path]).meta.ranks == 2
