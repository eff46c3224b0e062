"""Kineto profiles: real ones of GPU jobs, and written ones for each trap that real ones have shown."""

import gzip
import json
from functools import partial

import numpy as np
import pytest
from importer_kit import ImporterConformance, check_trace, plain, shared_traces
from kineto_files import AUTOGRAD, COLLECTIVES, MAIN, STREAM, Profile, distributed, small_job

from dpro_search.collect.readers import kineto, kineto_events
from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.readers.kineto import IMPORTER, read
from dpro_search.collect.readers.kineto_events import read_kineto_file
from dpro_search.collect.trace import DependencyKind, EventKind, Trace
from dpro_search.errors import InputError

START = 1_700_000_000_000_000


def needs(trace: Trace, kind: DependencyKind) -> set[tuple[str, str]]:
    """Names of source and target."""
    found = trace.dependencies
    name = [trace.names[i] for i in trace.events.name.tolist()]
    return {(name[s], name[t]) for s, t, k in zip(found.source, found.target, found.kind, strict=True) if k == kind}


def one(trace: Trace, name: str) -> int:
    (event,) = np.flatnonzero(trace.events.name == trace.names.index(name))
    return int(event)


class TestConformance(ImporterConformance):
    importer = IMPORTER

    @pytest.fixture
    def files(self, tmp_path):
        return [small_job().write(tmp_path / "trace.json", indent=1)]


class TestConformanceOfCollectives(ImporterConformance):
    """Two ranks, of which one file is damaged."""

    importer = IMPORTER

    @pytest.fixture
    def files(self, tmp_path):
        return [collective_job(rank).write(tmp_path / f"rank{rank}.json", header=distributed(rank, 2)) for rank in range(2)]


def collective_job(rank: int, *, late_us: float = 0.0, shift_us: float = 0.0, parts: int = 10, **more) -> Profile:
    """All-reduces that end together; rank 1 posts `late_us` after rank 0."""
    profile = Profile(pid=100 + rank, device=rank)
    begin = START + shift_us
    profile.step(0, begin, 1000.0 * parts)
    for part in range(parts):
        at, late = begin + 1000 * part, late_us * rank + 7 * part * (1 - rank)
        profile.kernel("gemm", at + 20, 50, launched=at + 10)
        profile.call("cudaStreamWaitEvent", at + 75, 1)
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
        begins = at + 100 + late
        profile.kernel(name, begins, at + 900 + 0.5 * rank - begins, launched=at + 90, stream=COLLECTIVES, **more)
    return profile


# --- the records of a file


def test_events_become_streams_threads_kinds_and_steps(tmp_path):
    trace = read([small_job().write(tmp_path / "trace.json")])
    check_trace(trace)
    events = trace.events
    kinds = {EventKind(kind).name: number for kind, number in zip(*np.unique(events.kind, return_counts=True), strict=True)}
    assert kinds == {"OP": 3, "KERNEL": 6, "RUNTIME": 6}
    assert set(events.stream[events.kind == EventKind.KERNEL]) == {STREAM}
    assert set(events.stream[events.kind != EventKind.KERNEL]) == {-1}
    assert set(events.step) == {0, 1, 2}
    assert trace.meta.dropped == {"device copies of annotations": 3}


@pytest.mark.parametrize("spelling", ["old", "new", "bare", "indented", "zipped"])
def test_all_spellings_of_one_job_give_one_trace(tmp_path, spelling):
    profile = small_job(old=spelling == "old")
    path = tmp_path / ("trace.gz" if spelling == "zipped" else "trace.json")
    trace = read([profile.write(path, bare=spelling == "bare", indent=2 if spelling == "indented" else None)])
    expected = read([small_job().write(tmp_path / "plain.json")])
    for column in ("kind", "stream", "start_us", "end_us", "step"):
        np.testing.assert_array_equal(getattr(trace.events, column), getattr(expected.events, column))
    assert needs(trace, DependencyKind.LAUNCH) == {("cudaLaunchKernel", "gemm"), ("cudaLaunchKernel", "relu")}


