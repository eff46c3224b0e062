"""Graphs made by hand and in blocks."""

import pickle
from dataclasses import fields

import numpy as np
import pytest

from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.reference import replay_reference
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import OrderPolicy


def test_a_graph_made_by_hand_replays():
    builder = GraphBuilder()
    stream = builder.add_device(rank=0, name="stream")
    network = builder.add_device(rank=0, policy=OrderPolicy.PRIORITY)
    forward = builder.add_op(stream, 10.0, name="forward")
    backward = builder.add_op(stream, 20.0, name="backward", kind=OpKind.BACKWARD, after=[forward])
    late = builder.add_op(network, 5.0, name="late", kind=OpKind.COMM, priority=2, after=[backward])
    soon = builder.add_op(network, 7.0, name="soon", kind=OpKind.COMM, priority=1, after=[backward])
    graph = builder.build()
    graph.validate()
    times = replay_reference(graph)
    assert times.start_us[[forward, backward, late, soon]].tolist() == [0.0, 10.0, 37.0, 30.0]
    assert graph.kind.tolist() == [OpKind.FORWARD, OpKind.BACKWARD, OpKind.COMM, OpKind.COMM]
    assert (graph.name(backward), graph.device_name(stream), graph.device_name(network)) == ("backward", "stream", "device 1")


def test_flows_share_the_links_they_name():
    builder = GraphBuilder()
    link = builder.add_link(100.0)
    flows = [builder.add_op(builder.add_device(rank), 1.0, flow_bytes=1000.0, links=[link]) for rank in range(2)]
    graph = builder.build()
    graph.validate()
    assert replay_reference(graph).end_us[flows].tolist() == [21.0, 21.0]


def test_parts_of_a_collective_end_together():
    builder = GraphBuilder()
    parts = [builder.add_op(builder.add_device(rank), duration, collective=0) for rank, duration in enumerate((3.0, 8.0))]
    assert replay_reference(builder.build()).end_us[parts].tolist() == [8.0, 8.0]


def test_carried_dependencies_are_kept():
    builder = GraphBuilder()
    device = builder.add_device()
    first = builder.add_op(device, 1.0)
    second = builder.add_op(device, 1.0, after=[first])
    builder.carry(second, first)
    graph = builder.build()
    graph.validate()
    assert (graph.carry_src.tolist(), graph.carry_dst.tolist()) == ([second], [first])


def test_a_block_is_the_ops_one_by_one():
    block, one_by_one = GraphBuilder(), GraphBuilder()
    devices = block.add_devices([0, 1], OrderPolicy.FIFO)
    ops = block.add_ops(np.broadcast_to(devices, (3, 2)), np.array([[1.0], [2.0], [3.0]]), kind=OpKind.BACKWARD)
    block.add_edges(ops[:-1], ops[1:])
    for rank in range(2):
        one_by_one.add_device(rank)
    for step in range(3):
        for rank in range(2):
            after = [] if step == 0 else [2 * (step - 1) + rank]
            one_by_one.add_op(rank, step + 1.0, kind=OpKind.BACKWARD, after=after)
    ours, theirs = block.build(), one_by_one.build()
    for name in ("duration_us", "device", "kind", "priority", "pred_ptr", "pred_idx", "policy", "rank_of_device"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_single_ops_and_blocks_keep_the_order_in_which_they_come():
    blocks, singles = GraphBuilder(), GraphBuilder()
    for builder in (blocks, singles):
        builder.add_device(name="first")
        builder.add_devices([0, 1], OrderPolicy.UNBOUNDED)
        builder.add_links([10.0, 20.0])
    for builder in (blocks, singles):
        before = builder.add_op(0, 3.0, name="before", kind=OpKind.BACKWARD, priority=2, flow_bytes=8.0, links=[1, 0])
        if builder is blocks:
            pair = builder.add_ops([1, 2], [1.0, 2.0], kind=OpKind.COMM, collective=0, name="part{0}", axes=(range(2),))
            builder.add_edges(before, pair)
        else:
            pair = [
                builder.add_op(1 + i, 1.0 + i, kind=OpKind.COMM, collective=0, name=f"part{i}", after=[before]) for i in range(2)
            ]
        after = builder.add_op(0, 4.0, after=[int(pair[1]), before])
        builder.carry(after, before)
        builder.carry(np.array([after, after]), np.asarray(pair))
    ours, theirs = blocks.build(), singles.build()
    for field in fields(ours):
        if "names" in field.name:
            assert list(getattr(ours, field.name)) == list(getattr(theirs, field.name))
        else:
            np.testing.assert_array_equal(getattr(ours, field.name), getattr(theirs, field.name), err_msg=field.name)
    assert list(ours.names) == ["before", "part0", "part1", "op 3"]
    assert ours.pred_idx[ours.pred_ptr[3] : ours.pred_ptr[4]].tolist() == [2, 0]
    assert list(ours.device_names) == ["first", "device 1", "device 2"]


def test_ops_without_a_link_stand_beside_flows():
    builder = GraphBuilder()
    links = builder.add_links([10.0, 20.0])
    builder.add_ops(
        builder.add_devices([0, 0], OrderPolicy.FIFO), 1.0, flow_bytes=[5.0, 0.0], links=[[links[0], links[1]], [-1, -1]]
    )
    graph = builder.build()
    graph.validate()
    assert (graph.link_ptr.tolist(), graph.link_idx.tolist()) == ([0, 2, 2], [0, 1])


def test_names_are_spelled_on_demand_and_survive_pickling():
    builder = GraphBuilder()
    device = builder.add_device(name="{odd}")
    builder.add_ops(np.full((2, 3), device), 1.0, name="send{0}@{1}", axes=(range(2), np.array([4, 5, 6])))
    builder.add_op(device, 1.0, name="a{b}")
    names = pickle.loads(pickle.dumps(builder.build())).names
    assert list(names) == ["send0@4", "send0@5", "send0@6", "send1@4", "send1@5", "send1@6", "a{b}"]
    assert (names[-1], names[4:6], len(names)) == ("a{b}", ["send1@5", "send1@6"], 7)
    assert builder.build().device_name(0) == "{odd}"
    with pytest.raises(IndexError):
        names[7]
