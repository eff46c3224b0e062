"""What is found to have waited for what within a rank."""

from functools import partial

import numpy as np
import pytest
from importer_kit import shared_trace
from kineto_files import AUTOGRAD, START, STREAM, Profile, needs, one, small_job

from dpro_search.collect.readers.kineto.dependencies import NAME
from dpro_search.collect.readers.kineto.importer import read
from dpro_search.collect.trace import DependencyKind, EventKind
from tests.every_case import every_case


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


@every_case(
    "call",
    [
        *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize", "cuCtxSynchronize"),
        *("cudaStreamSynchronize_ptsz", "musaDeviceSynchronize", "muEventSynchronize", "cnrtQueueSync", "cnrtSyncDevice"),
        *("aclrtSynchronizeStreamWithTimeout", "AscendCL@aclrtSynchronizeDevice", "aclrtSynchronizeEvent", "cnrtWaitNotifier"),
        *("urQueueFinish", "urEventWait", "piEventsWait", "zeCommandListHostSynchronize", "zeFenceHostSynchronize"),
    ],
)
def test_a_synchronising_call_needs_the_op_that_it_waited_for(tmp_path, call):
    profile = Profile()
    profile.step(0, START, 900)
    profile.kernel("gemm", START + 20, 300, launched=START + 10)
    profile.call(call, START + 30, 293)
    trace = read([profile.write(tmp_path / "trace.json")])
    assert needs(trace, DependencyKind.SYNC) == {("gemm", call)}


@pytest.mark.parametrize("call", ["urEnqueueEventsWait", "cnrtQueueWaitNotifier", "aclrtStreamWaitEvent", "cudaStreamQuery"])
def test_a_call_that_lets_a_stream_wait_or_only_asks_does_not_block_the_host(tmp_path, call):
    profile = Profile()
    profile.step(0, START, 900)
    profile.kernel("gemm", START + 20, 300, launched=START + 10)
    profile.call(call, START + 30, 293)
    assert not needs(read([profile.write(tmp_path / "trace.json")]), DependencyKind.SYNC)


@pytest.mark.parametrize("vendor", ["xpu", "privateuse1", "mtia", "mlu"])
def test_calls_and_copies_in_the_categories_of_any_vendor_are_read(tmp_path, vendor):
    profile = Profile()
    profile.step(0, START, 900)
    profile.kernel("copy", START + 20, 300, launched=START + 10, cat="gpu_memcpy")
    profile.call("anyStreamSynchronize", START + 30, 293)
    for record in profile.records:
        record["cat"] = {"cuda_runtime": f"{vendor}_runtime", "gpu_memcpy": f"{vendor}_memcpy"}.get(record["cat"], record["cat"])
    trace = read([profile.write(tmp_path / "trace.json")])
    assert needs(trace, DependencyKind.LAUNCH) == {("cudaLaunchKernel", "copy")}
    assert needs(trace, DependencyKind.SYNC) == {("copy", "anyStreamSynchronize")}


@pytest.mark.parametrize("call", ["urEnqueueEventsWait", "cnrtQueueWaitNotifier", "aclrtStreamWaitEvent", "cudaStreamWaitEvent"])
def test_streams_wait_for_each_other_whatever_the_vendor_calls_it(tmp_path, call):
    profile = Profile()
    profile.step(0, START, 900)
    profile.kernel("compute", START + 20, 300, launched=START + 10)
    profile.call(call, START + 20, 1)
    profile.kernel("copy", START + 322, 50, launched=START + 30, stream=9)
    assert needs(read([profile.write(tmp_path / "trace.json")]), DependencyKind.EVENT) == {("compute", "copy")}


def test_a_copy_from_pageable_memory_blocks_its_call_a_pinned_one_does_not(tmp_path):
    profile = Profile()
    profile.step(0, START, 2000)
    copy = partial(profile.kernel, cat="gpu_memcpy", call="cudaMemcpyAsync", bytes=1 << 20)
    copy("Memcpy HtoD (Pageable -> Device)", START + 30, 400, launched=START + 10, call_us=430)
    copy("Memcpy HtoD (Pinned -> Device)", START + 530, 400, launched=START + 510, call_us=430)
    trace = read([profile.write(tmp_path / "trace.json")])
    assert needs(trace, DependencyKind.SYNC) == {("Memcpy HtoD (Pageable -> Device)", "cudaMemcpyAsync")}


