"""The graph of a recorded step: what it keeps, and that changing it is like changing the job."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kineto_files import AUTOGRAD, COLLECTIVES, START, STREAM, Profile, distributed
from kineto_machine import Launch, Program, Synchronize, run, run_graph, scaled

from dpro_search.collect.readers.kineto.importer import read
from dpro_search.collect.readers.kineto.rank import CLOCK_SLACK_US
from dpro_search.collect.trace import Trace
from dpro_search.errors import GraphError, InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay import replay
from dpro_search.replay.reference import replay_reference
from dpro_search.space.recorded.ops import recorded_ops
from dpro_search.space.recorded.step_graph import graph_of_all, graph_of_step, iterations_us
from dpro_search.space.replay_graph import ReplayGraph
from tests.every_case import every_case
from tests.profiles import profiled, replay_of

HOST_BOUND: Program = [Launch("gemm", 100, 20), Launch("relu", 80, 10)]
DEVICE_BOUND: Program = [Launch("gemm", 5, 300), Launch("relu", 5, 100), Synchronize(5)]
TWO_STREAMS: Program = [
    Launch("gemm", 10, 400),
    Launch("copy", 10, 150, stream=9, waits_for=7),
    Launch("next", 10, 20),
    Synchronize(3, 9),
]


def trace_of(program: Program, tmp_path, steps: int = 5) -> Trace:
    profile, _ = run(program, steps)
    return read([profile.write(tmp_path / "trace.json")])


def recorded_graph(trace: Trace, step: int | None = None, without: Sequence[int] = ()) -> ReplayGraph:
    if step is None:
        kept = [number for number in recorded_ops(trace).steps if number not in without]
        step = replay_of(profiled(trace), steps=kept).middle_step
    return graph_of_step(recorded_ops(trace), step, without)


def iteration_us(program: Program, steps: int = 12) -> float:
    """What the machine takes, once it has settled."""
    _, ends = run(program, steps)
    return ends[-1] - ends[-2]


def with_factor(graph: ReplayGraph, chosen: np.ndarray, factor: float) -> ReplayGraph:
    return dataclasses.replace(graph, duration_us=np.where(chosen, graph.duration_us * factor, graph.duration_us))


def kernels_of(graph: ReplayGraph) -> np.ndarray:
    return graph.op_kind == OpKind.FORWARD


def host_of(graph: ReplayGraph) -> np.ndarray:
    return np.array([name.startswith("host ") for name in graph.names])


@pytest.mark.parametrize("program", [HOST_BOUND, DEVICE_BOUND, TWO_STREAMS])
def test_a_replay_as_recorded_takes_what_the_job_took(tmp_path, program):
    assert replay(recorded_graph(trace_of(program, tmp_path))).iteration_us == pytest.approx(iteration_us(program), abs=1.0)


@every_case("program", [HOST_BOUND, DEVICE_BOUND, TWO_STREAMS])
@every_case("factor", [0.25, 0.5, 2.0])
def test_other_kernel_times_change_the_replay_as_they_change_the_job(tmp_path, program, factor):
    graph = recorded_graph(trace_of(program, tmp_path))
    changed = replay(with_factor(graph, kernels_of(graph), factor)).iteration_us
    assert changed == pytest.approx(iteration_us(scaled(program, kernels=factor)), rel=0.01, abs=2.0)


@pytest.mark.parametrize("program", [HOST_BOUND, DEVICE_BOUND, TWO_STREAMS])
def test_a_faster_host_changes_the_replay_as_it_changes_the_job(tmp_path, program):
    graph = recorded_graph(trace_of(program, tmp_path))
    time_us = replay(with_factor(graph, host_of(graph), 0.5)).iteration_us
    calls_us = 4.0 * len(program) / 2  # calls are host work too, which the machine does not scale
    assert time_us == pytest.approx(iteration_us(scaled(program, host=0.5)), abs=calls_us + 1.0)


def test_host_bound_kernels_gain_nothing(tmp_path):
    graph = recorded_graph(trace_of(HOST_BOUND, tmp_path))
    assert replay(with_factor(graph, kernels_of(graph), 0.1)).iteration_us == pytest.approx(replay(graph).iteration_us)


ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"
GRAPHS: dict[str, Program] = {
    "an all-reduce before the update": [
        Launch("gemm", 0, 400),
        Launch(ALL_REDUCE, 0, 300, stream=COLLECTIVES, waits_for=STREAM),
        Launch("gemm", 0, 200),
        Launch("update", 0, 60, waits_for=COLLECTIVES),
    ],
    "two all-reduces, of which one is hidden": [
        Launch("gemm", 0, 400),
        Launch(ALL_REDUCE, 0, 100, stream=COLLECTIVES, waits_for=STREAM),
        Launch("relu", 0, 250),
        Launch(ALL_REDUCE, 0, 300, stream=COLLECTIVES, waits_for=STREAM),
        Launch("gemm", 0, 120),
        Launch("update", 0, 60, waits_for=COLLECTIVES),
    ],
    "three streams": [
        Launch("gemm", 0, 300),
        Launch("copy", 0, 250, stream=9, waits_for=STREAM),
        Launch(ALL_REDUCE, 0, 500, stream=COLLECTIVES, waits_for=9),
        Launch("relu", 0, 100),
        Launch("norm", 0, 90, waits_for=9),
        Launch("update", 0, 60, waits_for=COLLECTIVES),
    ],
    "independent streams": [Launch("gemm", 0, 400), Launch("copy", 0, 700, stream=9), Launch("relu", 0, 100)],
}


@every_case("jitter_us", [0.0, 8.0])
@every_case("changed", ["gemm", "copy", "relu", ALL_REDUCE])
@every_case("name", GRAPHS)
def test_order_between_the_streams_of_a_cuda_graph_is_inferred_from_what_repeats(tmp_path, name, changed, jitter_us):
    program = GRAPHS[name]
    profile, _ = run_graph(program, 6, jitter_us=jitter_us)
    graph = recorded_graph(read([profile.write(tmp_path / "trace.json")]))
    predicted = replay(with_factor(graph, np.array([text.startswith(f"{changed}@") for text in graph.names]), 0.1)).iteration_us
    faster = [dataclasses.replace(item, kernel_us=item.kernel_us * (0.1 if item.name == changed else 1)) for item in program]
    _, ends = run_graph(faster, 6, jitter_us=jitter_us)
    assert predicted == pytest.approx(ends[-1] - ends[-2], abs=2.0 + 2 * jitter_us)  # latencies change with their op


def polling(shown_as: str) -> Program:
    """A step in which the host polls for a kernel before it launches the next, as libraries for mixtures of experts do."""
    return [
        Launch("gemm", 10, 4000),
        Launch("notify", 10, 300),
        Synchronize(4, shown_as=shown_as),
        Launch("gemm", 60, 3000),
        Launch("update", 10, 200),
        Synchronize(5),
    ]


@every_case("jitter_us", [0.0, 60.0])
@every_case("host_jitter_us", [0.0, 4.0])
@every_case("shown_as", ["", "op", "ops", "queries", "anyRuntimeJoin", "cudaStreamSynchronize"])
def test_a_host_that_polls_gains_from_faster_kernels(tmp_path, shown_as, jitter_us, host_jitter_us):
    program = polling(shown_as)
    profile, _ = run(program, 6, jitter_us=jitter_us, host_jitter_us=host_jitter_us)
    graph = recorded_graph(read([profile.write(tmp_path / "trace.json")]))
    predicted = replay(with_factor(graph, kernels_of(graph), 0.5)).iteration_us
    assert predicted == pytest.approx(iteration_us(scaled(program, kernels=0.5)), abs=5.0 + 4 * jitter_us / 2 + 10 * host_jitter_us)


def test_a_host_may_poll_for_one_stream_while_another_runs(tmp_path):
    program: Program = [
        Launch("gemm", 10, 4000),
        Launch("notify", 10, 300, waits_for=7, stream=9),
        Launch("gemm", 10, 2000),
        Synchronize(4, stream=9, shown_as="queries"),
        Launch("update", 60, 200),
        Synchronize(5),
    ]
    profile, _ = run(program, 6, jitter_us=30.0, host_jitter_us=3.0)
    graph = recorded_graph(read([profile.write(tmp_path / "trace.json")]))
    changed = replay(with_factor(graph, kernels_of(graph), 0.5)).iteration_us
    assert changed == pytest.approx(iteration_us(scaled(program, kernels=0.5)), abs=100)


@every_case("seed", range(4))
@every_case("kernel_us", [500, 3000, 4900, 5000])
def test_work_of_the_host_that_ends_after_a_kernel_is_no_wait(tmp_path, kernel_us, seed):
    """Python that calls no op takes 5 ms to about 1 %."""
    program: Program = [Launch("gemm", 10, kernel_us), Launch("update", 5000, 200), Synchronize(5)]
    profile, _ = run(program, 6, jitter_us=20.0, host_jitter_us=50.0, seed=seed)
    graph = recorded_graph(read([profile.write(tmp_path / "trace.json")]))
    assert replay(with_factor(graph, kernels_of(graph), 0.5)).iteration_us > 5000


@pytest.mark.parametrize("program", [TWO_STREAMS, [Launch("gemm", 10, 100, stream=9), *TWO_STREAMS]])
@pytest.mark.parametrize("factor", [0.25, 2.0])
def test_order_between_streams_is_inferred_where_the_profile_lacks_the_calls(tmp_path, program, factor):
    profile, _ = run(program, 6)
    profile.records = [record for record in profile.records if record["name"] != "cudaStreamWaitEvent"]
    graph = recorded_graph(read([profile.write(tmp_path / "trace.json")]))
    changed = replay(with_factor(graph, kernels_of(graph), factor)).iteration_us
    assert changed == pytest.approx(iteration_us(scaled(program, kernels=factor)), rel=0.01, abs=2.0)


launches = st.builds(
    Launch,
    name=st.sampled_from(["gemm", "relu", "norm"]),
    host_us=st.integers(20, 200).map(float),
    kernel_us=st.integers(20, 400).map(float),
    stream=st.sampled_from([7, 9]),
)
programs = st.lists(launches | st.builds(Synchronize, host_us=st.integers(5, 50).map(float)), min_size=2, max_size=8)


def test_a_coincidence_is_no_wait(tmp_path):
    sizes = [(20.0, 7), (48.0, 7), (20.0, 9)]
    program = [Launch(name="gemm", host_us=20.0, kernel_us=us, stream=stream) for us, stream in sizes]
    program.append(Synchronize(host_us=5.0))
    graph = graph_of_step(recorded_ops(trace_of(program, tmp_path, steps=8)), 6)
    truth = iteration_us(scaled(program, kernels=0.5), 40)
    assert replay(with_factor(graph, kernels_of(graph), 0.5)).iteration_us == pytest.approx(truth, rel=0.05, abs=10.0)


def profile_tells(program: Program, factor: float) -> bool:
    """Whether no other program has the same profile, as far as clocks of host and device agree, but another time when changed.

    A profile does not say for which stream a call waits. Where both were idle already, or fell idle at one moment, nobody can tell.
    """
    gaps_us, truth = gaps_of(program), iteration_us(scaled(program, kernels=factor), 40)
    calls = [i for i, item in enumerate(program) if isinstance(item, Synchronize)]
    for streams in itertools.product((STREAM, 9), repeat=len(calls)):
        other = list(program)
        for i, stream in zip(calls, streams, strict=True):
            other[i] = dataclasses.replace(program[i], stream=stream)
        same = (np.abs(gaps_of(other) - gaps_us) <= CLOCK_SLACK_US).all()
        if same and iteration_us(scaled(other, kernels=factor), 40) != pytest.approx(truth, rel=0.01, abs=2.0):
            return False
    return True


def gaps_of(program: Program, steps: int = 8) -> np.ndarray:
    """Times from each record of a profile to the next, and its durations."""
    records = run(program, steps)[0].records
    return np.array([np.diff([r["ts"] for r in records], prepend=0.0), [r["dur"] for r in records]])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=programs, factor=st.sampled_from([0.5, 1.0, 1.5]))
def test_any_program_with_other_kernels_is_predicted(tmp_path_factory, program, factor):
    assume(any(isinstance(item, Launch) and item.stream == STREAM for item in program))
    assume(profile_tells(program, factor))
    trace = trace_of(program, tmp_path_factory.mktemp("job"), steps=8)
    graph = graph_of_step(recorded_ops(trace), 6)
    truth = iteration_us(scaled(program, kernels=factor), 40)
    assert replay(with_factor(graph, kernels_of(graph), factor)).iteration_us == pytest.approx(truth, rel=0.05, abs=10.0)


def test_the_engine_and_the_specification_agree_on_recorded_graphs(tmp_path):
    graph = graph_of_all(recorded_ops(trace_of(TWO_STREAMS, tmp_path)))
    np.testing.assert_allclose(replay(graph).times.end_us, replay_reference(graph).end_us)


def test_all_steps_replayed_in_a_row_are_the_recording(tmp_path):
    trace = trace_of(TWO_STREAMS, tmp_path)
    ops = recorded_ops(trace)
    times = replay(graph_of_all(ops)).times
    device = ops.event >= 0
    start_us = trace.events.start_us - trace.events.start_us[trace.events.step >= 0].min()
    np.testing.assert_allclose(times.end_us[device] - ops.duration_us[device], start_us[ops.event[device]], atol=1.5)


def test_an_op_that_a_step_lacks_takes_what_it_takes_in_the_others(tmp_path):
    profile, _ = run(HOST_BOUND, 5)
    extra = next(r for r in profile.records if r["name"] == "relu" and r["ts"] > profile.records[-1]["ts"] - 400)
    profile.records.remove(extra)
    ops = recorded_ops(read([profile.write(tmp_path / "trace.json")]))
    graph = graph_of_step(ops, 1)
    assert np.isfinite(graph.samples_us).all()
    assert graph.samples_us.shape == (5, len(graph))


def test_steps_that_are_left_out_leave_no_trace(tmp_path):
    profile, _ = run(HOST_BOUND, 4)
    for record in profile.records:
        if record["name"] == "gemm" and record["cat"] == "kernel" and record["ts"] > 1_700_000_000_000_000 + 550:
            record["dur"] = 70  # the last step's
    graph = recorded_graph(read([profile.write(tmp_path / "trace.json")]), without=[3])
    assert graph.samples_us.shape[0] == 3
    assert not (graph.samples_us == 70).any()


def test_the_first_step_has_no_measured_iteration(tmp_path):
    assert 0 not in iterations_us(trace_of(HOST_BOUND, tmp_path))


def test_a_step_that_was_not_recorded_is_refused(tmp_path):
    with pytest.raises(InputError, match="step 9 is not among the recorded steps 0, 1, 2, 3, 4"):
        recorded_graph(trace_of(HOST_BOUND, tmp_path), 9)


def test_a_trace_in_which_nothing_ran_in_a_step_is_refused(tmp_path):
    trace = trace_of(HOST_BOUND, tmp_path)
    empty = dataclasses.replace(trace.events, step=np.full(len(trace.events), -1))
    with pytest.raises(GraphError, match="nothing to replay"):
        recorded_ops(dataclasses.replace(trace, events=empty))


def two_ranks(tmp_path, *, ranks: int = 2, late_us: float = 300.0) -> Trace:
    """Rank 1 has `late_us` more host work before it enqueues the all-reduce, which moves data for 50 us."""
    paths = []
    for rank in range(ranks):
        profile = Profile(pid=100 + rank, device=rank)
        for number in range(12):
            begin = 1_700_000_000_000_000 + 1000 * number
            profile.step(number, begin, 990)
            enqueued = begin + 100 + late_us * rank
            profile.kernel("gemm", begin + 26, 40, launched=begin + 20)
            profile.kernel(
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL()",
                enqueued,
                begin + 450 - enqueued,
                launched=enqueued - 6,
                stream=COLLECTIVES,
            )
            profile.call("cudaStreamWaitEvent", enqueued + 2, 1)
            profile.kernel("adam", begin + 451, 20, launched=enqueued + 4)
            profile.call("cudaDeviceSynchronize", enqueued + 10, begin + 475 - enqueued - 10)
        paths.append(profile.write(tmp_path / f"rank{rank}.json", header=distributed(rank, 2)))
    return read(paths)


def test_waiting_for_a_late_rank_is_no_part_of_a_collective(tmp_path):
    graph = recorded_graph(two_ranks(tmp_path))
    parts = graph.collective >= 0
    np.testing.assert_allclose(graph.duration_us[parts], 50, atol=1.0)
    timeline = replay(graph)
    waited_us = (timeline.times.moved_us - timeline.times.start_us).reshape(timeline.iterations, -1)[3][parts]
    assert sorted(waited_us.round()) == pytest.approx([0, 300], abs=2)


def test_a_late_rank_that_is_no_longer_late_ends_the_waiting(tmp_path):
    graph = recorded_graph(two_ranks(tmp_path))
    until = np.array(["host until the launch of nccl" in name and name.endswith("@1") for name in graph.names])
    assert until.sum() == 1
    faster = dataclasses.replace(graph, duration_us=np.where(until, graph.duration_us - 300, graph.duration_us))
    timeline = replay(faster)
    waited_us = (timeline.times.moved_us - timeline.times.start_us).reshape(timeline.iterations, -1)[3][graph.collective >= 0]
    assert waited_us.max() == pytest.approx(0, abs=2)


def test_of_one_rank_alone_a_collective_keeps_its_wait(tmp_path):
    graph = recorded_graph(two_ranks(tmp_path, ranks=1))
    assert not len(graph.collective)
    moves = graph.op_kind == OpKind.COMM
    assert graph.duration_us[moves].tolist() == [350.0]


def test_a_trace_without_a_device_is_a_graph_of_its_outermost_ops(tmp_path):
    profile = Profile()
    for number in range(3):
        begin = 1_700_000_000_000_000 + 1000 * number
        profile.step(number, begin, 990)
        profile.op("aten::mm", begin + 10, 400)
        profile.op("aten::addmm", begin + 20, 300)
        profile.op("aten::relu", begin + 500, 100)
    graph = recorded_graph(read([profile.write(tmp_path / "trace.json")]))
    assert list(graph.names) == ["aten::mm@0", "aten::relu@0"]
    assert replay(graph).iteration_us == pytest.approx(1000)


def test_a_thread_that_did_nothing_for_a_step_does_not_carry_that_time(tmp_path):
    """A thread of a pool launches a copy in every other step; its own time is not the two steps since its last launch."""
    profile = Profile()
    for number in range(7):
        begin = START + 1000 * number
        profile.step(number, begin, 990)
        profile.kernel("gemm", begin + 110, 800, launched=begin + 100)
        if number % 2 == 0:
            profile.kernel("copy", begin + 60, 20, launched=begin + 50, tid=AUTOGRAD, stream=9, call="cudaMemcpyAsync")
    ops = recorded_ops(read([profile.write(tmp_path / "trace.json")]))
    assert replay(graph_of_step(ops, 4)).iteration_us == pytest.approx(1000, abs=1)
    times = replay(graph_of_all(ops)).times
    assert times.end_us[ops.on_device].max() == pytest.approx(6000 + 910 - 50, abs=60)