def test_iterations_are_measured_between_device_ends_not_host_marks(tmp_path):
    profile = small_job()
    for record in profile.records:  # the host runs ahead: its steps are short
        if record["name"].startswith("ProfilerStep"):
            record["dur"] = 60
    trace = read([profile.write(tmp_path / "trace.json")])
    np.testing.assert_allclose(np.diff(trace.steps.end_us), 200)


def test_nanoseconds_are_told_from_microseconds_record_by_record(tmp_path):
    profile = small_job()
    for record in profile.records[::2]:
        record["ts"], record["dur"] = int(record["ts"]) * 1000, record["dur"] * 1000
    trace = read([profile.write(tmp_path / "trace.json")])
    expected = read([small_job().write(tmp_path / "plain.json")])
    np.testing.assert_allclose(trace.events.start_us, expected.events.start_us, atol=0.001)
    np.testing.assert_allclose(trace.events.end_us, expected.events.end_us, atol=0.01)


def test_files_are_read_in_pieces_of_any_size(tmp_path, monkeypatch):
    path = small_job(steps=30).write(tmp_path / "trace.json", indent=1, header={"deviceProperties": [{"id": 0}, {"id": 1}]})
    whole = read_kineto_file(path)
    for size in (300, 1000, 7777):
        monkeypatch.setattr(kineto_events, "_PIECE", size)
        pieces = read_kineto_file(path)
        assert pieces.header == whole.header
        assert pieces.dropped == whole.dropped
        for column in ("category", "name", "thread", "start_us", "duration_us", "correlation"):
            np.testing.assert_array_equal(getattr(pieces, column), getattr(whole, column))


def test_fields_before_and_after_the_records_are_read(tmp_path):
    path = small_job().write(tmp_path / "trace.json", header=distributed(3, 8))
    assert read_kineto_file(path).header["distributedInfo"]["rank"] == 3
    assert read_kineto_file(path).header["traceName"] == "trace.json"


def test_what_profilers_write_against_the_rules_of_json_is_mended(tmp_path):
    text = small_job().write(tmp_path / "trace.json").read_bytes()
    text = text.replace(b'"schemaVersion": 1', b'"schemaVersion": 1, "path": "C:\\Users\\x"')
    text = text.replace(b'"name": "gemm"', b'"name": "gemm \xff\\s"', 1).replace(
        b'"device": 0', b'"x": NaN, "y": -inf, "device": 0', 2
    )
    (tmp_path / "trace.json").write_bytes(text)
    trace = read([tmp_path / "trace.json"])
    assert len(trace.events) == 15
    assert "gemm \ufffd\\s" in trace.names


def test_records_of_wrong_types_are_counted_and_left_out(tmp_path):
    profile = small_job()
    profile.records[4]["ts"] = "soon"
    profile.records[5]["dur"] = None
    profile.records[9]["dur"] = -1
    profile.records.append({"ph": "X", "cat": "mystery", "name": "x", "ts": 1, "dur": 1})
    dropped = read([profile.write(tmp_path / "trace.json")]).meta.dropped
    expected = {
        "damaged records": 1,
        "spans without a start or a duration": 1,
        "spans with an impossible start or duration": 1,
        "spans of category 'mystery'": 1,
        "device copies of annotations": 3,
    }
    assert dropped == expected


def test_a_file_that_ends_in_the_middle_keeps_its_whole_records(tmp_path):
    data = small_job().write(tmp_path / "trace.json").read_bytes()
    (tmp_path / "trace.json").write_bytes(data[: int(len(data) * 0.7)])
    trace = read([tmp_path / "trace.json"])
    assert 5 < len(trace.events) < 15
    assert trace.meta.dropped["records cut off at the end of the file"] == 1