@pytest.mark.parametrize("before", [0, 900], ids=["all launched in the window", "most launched before the window"])
def test_a_launch_into_a_full_queue_waits_for_the_device(tmp_path, before):
    """The host of a GPU-bound job is a thousand launches ahead: then no call that launched them need be in the profile."""
    profile = Profile()
    profile.step(0, START, 200_000)
    for i in range(1023):
        launched = START + 10 + 2 * i if i >= before else None
        profile.kernel("filler", START + 20_000 + 100 * i, 100, launched=launched, call_us=1)
    profile.kernel("blocked", START + 20_000 + 102_300, 10, launched=START + 10_000, call_us=10_103)
    trace = read([profile.write(tmp_path / "trace.json")])
    dependencies = trace.dependencies
    waits = dependencies.kind == DependencyKind.SYNC
    assert trace.events.end_us[dependencies.source[waits]] - trace.events.start_us[one(trace, "blocked")] == pytest.approx(
        [-102_200]
    )


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


def test_dlrm_what_was_launched_before_the_window_is_told():
    assert [text for text in shared_trace("kineto_dlrm_8ranks").meta.warnings if "before the profiler's window" in text] == [
        "2 ranks (1, 3): 64 device ops were launched before the profiler's window: they belong to no step"
    ]


def test_gpu_bound_convnet_its_host_waits_for_the_full_queue():
    trace = shared_trace("kineto_single/convnet_v100_ns_timestamps.json.gz")
    waits = trace.dependencies.kind == DependencyKind.SYNC
    assert waits.sum() > 1000


def two_streams(profile: Profile, number: int, *, computes_us: float, begins_us: float = 322.0) -> None:
    """A step in which a copy on another stream may wait for compute, after which it begins if that takes 300 us."""
    begin = START + 1000 * number
    profile.step(number, begin, 900)
    profile.kernel("compute", begin + 20, computes_us, launched=begin + 10)
    profile.call("cudaStreamWaitEvent", begin + 20, 1)
    profile.kernel("copy", begin + begins_us, 50, launched=begin + 30, stream=9)


def event_waits(profile: Profile, tmp_path) -> int:
    trace = read([profile.write(tmp_path / "trace.json")])
    return int((trace.dependencies.kind == DependencyKind.EVENT).sum())


def test_a_wait_that_most_steps_show_holds_in_those_that_it_did_not_delay(tmp_path):
    profile = Profile()
    for number in range(3):
        two_streams(profile, number, computes_us=300)
    two_streams(profile, 3, computes_us=5, begins_us=40)
    assert event_waits(profile, tmp_path) == 4


def test_a_coincidence_in_few_of_the_steps_is_no_wait(tmp_path):
    profile = Profile()
    two_streams(profile, 0, computes_us=300)
    for number in range(1, 4):  # as late, but compute had long ended
        two_streams(profile, number, computes_us=150)
    assert event_waits(profile, tmp_path) == 0


def test_a_coincidence_that_one_step_contradicts_is_no_wait(tmp_path):
    profile = Profile()
    for number in range(3):
        two_streams(profile, number, computes_us=300)
    two_streams(profile, 3, computes_us=500)
    assert event_waits(profile, tmp_path) == 0


@pytest.mark.parametrize(("recorded_us", "waits"), [(15, 1), (5, 0)])
def test_a_stream_waits_for_what_an_event_was_recorded_for(tmp_path, recorded_us, waits):
    profile = Profile()
    profile.call("cudaEventRecord", START + recorded_us, 1)
    two_streams(profile, 0, computes_us=300)
    assert event_waits(profile, tmp_path) == waits


def synchronised(profile: Profile, tmp_path) -> set[tuple[str, str]]:
    return needs(read([profile.write(tmp_path / "trace.json")]), DependencyKind.SYNC)


