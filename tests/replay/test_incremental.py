"""After any changes, the mended times are those of a full replay of the changed graph."""

from dataclasses import replace

import pytest
from graphs import assert_equal_times, replay_graphs
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from dpro_search.errors import GraphError, InputError
from dpro_search.replay.engine import Engine
from dpro_search.replay.incremental import IncrementalReplay
from dpro_search.replay.reference import replay_reference
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import OrderPolicy

POSITIVE = st.sampled_from([1.0, 1.0, 2.0, 3.0, 0.1, 0.7])
MENDABLE = (OrderPolicy.PROGRAM, OrderPolicy.FIFO, OrderPolicy.FIFO, OrderPolicy.UNBOUNDED)


def check(graph, data, durations):
    try:
        engine = Engine(graph)
    except GraphError:
        assume(False)
    incremental = IncrementalReplay(engine, sweep_after=data.draw(st.sampled_from([1, 3, None])))
    for _ in range(data.draw(st.integers(1, 4))):
        ops = data.draw(st.lists(st.integers(0, len(graph) - 1), min_size=1, max_size=3, unique=True))
        values = [data.draw(durations) for _ in ops]
        duration = graph.duration_us.copy()
        duration[ops] = values
        changed = replace(graph, duration_us=duration)
        try:
            expected = replay_reference(changed)
        except GraphError:
            event("deadlock after the change")
            with pytest.raises(GraphError):
                incremental.change(ops, values)
            expected = replay_reference(graph)
        else:
            graph = changed
            assert incremental.change(ops, values) == expected.end_us.max()
            event("mended" if incremental.mended < len(graph) else "replayed in full")
        assert_equal_times(incremental.times(), expected)


@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(replay_graphs(policies=MENDABLE, durations=POSITIVE, fluid=False), st.data())
def test_graphs_that_can_be_mended(graph, data):
    check(graph, data, POSITIVE)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
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
    assert incremental.change([1], [4.0]) == 5.0
