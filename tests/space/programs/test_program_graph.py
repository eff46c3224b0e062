"""The graph of a program, and what makes shared cores invalid."""

from dataclasses import replace

import numpy as np
import pytest
from ddp_jobs import NONE, POST, WAIT, job

from dpro_search.errors import GraphError
from dpro_search.space.programs.program_graph import Pattern, pattern_graph, program_graph
from dpro_search.space.replay_graph import OrderPolicy
from tests.every_case import every_case

PROGRAM = [(10, POST, 0), (0, WAIT, 0), (100, POST, 1), (20, WAIT, 1), (7, NONE, -1)]


def graph_of(**options):
    return program_graph(job(PROGRAM, [4, 50], **options))


def test_ops_are_the_segments_rank_by_rank_then_the_collectives():
    graph = graph_of()
    graph.validate()
    assert graph.duration_us[:10].tolist() == [10, 0, 100, 20, 7] * 2
    assert graph.flow_bytes.tolist() == [0] * 10 + [4, 50]


def test_a_collective_needs_its_segment_of_every_rank_and_the_segment_after_a_wait_needs_it():
    edges = set(zip(*(column.tolist() for column in graph_of().edges()), strict=True))
    assert edges == {(0, 10), (5, 10), (10, 2), (10, 7), (2, 11), (7, 11), (11, 4), (11, 9)}


def test_the_sender_of_a_broadcast_does_not_need_it():
    source, destination = graph_of(broadcast={0}).edges()
    assert destination[source == 10].tolist() == [7]


def test_gloo_runs_as_many_collectives_as_it_has_threads_in_program_order():
    graph = graph_of(threads=3)
    assert graph.servers.tolist() == [1, 1, 3]
    assert set(graph.policy.tolist()) == {OrderPolicy.PROGRAM}


def test_a_program_that_ends_with_a_wait_has_a_last_segment_without_work():
    graph = program_graph(job([(10, POST, 0), (5, WAIT, 0)], [4]))
    assert graph.duration_us[:6].tolist() == [10, 5, 0] * 2


def test_jobs_that_differ_in_numbers_have_one_pattern():
    first, second = (job(PROGRAM, sizes) for sizes in ([4, 50], [8, 9]))
    assert pattern_graph(Pattern.of(first)) is pattern_graph(Pattern.of(second))
    assert Pattern.of(first) != Pattern.of(job(PROGRAM, [4, 50], core=(0, 0)))


def bad(**changes):
    graph = graph_of()
    return replace(graph, cores=replace(graph.cores, **changes))


@every_case(
    ("graph", "said"),
    [
        (lambda: bad(core=np.zeros(2, np.int32)), "cores.core has 2 entries, not 3"),
        (lambda: bad(idle_us=np.full(12, -1.0)), "cores.idle_us must be numbers >= 0"),
        (lambda: bad(idle_bytes_per_us=np.zeros(1)), "must be above 0"),
        (lambda: bad(core=np.zeros(3, np.int32)), "has a core: it takes no message"),
        (lambda: bad(idle_us=np.zeros(12), core_us=np.ones(12)), "needs an idle_us to be a message"),
        (lambda: replace(graph_of(), duration_us=np.zeros(12)), "must be above 0, for it is a message"),
        (
            lambda: replace(graph_of(), servers=np.array([1, 0, 1], np.int32)),
            "servers must be a number >= 1 for each of the 3 devices",
        ),
    ],
)
def test_what_no_engine_can_replay_is_one_line(graph, said):
    with pytest.raises(GraphError) as raised:
        graph().validate()
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