def test_a_compressed_file_that_ends_in_the_middle_keeps_what_can_be_unpacked(tmp_path):
    data = gzip.compress(small_job(steps=300).write(tmp_path / "trace.json").read_bytes())
    (tmp_path / "trace.json").write_bytes(data[: len(data) // 2])
    assert 100 < len(read([tmp_path / "trace.json"]).events) < 1500


def test_steps_without_marks_end_with_the_optimizer(tmp_path):
    profile = small_job()
    profile.records = [record for record in profile.records if not record["name"].startswith("ProfilerStep")]
    for number in range(3):
        profile.op("Optimizer.step#SGD.step", START + 200 * number + 40, 20)
    trace = read([profile.write(tmp_path / "trace.json")])
    assert trace.steps.index.tolist() == [0, 1, 2]


def test_a_damaged_record_among_records_with_lists_costs_itself_only(tmp_path):
    profile = small_job()
    for record in profile.records:
        record["args"]["shapes"] = [{"dims": [1]}, {"dims": [2]}]
    data = profile.write(tmp_path / "trace.json").read_bytes().replace(b'"name": "gemm"', b'"name": gemm', 1)
    (tmp_path / "trace.json").write_bytes(data)
    trace = read([tmp_path / "trace.json"])
    assert len(trace.events) == 14
    assert trace.meta.dropped["damaged records"] == 1


def test_a_long_text_that_is_no_list_of_records_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(kineto_events, "_PIECE", 100)
    (tmp_path / "trace.json").write_bytes(b'{"schemaVersion": 1, "traceEvents": [' + b'"cat": "kernel" ' * 5000)
    with pytest.raises(InputError, match=r"has no events \(left out: "):
        read([tmp_path / "trace.json"])


# --- what waited for what


def test_kernels_launched_before_the_window_belong_to_no_step(tmp_path):
    profile = small_job()
    profile.kernel("early", START - 40, 10, launched=None, correlation=999)
    trace = read([profile.write(tmp_path / "trace.json")])
    assert trace.events.step[one(trace, "early")] == -1
    assert "1 device ops were launched before the profiler's window" in trace.meta.warnings[0]


def test_kernels_of_a_cuda_graph_without_ids_belong_to_its_launch(tmp_path):
    profile = Profile()
    for number in range(2):
        begin = START + 1000 * number
        profile.step(number, begin, 900)
        profile.call("cudaGraphLaunch", begin + 10, 20)
        for i in range(3):
            profile.kernel(f"graph kernel {i}", begin + 40 + 100 * i, 90, launched=None)
    trace = read([profile.write(tmp_path / "trace.json")])
    assert needs(trace, DependencyKind.LAUNCH) == {("cudaGraphLaunch", f"graph kernel {i}") for i in range(3)}
    assert (trace.events.step[trace.events.kind == EventKind.KERNEL] == [0, 0, 0, 1, 1, 1]).all()


def test_rocm_kernels_without_ids_are_paired_with_launches_in_order(tmp_path):
    profile = Profile()
    profile.step(0, START, 900)
    for i in range(4):
        profile.call("hipLaunchKernel", START + 10 + 20 * i, 5)
        profile.kernel(f"kernel {i}", START + 30 + 100 * i, 90, launched=None)
    trace = read([profile.write(tmp_path / "trace.json")])
    launches = trace.dependencies.kind == DependencyKind.LAUNCH
    calls = trace.events.start_us[trace.dependencies.source[launches]]
    assert np.sort(calls - calls.min()).tolist() == [0, 20, 40, 60]


def test_a_kernel_that_starts_as_another_stream_falls_idle_waited_for_it(tmp_path):
    profile = Profile()
    profile.step(0, START, 900)
    profile.kernel("compute", START + 20, 300, launched=START + 10)
    profile.call("cudaStreamWaitEvent", START + 20, 1)
    profile.kernel("copy", START + 322, 50, launched=START + 30, stream=9)
    profile.kernel("free", START + 372, 10, launched=START + 40, stream=9)
    trace = read([profile.write(tmp_path / "trace.json")])
    assert needs(trace, DependencyKind.EVENT) == {("compute", "copy")}


def test_recorded_synchronisation_is_taken_as_it_is(tmp_path):
    profile = Profile()
    profile.step(0, START, 900)
    profile.kernel("producer", START + 20, 30, launched=START + 10)
    record = profile.call("cudaEventRecord", START + 16, 1)
    profile.kernel("later", START + 60, 300, launched=START + 18)
    wait = profile.call("cudaStreamWaitEvent", START + 20, 1)
    profile.add(
        "cuda_sync", "Stream Wait Event", START + 20, 1, 9,
        {"stream": 9, "correlation": wait, "wait_on_stream": STREAM, "wait_on_cuda_event_record_corr_id": record}, pid=0,
    )  # fmt: skip
    profile.kernel("consumer", START + 60, 50, launched=START + 30, stream=9)
    trace = read([profile.write(tmp_path / "trace.json")])
    assert needs(trace, DependencyKind.EVENT) == {("producer", "consumer")}


@pytest.mark.parametrize("call", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize"])
def test_a_synchronising_call_needs_the_op_that_it_waited_for(tmp_path, call):
    profile = Profile()
    profile.step(0, START, 900)
    profile.kernel("gemm", START + 20, 300, launched=START + 10)
    profile.call(call, START + 30, 293)
    trace = read([profile.write(tmp_path / "trace.json")])
    assert needs(trace, DependencyKind.SYNC) == {("gemm", call)}


def test_a_copy_from_pageable_memory_blocks_its_call_a_pinned_one_does_not(tmp_path):
    profile = Profile()
    profile.step(0, START, 2000)
    copy = partial(profile.kernel, cat="gpu_memcpy", call="cudaMemcpyAsync", bytes=1 << 20)
    copy("Memcpy HtoD (Pageable -> Device)", START + 30, 400, launched=START + 10, call_us=430)
    copy("Memcpy HtoD (Pinned -> Device)", START + 530, 400, launched=START + 510, call_us=430)
    trace = read([profile.write(tmp_path / "trace.json")])
    assert needs(trace, DependencyKind.SYNC) == {("Memcpy HtoD (Pageable -> Device)", "cudaMemcpyAsync")}


def test_a_launch_into_a_full_queue_waits_for_the_device(tmp_path):
    profile = Profile()
    profile.step(0, START, 200_000)
    for i in range(1023):
        profile.kernel("filler", START + 20_000 + 100 * i, 100, launched=START + 10 + 2 * i, call_us=1)
    profile.kernel("blocked", START + 20_000 + 102_300, 10, launched=START + 10_000, call_us=10_103)
    trace = read([profile.write(tmp_path / "trace.json")])
    found = trace.dependencies
    waits = found.kind == DependencyKind.SYNC
    assert trace.events.end_us[found.source[waits]] - trace.events.start_us[one(trace, "blocked")] == pytest.approx([-102_200])


def test_the_backward_thread_is_started_and_awaited_by_the_main_thread(tmp_path):
    profile = Profile()
    profile.step(0, START, 900)
    profile.op("loss", START + 10, 30)
    profile.kernel("forward", START + 30, 10, launched=START + 20)
    profile.op("autograd::engine::evaluate_function: MmBackward0", START + 100, 300, AUTOGRAD)
    profile.kernel("backward", START + 150, 10, launched=START + 140, tid=AUTOGRAD)
    profile.op("Optimizer.step#SGD.step", START + 450, 100)
    trace = read([profile.write(tmp_path / "trace.json")])
    backward = "autograd::engine::evaluate_function: MmBackward0"
    assert needs(trace, DependencyKind.HOST) == {("loss", backward), (backward, "Optimizer.step#SGD.step")}


# --- several ranks


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
    with pytest.raises(InputError, match="neither its distributedInfo nor its name says which rank it is"):
        read(paths)


def test_large_files_are_read_in_processes_with_the_same_result(tmp_path, monkeypatch):
    paths = [collective_job(rank, late_us=5).write(tmp_path / f"rank{rank}.json") for rank in range(3)]
    expected = read(paths)
    monkeypatch.setattr(kineto, "_WORTH_PROCESSES", 0)
    trace = read(paths)
    assert trace.meta == expected.meta
    np.testing.assert_array_equal(trace.events.start_us, expected.events.start_us)


def test_missing_ranks_are_told(tmp_path):
    trace = read([small_job().write(tmp_path / "trace.json", header=distributed(3, 8))])
    assert trace.meta.ranks == 1
    assert "the job has 8 ranks, of which 3 is here" in trace.meta.warnings[0]
    assert trace.meta.hosts == ("host of rank 3",)


def test_two_different_files_of_one_rank_are_refused_and_copies_count_once(tmp_path):
    paths = [
        small_job(shift_us=shift).write(tmp_path / f"{i}.json", header=distributed(0, 2)) for i, shift in enumerate((0, 0, 5e6))
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


# --- real profiles


def dlrm(shift_us: float = 0.0, rank: int = 0, folder=None) -> Trace:
    """The profiles of eight ranks, one of them with another clock."""
    paths = sorted((shared_traces() / "kineto_dlrm_8ranks").glob("*.gz"))
    if shift_us:
        value = json.loads(plain(paths[rank]))
        for record in value["traceEvents"]:
            if "ts" in record:
                record["ts"] += shift_us
        moved = folder / paths[rank].name
        moved.write_text(json.dumps(value))
        paths[rank] = moved
    return read(paths)


def test_dlrm_all_collectives_are_matched_on_all_ranks_and_end_together():
    trace = dlrm()
    parts = trace.events.select(trace.events.kind == EventKind.COLLECTIVE)
    numbers, counts = np.unique(parts.collective, return_counts=True)
    assert numbers.tolist() == list(range(8))
    assert counts.tolist() == [8] * 8
    for number in range(8):
        assert np.ptp(parts.end_us[parts.collective == number]) < 8
    assert (parts.size_bytes > 0).all()


@pytest.mark.parametrize("shift_us", [11_500_000, 1_600])
@pytest.mark.parametrize("rank", [2, 5])
def test_dlrm_a_shifted_clock_is_recovered(tmp_path, shift_us, rank):
    usual, shifted = dlrm().meta.clock, dlrm(shift_us, rank, tmp_path).meta.clock
    for other in range(8):
        expected = usual.offset_us[other] + shift_us * (other == rank)
        assert shifted.offset_us[other] == pytest.approx(expected, abs=max(usual.residual_us[other], 1.0))
    assert max(shifted.residual_us) < 10


def test_dlrm_what_was_launched_before_the_window_is_told():
    assert [text for text in dlrm().meta.warnings if "before the profiler's window" in text] == [
        f"rank {rank}: 64 device ops were launched before the profiler's window: they belong to no step" for rank in (1, 3)
    ]


@pytest.mark.parametrize(
    ("name", "steps", "iteration_us"),
    [
        ("convnet_v100_ns_timestamps", 5, 95_600),
        ("ddp_resnet50_a100_rank0of2", 3, 222_000),
        ("resnet50_v100_workers0", 6, 155_000),
        ("resnet50_v100_workers4", 6, 174_000),
        ("torchrec_a100_rank3of8", 6, 77_000),
    ],
)
def test_real_profiles_have_their_steps(name, steps, iteration_us):
    trace = read([shared_traces() / "kineto_single" / f"{name}.json.gz"])
    check_trace(trace)
    assert len(trace.steps) == steps
    assert np.median(np.diff(trace.steps.end_us)) == pytest.approx(iteration_us, rel=0.02)


def test_ddp_buckets_have_the_sizes_that_the_kernels_say():
    trace = read([shared_traces() / "kineto_single" / "ddp_resnet50_a100_rank0of2.json.gz"])
    buckets = [tensor for tensor in trace.tensors if tensor.name.startswith("allreduce")]
    assert len(buckets) == 5
    assert sum(tensor.size_bytes for tensor in buckets) == 4 * 25_557_032


def test_gpu_bound_convnet_its_host_waits_for_the_full_queue():
    trace = read([shared_traces() / "kineto_single" / "convnet_v100_ns_timestamps.json.gz"])
    waits = trace.dependencies.kind == DependencyKind.SYNC
    assert waits.sum() > 1000


def test_a_profile_without_a_device_has_the_steps_that_the_script_marked(tmp_path):
    profile = Profile()
    for number in range(3):
        profile.step(number, START + 1000 * number, 990)
        profile.op("aten::mm", START + 1000 * number + 10, 400)
        profile.op("aten::addmm", START + 1000 * number + 20, 300)
    trace = read([profile.write(tmp_path / "trace.json")])
    check_trace(trace)
    np.testing.assert_allclose(np.diff(trace.steps.end_us), 1000)


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