def test_a_call_did_not_wait_for_a_stream_that_was_busy_when_it_returned(tmp_path):
    profile = Profile()
    profile.step(0, START, 900)
    profile.kernel("awaited", START + 20, 100, launched=START + 10)
    profile.kernel("still running", START + 40, 300, launched=START + 30, stream=9)
    profile.call("cudaStreamSynchronize", START + 50, 74)
    assert synchronised(profile, tmp_path) == {("awaited", "cudaStreamSynchronize")}


def test_a_call_waits_for_the_same_stream_in_all_steps(tmp_path):
    """In the first step, another stream's op ends nearer to the return; the second tells."""
    profile = Profile()
    for number, chance_us in enumerate((105, 60, 30)):
        begin = START + 1000 * number
        profile.step(number, begin, 900)
        profile.kernel("awaited", begin + 20, 100, launched=begin + 10)
        profile.kernel("chance", begin + 20, chance_us, launched=begin + 15, stream=9)
        profile.call("cudaStreamSynchronize", begin + 30, 99)
    assert synchronised(profile, tmp_path) == {("awaited", "cudaStreamSynchronize")}


def test_a_call_after_a_copy_waits_for_the_copy(tmp_path):
    profile = Profile()
    profile.step(0, START, 900)
    profile.kernel("compute", START + 20, 104, launched=START + 10)
    copy = partial(profile.kernel, cat="gpu_memcpy", call="cudaMemcpyAsync", bytes=8)
    copy("Memcpy DtoH (Device -> Pageable)", START + 110, 5, launched=START + 20, stream=9)
    profile.call("cudaStreamSynchronize", START + 30, 99)
    assert synchronised(profile, tmp_path) == {("Memcpy DtoH (Device -> Pageable)", "cudaStreamSynchronize")}


def test_a_call_that_found_nothing_to_wait_for_has_the_stream_of_its_threads_other_calls(tmp_path):
    profile = Profile()
    profile.step(0, START, 900)
    profile.kernel("awaited", START + 20, 100, launched=START + 10)
    profile.call("cudaStreamSynchronize", START + 30, 93)
    profile.kernel("done", START + 140, 10, launched=START + 130)
    profile.kernel("of another stream", START + 160, 10, launched=START + 150, stream=9)
    profile.call("cudaStreamSynchronize", START + 250, 3)
    assert synchronised(profile, tmp_path) == {("awaited", "cudaStreamSynchronize"), ("done", "cudaStreamSynchronize")}


def test_a_call_that_was_not_blocked_waited_for_no_event(tmp_path):
    profile = Profile()
    profile.step(0, START, 900)
    profile.kernel("gemm", START + 20, 30, launched=START + 10)
    profile.call("cudaEventSynchronize", START + 49, 3)
    assert synchronised(profile, tmp_path) == set()


def late_copies(tmp_path, ends_us: list[float], begins_us: list[float]) -> int:
    """Inferred waits of steps in which a copy on another stream begins late, without a call that lets its stream wait."""
    profile = Profile()
    for number, (end_us, begin_us) in enumerate(zip(ends_us, begins_us, strict=True)):
        begin = START + 1000 * number
        profile.step(number, begin, 900)
        profile.kernel("compute", begin + 20, end_us - 20, launched=begin + 10)
        profile.kernel("copy", begin + begin_us, 50, launched=begin + 30, stream=9)
    trace = read([profile.write(tmp_path / "trace.json")])
    return int((trace.dependencies.kind == DependencyKind.INFERRED).sum())


@every_case(
    ("ends_us", "begins_us", "waits"),
    [
        ([300, 310, 290, 305, 320], [302, 313, 291, 306, 324], 5),
        ([300, 310, 290, 305, 40], [302, 313, 291, 306, 45], 5),  # one step has nothing to wait for
        ([300, 310, 290, 305, 320], [302, 313, 291, 306, 400], 5),  # one step waits for something else too
        ([300, 310, 290, 305, 320], [302, 313, 291, 500, 400], 0),  # a coincidence in three of five steps
        ([300, 310, 290, 305, 320], [302, 313, 291, 306, 200], 0),  # one step contradicts
        ([300, 310], [302, 313], 0),  # too few steps to tell
        ([44, 54, 34, 44, 49], [45, 57, 36, 46, 52], 0),  # begins soon after its launch
    ],
)
def test_a_wait_that_no_call_shows_is_inferred_from_what_repeats(tmp_path, ends_us, begins_us, waits):
    assert late_copies(tmp_path, ends_us, begins_us) == waits


