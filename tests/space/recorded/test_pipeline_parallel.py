"""A step of a pipeline-parallel job as a graph: what waits for what, and how near the replay comes to the recorded step."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dpro_search.collect.readers.event_table import EventTable, clocks_as_recorded
from dpro_search.collect.trace import EventKind, Role, Trace
from dpro_search.errors import GraphError, InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay import replay
from dpro_search.space.recorded.pipeline_parallel import pipeline_graph


def two_stages(*, compute_us: tuple[float, float] = (100.0, 300.0), steps: int = 1) -> Trace:
    """Stage 0 computes, sends in 10 us and pauses 5 us before its optimizer; stage 1 waits, computes, updates for 20 us."""
    table = EventTable()
    first, second = compute_us
    for step in range(steps):
        t = 1000.0 * step
        second += 10.0 * step
        arrived = first + 10.0
        for name, kind, rank, stream, start, end, collective in (
            ("forward-compute 0", EventKind.KERNEL, 0, 0, 0.0, first, -1),
            ("forward-send 0", EventKind.COLLECTIVE, 0, 1, first, arrived, 2 * step),
            ("grads-reduce-scatter 0", EventKind.COLLECTIVE, 0, 0, arrived + 5.0, arrived + second + 30.0, 2 * step + 1),
            ("forward-recv 0", EventKind.COLLECTIVE, 1, 2, 0.0, arrived, 2 * step),
            ("forward-compute 0", EventKind.KERNEL, 1, 0, arrived, arrived + second, -1),
            ("grads-reduce-scatter 0", EventKind.COLLECTIVE, 1, 0, arrived + second, arrived + second + 50.0, 2 * step + 1),
        ):
            times = {"start_us": t + start, "end_us": t + end}
            role = Role.FORWARD if kind is EventKind.KERNEL else Role.UNKNOWN
            table.add(name, kind, rank=rank, stream=stream, step=step, collective=collective, role=role, **times)
    return table.trace(
        format="test",
        framework="test",
        comm="pipeline",
        clock=clocks_as_recorded(2, "test"),
        steps=[(rank, step, 1000.0 * step, 1000.0 * step + 500) for rank in (0, 1) for step in range(steps)],
        dropped=Counter(),
    )


def test_a_step_is_replayed_from_its_own_durations():
    # The receiver waits 100 us, the message takes 10, the collective 30 from the last part's start, stage 1's tail 20.
    assert replay(pipeline_graph(two_stages(), [0])).iteration_us == pytest.approx(100 + 10 + 300 + 30 + 20)


def test_waiting_is_no_part_of_a_transfer():
    graph = pipeline_graph(two_stages(), [0])
    lengths = {graph.name(i): float(graph.duration_us[i]) for i in range(len(graph))}
    assert lengths["forward-recv 0"] == lengths["forward-send 0"] == pytest.approx(10.0)
    assert lengths["tail of grads-reduce-scatter 0"] == pytest.approx(20.0)
    assert lengths["before grads-reduce-scatter 0"] == pytest.approx(5.0)


def test_what_an_operation_does_is_kept_in_the_graph():
    graph = pipeline_graph(two_stages(), [0])
    kinds = {graph.name(i): OpKind(int(graph.kind[i])) for i in range(len(graph))}
    assert kinds["forward-compute 0"] is OpKind.FORWARD
    assert kinds["forward-send 0"] is OpKind.COMM
    assert kinds["before grads-reduce-scatter 0"] is OpKind.HOST


def test_launch_delays_can_be_left_out():
    graph = pipeline_graph(two_stages(), [0], launch_delays=False)
    assert not any(graph.name(i).startswith("before ") for i in range(len(graph)))


def test_several_steps_give_the_median_and_a_sample_each():
    graph = pipeline_graph(two_stages(steps=3), [0, 1, 2])
    compute = [i for i in range(len(graph)) if graph.duration_us[i] == 310.0]
    assert len(compute) == 1
    assert graph.samples_us[:, compute[0]].tolist() == [300.0, 310.0, 330.0]


def test_a_step_that_was_not_recorded():
    with pytest.raises(InputError, match="step 5 was not recorded; there are 1, from 0 to 0"):
        pipeline_graph(two_stages(), [5])
    with pytest.raises(InputError, match="no step to build a graph from"):
        pipeline_graph(two_stages(), [])


def test_steps_of_different_operations_are_not_mixed():
    trace = two_stages(steps=2)
    keep = np.arange(len(trace.events)) != len(trace.events) - 1
    with pytest.raises(GraphError, match="step 1 does not consist of the same operations as step 0"):
        pipeline_graph(replace(trace, events=trace.events.select(keep)), [0, 1])
