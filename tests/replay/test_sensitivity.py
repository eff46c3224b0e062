"""Gains are exact: the difference to a replay of the changed job."""

from dataclasses import replace

import numpy as np
import pytest
from graphs import replay_graphs
from hypothesis import HealthCheck, assume, given, settings
from timelines import data_parallel, timeline_of

from dpro_search.errors import GraphError, InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.sensitivity import (
    BandwidthScaled,
    CommunicationScaled,
    ComputeScaled,
    KindScaled,
    OpScaled,
    StagesEven,
    StragglerGone,
    gains,
    questions,
)
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import OrderPolicy

many = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


def iteration_us(graph):
    try:
        return timeline_of(graph).iteration_us
    except GraphError:
        assume(False)


@many
@given(replay_graphs())
def test_each_gain_is_the_difference_of_two_replays_largest_first(graph):
    base_us = iteration_us(graph)
    for change in questions(graph, replay=timeline_of):
        iteration_us(change.apply(graph))  # other times may order collectives so that they deadlock
    gain_rows = gains(graph, replay=timeline_of)
    assert [gain.gain_us for gain in gain_rows] == sorted((gain.gain_us for gain in gain_rows), reverse=True)
    assert len({gain.change for gain in gain_rows}) == len({gain.change.text for gain in gain_rows}) == len(gain_rows)
    for gain in gain_rows:
        assert gain.iteration_us == timeline_of(gain.change.apply(graph)).iteration_us
        assert gain.gain_us == base_us - gain.iteration_us
        assert gain.gain_pct == pytest.approx(100 * gain.gain_us / base_us if base_us else 0)


@many
@given(replay_graphs(policies=(OrderPolicy.PROGRAM, OrderPolicy.UNBOUNDED)))
def test_free_communication_never_takes_longer_in_a_fixed_order(graph):
    without_slowdown = replace(graph, slowdown=np.zeros((0, 0)))
    free = CommunicationScaled(factor=0).apply(without_slowdown)
    assert iteration_us(free) <= iteration_us(without_slowdown) + 1e-9


@many
@given(replay_graphs(policies=(OrderPolicy.PROGRAM, OrderPolicy.UNBOUNDED), fluid=False))
def test_faster_ops_never_take_longer_in_a_fixed_order(graph):
    iteration_us(graph)  # no deadlock
    faster = [gain for gain in gains(graph, replay=timeline_of) if not isinstance(gain.change, StragglerGone)]
    assert all(gain.gain_us >= -1e-9 for gain in faster)


def gain_of(change, graph):
    (gain,) = gains(graph, [change])
    return gain.gain_us


def test_answers_for_a_job_that_can_be_worked_out_by_hand():
    graph = data_parallel(forward_us=(10.0, 30.0))  # 30 + 20 + 40 + 5
    assert gain_of(ComputeScaled(factor=0.9), graph) == pytest.approx(5.5)
    assert gain_of(ComputeScaled(factor=0.9, rank=0), graph) == 0  # rank 1 also updates: 5 us
    assert gain_of(ComputeScaled(factor=0.9, rank=1), graph) == pytest.approx(5)
    assert gain_of(KindScaled(factor=0.9, kind=OpKind.FORWARD), graph) == pytest.approx(3)
    assert gain_of(CommunicationScaled(factor=0), graph) == 40
    assert gain_of(BandwidthScaled(factor=2), graph) == 20
    assert gain_of(StragglerGone(rank=1), graph) == 20
    assert gain_of(OpScaled(factor=0.9, op=4, name="forward@1"), graph) == pytest.approx(3)


def test_one_part_of_a_collective_is_never_faster_alone():
    graph = data_parallel(forward_us=(10.0, 30.0))
    assert gain_of(OpScaled(factor=0.5, op=2, name="all-reduce@0"), graph) == 20
    assert gain_of(CommunicationScaled(factor=0.5, rank=0), graph) == 0


def test_bandwidth_of_links_leaves_the_latency():
    flows = data_parallel(
        forward_us=(0.0,),
        collective=np.zeros(0, np.int32),
        flow_bytes=np.array([0.0, 0.0, 120.0, 0.0]),
        link_ptr=np.array([0, 0, 0, 1, 1], np.int32),
        link_idx=np.array([0], np.int32),
        link_bytes_per_us=np.array([2.0]),
    )
    assert gain_of(BandwidthScaled(factor=2), flows) == 30
    assert gain_of(CommunicationScaled(factor=0), flows) == 100