def test_an_op_that_begins_at_the_same_time_after_its_launch_waits_for_nothing(tmp_path):
    """Its launch explains it better than the end of the other op, which varies more."""
    assert late_copies(tmp_path, [300, 312, 307, 302, 311], [313, 313, 313, 314, 313]) == 0


def test_the_same_order_in_every_layer_is_evidence_too(tmp_path):
    profile = Profile()
    profile.step(0, START, 10_000)
    for layer in range(8):
        begin, takes_us = START + 1000 * layer, 100 + 7 * layer
        profile.kernel("gemm", begin + 20, takes_us, launched=begin + 10)
        profile.kernel("norm", begin + 22 + takes_us, 50, launched=begin + 30, stream=9)
    assert needs(read([profile.write(tmp_path / "trace.json")]), DependencyKind.INFERRED) == {("gemm", "norm")}


def silent_host(tmp_path, *, ends_us: list[float], returns_us: list[float], span: str) -> set[tuple[str, str]]:
    """The op that a host is inferred to wait for: it launches a kernel, then records at most a span until it goes on."""
    profile = Profile()
    for number, (end_us, return_us) in enumerate(zip(ends_us, returns_us, strict=True)):
        begin = START + 10_000 * number
        profile.step(number, begin, 9_900)
        profile.kernel("compute", begin + 40, end_us - 40, launched=begin + 10)
        if span:
            profile.op(span, begin + 20, return_us - 20)
        profile.kernel("update", begin + return_us + 20, 50, launched=begin + return_us)
        profile.call("cudaDeviceSynchronize", begin + return_us + 10, 65)
    return needs(read([profile.write(tmp_path / "trace.json")]), DependencyKind.INFERRED)


def test_a_host_that_asks_again_and_again_may_wait_for_an_op_before_the_last_one_launched(tmp_path):
    profile = Profile()
    for number, (end_us, return_us) in enumerate(zip(VARYING, AFTER_IT, strict=True)):
        begin = START + 10_000 * number
        profile.step(number, begin, 9_900)
        profile.kernel("awaited", begin + 40, end_us - 40, launched=begin + 10)
        profile.kernel("still running", begin + end_us, 2000, launched=begin + 20)
        asked_us = np.arange(begin + 50, begin + return_us, 100)
        for at_us, until_us in zip(asked_us, np.append(asked_us[1:] - 1, begin + return_us), strict=True):
            profile.call("cudaEventQuery", float(at_us), float(until_us - at_us))
        profile.kernel("update", begin + end_us + 2000, 50, launched=begin + return_us)
        profile.call("cudaDeviceSynchronize", begin + return_us + 10, end_us + 2050 - return_us)
    assert needs(read([profile.write(tmp_path / "trace.json")]), DependencyKind.INFERRED) == {("awaited", NAME)}


VARYING, AFTER_IT = [4000, 4100, 3950, 4020, 4050], [4021, 4120, 3972, 4040, 4071]


@pytest.mark.parametrize("span", ["", "experts::read_counts"])
def test_a_host_that_goes_on_a_constant_time_after_a_kernel_waited_for_it(tmp_path, span):
    assert silent_host(tmp_path, ends_us=VARYING, returns_us=AFTER_IT, span=span) == {("compute", NAME)}


@pytest.mark.parametrize(
    ("ends_us", "returns_us", "span"),
    [
        (VARYING, AFTER_IT, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"),  # loads its input
        (VARYING, [4420, 4420, 4420, 4421, 4420], ""),  # work that takes the same time in all steps
        (VARYING, [4021, 4120, 3972, 4840, 4671], ""),  # three of five steps
        (VARYING, [4021, 4120, 3972, 4040, 3800], ""),  # went on before the end in one step
        (VARYING[:2], AFTER_IT[:2], ""),  # too few steps
        ([2000, 2050, 1975, 2010, 2025], AFTER_IT, ""),  # ended long before
    ],
)
def test_what_may_be_the_hosts_own_work_is_no_poll(tmp_path, ends_us, returns_us, span):
    assert silent_host(tmp_path, ends_us=ends_us, returns_us=returns_us, span=span) == set()
