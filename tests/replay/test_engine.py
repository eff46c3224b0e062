"""The engine gives the times of the specification, to the last bit."""

import pytest
from graphs import POLICIES, assert_equal_times, replay_graphs
from hypothesis import HealthCheck, event, given, settings

from dpro_search.errors import GraphError
from dpro_search.replay.engine import Engine
from dpro_search.replay.reference import replay_reference
from dpro_search.replay.steady import unrolled

many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def specified(graph):
    """The times that the specification gives, and its error; one of them is None."""
    try:
        return replay_reference(graph), None
    except GraphError as error:
        event("deadlock")
        return None, str(error)


def check(graph):
    expected, deadlock = specified(graph)
    if deadlock is not None:
        with pytest.raises(GraphError) as raised:
            Engine(graph)
        assert str(raised.value) == deadlock
        return
    engine = Engine(graph)
    assert_equal_times(engine.first.times(), expected)
    assert_equal_times(engine.simulate().times(), expected)  # in the new layout


@many
@given(replay_graphs(fluid=False))
def test_devices_orders_and_collectives(graph):
    check(graph)


@many
@given(replay_graphs())
def test_links_and_slowdowns(graph):
    check(graph)


@many
@given(replay_graphs(cores=True))
def test_shared_cores_messages_and_devices_of_several_servers(graph):
    check(graph)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_order_policy_alone(policy):
    @settings(max_examples=100, deadline=None)
    @given(replay_graphs(policies=(policy,)))
    def each(graph):
        check(graph)

    each()


@settings(max_examples=100, deadline=None)
@given(replay_graphs(carry=True, max_ops=8))
def test_several_iterations_are_a_larger_graph(graph):
    check(unrolled(graph, 3))


@settings(max_examples=100, deadline=None)
@given(replay_graphs(carry=True, cores=True, max_ops=8))
def test_several_iterations_on_shared_cores_are_a_larger_graph(graph):
    check(unrolled(graph, 3))