def test_all_kinds_of_questions_are_asked_about_a_data_parallel_job():
    texts = [change.text for change in questions(data_parallel(forward_us=(10.0, 30.0)))]
    assert texts == [
        "compute=0.9",
        "communication=0.9",
        "communication=0",
        "bandwidth=2",
        "rank1.compute=0.9",
        "rank0.compute=0.9",
        "rank1.communication=0.9",
        "rank0.communication=0.9",
        "rank 1 no straggler",
        "all FORWARD ops 10 % faster",
        "all BACKWARD ops 10 % faster",
        "all UPDATE ops 10 % faster",
        "all-reduce on all ranks 10 % faster",
        "forward@1 10 % faster",
        "backward@1 10 % faster",
        "update@0 10 % faster",
    ]


def test_the_straggler_is_the_rank_whose_compute_is_on_the_path():
    graph = data_parallel(forward_us=(10.0, 30.0))
    beside = replace(graph, duration_us=np.append(graph.duration_us, 55.0), device=np.append(graph.device, 4).astype(np.int32))
    computes_more_beside_the_path = replace(
        beside,
        policy=np.append(graph.policy, OrderPolicy.PROGRAM).astype(np.int8),
        rank_of_device=np.append(graph.rank_of_device, 0).astype(np.int32),
        kind=np.append(graph.kind, OpKind.FORWARD).astype(np.int8),
        collective=np.append(graph.collective, -1).astype(np.int32),
        pred_ptr=np.append(graph.pred_ptr, graph.pred_ptr[-1]).astype(np.int32),
        names=(*graph.names, "evaluation@0"),
    )
    (straggler,) = (change for change in questions(computes_more_beside_the_path) if isinstance(change, StragglerGone))
    assert straggler.rank == 1


def test_of_many_ranks_only_the_slowest_are_asked_about():
    changes = questions(data_parallel(forward_us=tuple(float(rank) for rank in range(20))))
    of_ranks = [change.rank for change in changes if isinstance(change, ComputeScaled) and change.rank is not None]
    assert of_ranks == [19, 0, 18, 17, 16, 15, 14, 13]  # the path ends in rank 0's update


def test_the_straggler_gets_the_median_of_the_other_ranks():
    graph = data_parallel(forward_us=(10.0, 16.0, 12.0, 50.0))
    assert StragglerGone(rank=3).apply(graph).duration_us[12:].tolist() == [12.0, 20.0, 40.0, 5.0]
    by_place = replace(graph, names=())
    assert StragglerGone(rank=3).apply(by_place).duration_us[12:].tolist() == [12.0, 20.0, 40.0, 5.0]
    even = data_parallel(forward_us=(10.0, 16.0, 50.0))
    assert StragglerGone(rank=2).apply(even).duration_us[8] == 13.0


def test_a_straggler_without_counterparts_is_no_question():
    graph = data_parallel(forward_us=(10.0, 30.0))
    strange = replace(graph, names=tuple(f"op {op}" for op in range(len(graph))))
    unequal = replace(graph, names=(), kind=np.where(np.arange(len(graph)) == 0, OpKind.IO, graph.kind).astype(np.int8))
    for other in (strange, unequal, data_parallel(forward_us=(10.0,))):
        assert not any(isinstance(change, StragglerGone) for change in questions(other))
        with pytest.raises(InputError, match="no op in common"):
            StragglerGone(rank=0).apply(other)


def test_samples_change_with_the_durations():
    graph = data_parallel(forward_us=(10.0,))
    sampled = replace(graph, samples_us=np.array([[8, 20, 40, 5], [12, 20, 40, 5]], np.float32))
    faster = KindScaled(factor=0.5, kind=OpKind.FORWARD).apply(sampled)
    assert faster.samples_us[:, 0].tolist() == [4, 6]
    assert faster.samples_us[:, 1:].tolist() == sampled.samples_us[:, 1:].tolist()
    assert faster.samples_us.dtype == np.float32


def test_even_stages_compute_the_mean_of_their_pipeline():
    builder = GraphBuilder()
    for rank, us in enumerate((100.0, 200.0, 600.0, 50.0)):
        builder.add_op(builder.add_device(rank=rank), us, name=f"forward@{rank}")
    even = StagesEven(pipelines=((0, 1, 2),)).apply(builder.build())
    assert even.duration_us.tolist() == pytest.approx([300.0, 300.0, 300.0, 50.0])
