"""The critical path explains the makespan without a gap."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from timelines import data_parallel, timeline_of, timelines

from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.kernels.executed import dependencies, executed
from dpro_search.replay.path.critical_path import Reason, critical_path, path_shares
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph

# Mostly ops that take no time, whose order the times alone do not tell.
INSTANTS = st.sampled_from([0.0, 0.0, 0.0, 1.0])
many = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@many
@given(timelines() | timelines(durations=INSTANTS))
def test_the_path_leads_from_0_to_the_makespan_without_a_gap(timeline):
    path = critical_path(timeline)
    assert path[0].start_us == 0
    assert path[0].reason == Reason.START
    assert path[-1].end_us == timeline.makespan_us
    assert all(before.end_us == after.start_us for before, after in itertools.pairwise(path))
    assert all(step.start_us <= step.end_us for step in path)
    assert len({step.op for step in path}) == len(path)


@many
@given(timelines())
def test_each_reason_is_true(timeline):
    source, destination = dependencies(timeline)
    needs = set(zip(source.tolist(), destination.tolist(), strict=True))
    device = np.tile(timeline.graph.device, timeline.iterations)
    for before, step in itertools.pairwise(critical_path(timeline)):
        if step.reason == Reason.DEPENDENCY:
            assert (before.op, step.op) in needs
        elif step.reason == Reason.DEVICE:
            assert device[before.op] == device[step.op]
            assert timeline.graph.policy[device[step.op]] != OrderPolicy.UNBOUNDED
        else:
            assert step.reason == Reason.COLLECTIVE
            assert (
                timeline.graph.collective[before.op % len(timeline.graph)]
                == timeline.graph.collective[step.op % len(timeline.graph)]
            )
            assert timeline.times.start_us[before.op] == timeline.times.moved_us[step.op] > timeline.times.start_us[step.op]


@many
@given(timelines() | timelines(durations=INSTANTS))
def test_the_executed_order_follows_dependencies_devices_and_collectives(timeline):
    order, unit, previous = executed(timeline)
    place = np.empty(len(order), int)
    place[order] = np.arange(len(order))
    source, destination = dependencies(timeline)
    served = np.flatnonzero(previous >= 0)
    assert sorted(order.tolist()) == list(range(len(order)))
    assert (place[source] < place[destination]).all()
    assert (place[previous[served]] < place[served]).all()
    assert (timeline.times.end_us[previous[served]] <= timeline.times.start_us[served]).all()
    runs = [key for key, _ in itertools.groupby(unit[order].tolist())]
    assert len(runs) == len(set(runs))


@many
@given(timelines(policies=(OrderPolicy.PROGRAM, OrderPolicy.UNBOUNDED), durations=INSTANTS))
def test_devices_in_program_order_serve_by_op_number(timeline):
    previous = executed(timeline).previous
    device = np.tile(timeline.graph.device, timeline.iterations)
    for number in np.flatnonzero(timeline.graph.policy == OrderPolicy.PROGRAM):
        ops = np.flatnonzero(device == number)
        assert previous[ops].tolist() == [-1, *ops.tolist()][: len(ops)]


def test_an_op_that_waits_behind_a_collective_without_work_comes_after_it():
    graph = ReplayGraph(
        duration_us=np.array([4.0, 0.0, 0.0, 5.0, 0.0]),
        device=np.array([0, 1, 1, 2, 3], np.int32),
        policy=np.full(4, int(OrderPolicy.FIFO), np.int8),
        rank_of_device=np.array([0, 0, 1, 1], np.int32),
        collective=np.array([-1, -1, 0, -1, 0], np.int32),  # op 2 is posted at 0, op 4 at 5; op 1 queues from 4 on
        pred_ptr=np.array([0, 0, 1, 1, 1, 2], np.int32),
        pred_idx=np.array([0, 3], np.int32),
    )
    order, _, previous = executed(timeline_of(graph))
    assert order.tolist().index(2) < order.tolist().index(1)
    assert previous.tolist() == [-1, 2, -1, -1, -1]


def test_the_path_goes_through_the_rank_that_posts_last():
    timeline = timeline_of(data_parallel(forward_us=(10.0, 30.0)))
    path = critical_path(timeline)
    shown = [(timeline.graph.name(step.op), step.start_us, step.end_us, str(step.reason)) for step in path]
    assert shown == [
        ("forward@1", 0.0, 30.0, "start"),
        ("backward@1", 30.0, 50.0, "dependency"),
        ("all-reduce@1", 50.0, 50.0, "dependency"),
        ("all-reduce@0", 50.0, 90.0, "collective"),
        ("update@0", 90.0, 95.0, "dependency"),
    ]


def test_an_op_that_only_its_device_holds_up_says_so():
    graph = data_parallel(forward_us=(10.0,), pred_ptr=np.zeros(5, np.int32), pred_idx=np.zeros(0, np.int32))
    reasons = [str(step.reason) for step in critical_path(timeline_of(graph))]
    assert reasons == ["start"]  # forward, backward and update take 35 us, the all-reduce 40 us beside them
    slower = data_parallel(forward_us=(20.0,), pred_ptr=np.zeros(5, np.int32), pred_idx=np.zeros(0, np.int32))
    assert [str(step.reason) for step in critical_path(timeline_of(slower))] == ["start", "device", "device"]


def test_an_iteration_that_waits_for_the_one_before_continues_its_path():
    graph = data_parallel(forward_us=(10.0,), carry_src=np.array([3], np.int32), carry_dst=np.array([0], np.int32))
    path = critical_path(timeline_of(graph, iterations=2))
    assert [step.op for step in path] == list(range(8))
    assert path[4].reason == Reason.DEPENDENCY


def test_shares_sum_to_the_makespan_largest_first():
    timeline = timeline_of(data_parallel(forward_us=(10.0, 30.0)))
    shares = path_shares(timeline)
    assert list(shares.by_rank_and_kind.items()) == [
        ((0, "COMM"), 40.0),
        ((1, "FORWARD"), 30.0),
        ((1, "BACKWARD"), 20.0),
        ((0, "UPDATE"), 5.0),
    ]
    assert list(shares.by_op.items()) == [(2, 40.0), (4, 30.0), (5, 20.0), (3, 5.0)]


@many
@given(timelines())
def test_shares_are_all_of_the_path(timeline):
    shares = path_shares(timeline)
    assert sum(shares.by_op.values()) == pytest.approx(timeline.makespan_us)
    assert sum(shares.by_rank_and_kind.values()) == pytest.approx(timeline.makespan_us)
    assert {kind for _, kind in shares.by_rank_and_kind} <= {kind.name for kind in OpKind}


def test_a_collective_that_waits_for_no_rank_is_on_the_path_with_its_wait():
    timeline = timeline_of(data_parallel())
    late = timeline.times._replace(moved_us=timeline.times.moved_us.copy(), end_us=timeline.times.end_us + 7.0)
    parts = np.flatnonzero(timeline.graph.collective >= 0)
    late.moved_us[parts] += 7.0  # as where something beside the graph held it up
    path = critical_path(replace(timeline, times=late))
    assert len(path) <= len(timeline.graph)
    assert path[-1].end_us == timeline.makespan_us + 7.0
