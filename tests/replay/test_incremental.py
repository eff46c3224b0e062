"""After any changes, the mended times are those of a full replay of the changed graph."""

from dataclasses import replace

import numpy as np
import pytest
from graphs import assert_equal_times, replay_graphs
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from dpro_search.errors import GraphError, InputError
from dpro_search.replay.engine import Engine
from dpro_search.replay.incremental import IncrementalReplay
from dpro_search.replay.reference import replay_reference
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import OrderPolicy, csr

POSITIVE = st.sampled_from([1.0, 1.0, 2.0, 3.0, 0.1, 0.7])
MENDABLE = (OrderPolicy.PROGRAM, OrderPolicy.FIFO, OrderPolicy.FIFO, OrderPolicy.UNBOUNDED)


@st.composite
def rewiring(draw, graph):
    """New predecessors for some ops; a cycle may come of it."""
    op = st.integers(0, len(graph) - 1)
    return draw(st.dictionaries(op, st.lists(op, max_size=3), max_size=3))


def rewired(graph, needs):
    source, destination = graph.edges()
    kept = ~np.isin(destination, list(needs))
    new = [(op, other) for other, ops in needs.items() for op in ops]
    source = np.append(source[kept], np.array([op for op, _ in new], np.int32))
    destination = np.append(destination[kept], np.array([op for _, op in new], np.int32))
    ptr, idx = csr(destination, source, len(graph))
    return replace(graph, pred_ptr=ptr, pred_idx=idx)


def check(graph, data, durations, rewire=False):
    try:
        engine = Engine(graph)
    except GraphError:
        assume(False)
    incremental = IncrementalReplay(engine, sweep_after=data.draw(st.sampled_from([1, 3, None])))
    for _ in range(data.draw(st.integers(1, 4))):
        ops = data.draw(st.lists(st.integers(0, len(graph) - 1), min_size=1, max_size=3, unique=True))
        values = [data.draw(durations) for _ in ops]
        needs = data.draw(rewiring(graph)) if rewire else {}
        duration = graph.duration_us.copy()
        duration[ops] = values
        changed = replace(rewired(graph, needs), duration_us=duration)
        try:
            expected = replay_reference(changed)
        except GraphError:
            event("deadlock after the change")
            with pytest.raises(GraphError):
                incremental.change(ops, values, needs=needs)
            expected = replay_reference(graph)
        else:
            graph = changed
            assert incremental.change(ops, values, needs=needs) == expected.end_us.max()
            event("mended" if incremental.mended < len(graph) else "replayed in full")
        assert_equal_times(incremental.times(), expected)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(replay_graphs(policies=MENDABLE, durations=POSITIVE, fluid=False), st.data())
def test_graphs_that_can_be_mended(graph, data):
    check(graph, data, POSITIVE)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(replay_graphs(policies=MENDABLE, durations=POSITIVE, fluid=False), st.data())
def test_dependencies_that_change(graph, data):
    check(graph, data, POSITIVE, rewire=True)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(replay_graphs(), st.data())
def test_all_others_fall_back_to_a_full_replay(graph, data):
    check(graph, data, st.sampled_from([0.0, 1.0, 2.0]))


def test_a_bad_duration_changes_nothing():
    graph = GraphBuilder()
    device = graph.add_device()
    first = graph.add_op(device, 1.0)
    graph.add_op(device, 2.0, after=[first])
    incremental = IncrementalReplay(Engine(graph.build()))
    with pytest.raises(InputError, match="must be a number >= 0, not -1"):
        incremental.change([1], [-1.0])
    with pytest.raises(InputError, match="no op 7 among 2"):
        incremental.change(needs={7: [0]})
    assert incremental.change([1], [4.0]) == 5.0


def test_a_deadlock_changes_nothing():
    graph = GraphBuilder()
    device = graph.add_device()
    first = graph.add_op(device, 1.0)
    second = graph.add_op(device, 2.0, after=[first])
    incremental = IncrementalReplay(Engine(graph.build()))
    with pytest.raises(GraphError, match="cycle"):
        incremental.change([first], [9.0], needs={first: [second]})
    assert incremental.makespan_us == 3.0
    assert incremental.change([first], [2.0]) == 4.0


def test_two_tensors_are_fused():
    """One all-reduce takes over the other's tensor: it needs both gradients, and both updates need it."""
    graph = GraphBuilder()
    compute, network = graph.add_device(), graph.add_device()
    gradient = [graph.add_op(compute, 10.0)]
    gradient.append(graph.add_op(compute, 10.0, after=gradient))
    reduced = [graph.add_op(network, 20.0, after=[op]) for op in gradient]
    update = [graph.add_op(compute, 1.0, after=[op]) for op in reduced]
    incremental = IncrementalReplay(Engine(graph.build()))
    assert incremental.makespan_us == 51.0
    needs = {reduced[0]: gradient, reduced[1]: [], update[1]: [reduced[0]]}
    assert incremental.change(reduced, [25.0, 0.0], needs=needs) == 47.0
    back = {reduced[0]: gradient[:1], reduced[1]: gradient[1:], update[1]: reduced[1:]}
    assert incremental.change(reduced, [20.0, 20.0], needs=back) == 51.0
