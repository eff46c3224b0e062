"""What cannot be replayed says so in one line: where, and what is wrong."""

from dataclasses import replace

import numpy as np
import pytest

from dpro_search.errors import GraphError
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay import replay
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import OrderPolicy
from tests.every_case import every_case


def chain(names=("a", "b", "c")):
    graph = GraphBuilder()
    device = graph.add_device()
    last = []
    for name in names:
        last = [graph.add_op(device, 1.0, name=name, after=last)]
    return graph


def posted_in(*orders):
    """Each rank posts collectives, by name, in its own program order."""
    graph = GraphBuilder()
    for rank, order in enumerate(orders):
        network = graph.add_device(rank, policy=OrderPolicy.PROGRAM)
        for name in order:
            graph.add_op(network, 1.0, name=f"{name}@{rank}", collective=ord(name))
    return graph.build()


def test_a_cycle_names_the_ops_on_it():
    graph = chain().build()
    cyclic = replace(graph, pred_ptr=np.array([0, 1, 2, 3], np.int32), pred_idx=np.array([2, 0, 1], np.int32))
    with pytest.raises(GraphError, match=r"cycle, no op on it can ever start: (a -> b -> c|b -> c -> a|c -> a -> b)"):
        replay(cyclic)


def test_ranks_that_post_collectives_in_different_orders_are_named_with_the_tensors():
    with pytest.raises(GraphError) as error:
        replay(posted_in("xyz", "xzy"))
    assert "different orders, which is a deadlock in the real job too" in str(error.value)
    assert "rank 0 waits in y@0" in str(error.value)
    assert "rank 1 waits in z@1" in str(error.value)


def test_one_order_on_all_ranks_is_fine():
    assert replay(posted_in("xyz", "xyz")).makespan_us == 3


def test_a_program_order_against_the_dependencies_is_found():
    graph = GraphBuilder()
    device = graph.add_device(policy=OrderPolicy.PROGRAM)
    graph.add_op(device, 1.0, name="first")
    graph.add_op(device, 1.0, name="second")
    backwards = replace(graph.build(), pred_ptr=np.array([0, 1, 1], np.int32), pred_idx=np.array([1], np.int32))
    with pytest.raises(GraphError, match="dependencies contradict the program order"):
        replay(backwards)


def test_an_empty_graph_is_refused():
    with pytest.raises(GraphError, match="no ops: nothing to replay"):
        replay(GraphBuilder().build())


@every_case(
    ("field", "value", "said"),
    [
        ("duration_us", [1.0, -2.0, 1.0], "duration_us of b is -2.0: it must be a number >= 0"),
        ("duration_us", [1.0, 1.0, np.nan], "duration_us of c is nan"),
        ("duration_us", [np.inf, 1.0, np.inf], r"duration_us of a is inf \(and 1 more\)"),
        ("device", [0, 3, 0], "device of b is 3: it must be one of the 1 devices"),
        ("device", [0, 0], "device has 2 entries for 3 ops"),
        ("pred_idx", [0, 9], "pred_idx names op 9 of 3"),
        ("pred_ptr", [0, 0, 1], "pred_ptr does not divide its 2 indices among 3 rows"),
        ("policy", [7], "policy holds a value that is no OrderPolicy"),
        ("rank_of_device", [0, 1], "rank_of_device has 2 entries for 1 devices"),
        ("samples_us", [[1.0, 1.0]], "samples_us has 2 columns for 3 ops"),
        ("samples_us", [[1.0, -1.0, 1.0]], "samples_us of b is -1.0"),
        ("slowdown", [[0.5]], f"slowdown must be {len(OpKind)} x {len(OpKind)} factors >= 1"),
    ],
)
def test_a_bad_value_is_named_with_its_op(field, value, said):
    graph = chain().build()
    bad = replace(graph, **{field: np.array(value, getattr(graph, field).dtype)})
    with pytest.raises(GraphError, match=said):
        replay(bad)


def test_a_flow_needs_a_link_and_a_link_a_rate():
    graph = GraphBuilder()
    graph.add_op(graph.add_device(), 1.0, name="push", flow_bytes=5.0, links=[graph.add_link(1.0)])
    built = graph.build()
    with pytest.raises(GraphError, match="link 0 has no rate above 0"):
        replay(replace(built, link_bytes_per_us=np.array([0.0])))
    with pytest.raises(GraphError, match=r"flow_bytes of push is 5\.0: it needs a link to move over"):
        replay(replace(built, link_ptr=np.array([0, 0], np.int32), link_idx=np.array([], np.int32)))


def test_two_parts_of_a_collective_on_one_device_can_never_start():
    graph = GraphBuilder()
    device = graph.add_device(name="network@0")
    graph.add_op(device, 1.0, collective=4)
    graph.add_op(device, 1.0, collective=4)
    with pytest.raises(GraphError, match="collective 4 has two parts on network@0"):
        replay(graph.build())
