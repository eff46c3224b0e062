"""The critical path in words, on jobs small enough to know it; and on random ones, that it has no gap."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from timelines import timeline_of, timelines

from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.path.segments import path_segments, path_totals
from dpro_search.space.graph_builder import GraphBuilder

many = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


def two_ranks(negotiation_us=None):
    """Rank 1 computes 20 us longer than rank 0, then both reduce for 40 us and update for 10 us."""
    graph, parts = GraphBuilder(), []
    for rank, backward_us in enumerate((100.0, 120.0)):
        compute, network = graph.add_device(rank), graph.add_device(rank)
        last = graph.add_op(compute, backward_us, kind=OpKind.BACKWARD, name=f"backward@{rank}")
        if negotiation_us is not None:
            last = graph.add_op(network, negotiation_us, kind=OpKind.HOST, name=f"sum@{rank}", after=[last], collective=1)
        last = graph.add_op(network, 40.0, kind=OpKind.COMM, name=f"sum@{rank}", after=[last], collective=0)
        parts.append(graph.add_op(compute, 10.0, kind=OpKind.UPDATE, name=f"update@{rank}", after=[last]))
    return timeline_of(graph.build())


def rows(timeline):
    return [(s.kind, s.rank, s.name, s.start_us, s.duration_us) for s in path_segments(timeline)]


def test_a_late_rank_and_a_collective_are_told_from_compute():
    assert rows(two_ranks()) == [
        ("compute", 1, "", 0, 100),
        ("late_rank", 1, "sum", 100, 20),
        ("communication", -1, "sum", 120, 40),
        ("compute", 0, "", 160, 10),
    ]


def test_shares_are_of_the_whole_path():
    assert [segment.share_pct for segment in path_segments(two_ranks())] == pytest.approx([100 / 1.7, 20 / 1.7, 40 / 1.7, 10 / 1.7])


def test_a_collective_that_is_no_communication_is_a_negotiation():
    kinds = [segment.kind for segment in path_segments(two_ranks(negotiation_us=5.0))]
    assert kinds == ["compute", "late_rank", "negotiation", "communication", "compute"]


def test_a_message_belongs_to_the_rank_that_sends_it():
    graph = GraphBuilder()
    send = graph.add_op(graph.add_device(1), 30.0, kind=OpKind.COMM, name="push of w")
    graph.add_op(graph.add_device(0), 10.0, after=[send])
    assert rows(timeline_of(graph.build())) == [("communication", 1, "push of w", 0, 30), ("compute", 0, "", 30, 10)]


def test_sums_are_by_rank_and_kind_the_largest_first_and_have_the_same_fields():
    totals = path_totals(two_ranks())
    assert [(s.kind, s.rank, s.start_us, s.duration_us) for s in totals] == [
        ("BACKWARD", 1, 0, 120),
        ("COMM", 0, 120, 40),
        ("UPDATE", 0, 160, 10),
    ]
    assert sum(segment.share_pct for segment in totals) == pytest.approx(100)


@many
@given(timelines())
def test_segments_follow_each_other_from_the_begin_to_the_end(timeline):
    segments = path_segments(timeline)
    for before, after in itertools.pairwise(segments):
        assert after.start_us == pytest.approx(before.start_us + before.duration_us)
        assert (after.kind, after.rank, after.name) != (before.kind, before.rank, before.name)
    assert sum(segment.duration_us for segment in segments) == pytest.approx(timeline.makespan_us)
    assert sum(total.duration_us for total in path_totals(timeline)) * timeline.iterations == pytest.approx(timeline.makespan_us)
