"""Ops that are repeated for many things: the graph is that of one op at a time."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.graph.dataflow import OpKind
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.servers.op_pattern import OpPattern


def started(things: int) -> tuple[GraphBuilder, list[int], list[int], list[int]]:
    """A graph with devices, links, and an op for each thing."""
    builder = GraphBuilder()
    devices = [builder.add_device() for _ in range(3)]
    links = [builder.add_link(10.0) for _ in range(2)]
    return builder, devices, links, [builder.add_op(devices[0], 1.0 + thing) for thing in range(things)]


@given(pieces=st.lists(st.integers(0, 2), min_size=1, max_size=6), moves=st.booleans())
def test_the_graph_is_that_of_one_op_at_a_time(pieces, moves):
    """Each thing's op is made ready, worked on in some pieces (or none), and sent if there are links."""
    things = [f"thing{number}" for number in range(len(pieces))]
    count = np.array(pieces)

    whole, devices, links, made = started(len(things))
    pattern = OpPattern(things)
    last = np.full(len(things), pattern.add(devices[1], 0.5 * count, "ready", priority=count, since=np.array(made)))
    for piece in range(2):
        where = count > piece
        last[where] = pattern.add(devices[2], 2.0, f"work{piece}", kind=OpKind.SERVER, after=[last.copy()], where=where)
    flow = {"flow_bytes": 100.0 + count, "links": (links[0], np.array(links)[count % 2])} if moves else {}
    sent = pattern.add(devices[count.max() % 3], 0.0, "sent", after=[0, last], **flow)
    numbers = pattern.into(whole)

    single, *_ = started(len(things))
    for thing, name in enumerate(things):
        ready = op = single.add_op(
            devices[1], 0.5 * pieces[thing], name=f"{name}.ready", kind=OpKind.COMM, priority=pieces[thing], after=[made[thing]]
        )
        for piece in range(pieces[thing]):
            op = single.add_op(devices[2], 2.0, name=f"{name}.work{piece}", kind=OpKind.SERVER, after=[op])
        flow = {"flow_bytes": 100.0 + pieces[thing], "links": (links[0], links[pieces[thing] % 2])} if moves else {}
        op = single.add_op(devices[max(pieces) % 3], 0.0, name=f"{name}.sent", kind=OpKind.COMM, after=[ready, op], **flow)
        assert numbers[thing, sent] == op
        assert (numbers[thing, 1:3] >= 0).tolist() == [pieces[thing] > piece for piece in range(2)]

    ours, theirs = whole.build(), single.build()
    for field in fields(ours):
        value, expected = getattr(ours, field.name), getattr(theirs, field.name)
        if expected is None:
            assert value is None
            continue
        assert list(value) == list(expected) if "names" in field.name else value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)


def test_a_name_is_asked_for_by_number_or_slice():
    builder, devices, _, _ = started(0)
    pattern = OpPattern(["a", "b"])
    pattern.add(devices[0], 1.0, "x")
    pattern.into(builder)
    names = builder.build().names
    assert (names[-1], names[0:2]) == ("b.x", ["a.x", "b.x"])
    with pytest.raises(IndexError):
        names[2]
