"""A replayed iteration of the sample op by op."""

import numpy as np
import pytest
from sample import schedule

from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay import replay
from dpro_search.replay.horovod import machine
from dpro_search.replay.horovod.ops import iteration_ops
from dpro_search.space.plan import Plan

PLANS = [Plan(), Plan.of(fusion_threshold_bytes=0), Plan.of(fusion_threshold_bytes=2**22, cycle_time_us=3000.0)]


def logged(plan=PLANS[0], *changes):
    return schedule(plan, *changes).logged(iterations=8)


@pytest.mark.parametrize("plan", PLANS)
def test_the_graph_of_an_iteration_can_be_replayed_and_has_the_times_of_the_machine(plan):
    ops = iteration_ops(logged(plan))
    ops.graph.validate()
    assert replay(ops.graph).makespan_us == pytest.approx(ops.makespan_us)
    assert ops.makespan_us == pytest.approx(ops.iteration_us, rel=0.1)


def test_every_time_of_an_op_follows_the_one_before():
    times = iteration_ops(logged(Plan(), "ranks=4", "cores=2", "rate=1gbit")).times
    assert (times.ready_us <= times.start_us).all()
    assert (times.start_us <= times.moved_us).all()
    assert (times.moved_us <= times.end_us).all()


def test_phases_of_the_all_reduces_are_those_of_the_log():
    timeline = logged(Plan.of(fusion_threshold_bytes=2**22))
    ops = iteration_ops(timeline)
    names = [ops.graph.name(op) for op in np.flatnonzero(ops.graph.op_kind == OpKind.COMM)]
    assert {name.rpartition("@")[0].rpartition(", ")[2] for name in names} == {"copy in", "latency", "transfer", "copy out"}
    transfers = timeline.log[timeline.log[:, machine.LOG_KIND] == machine.TRANSFER]
    lengths = (transfers[:, machine.LOG_END] - transfers[:, machine.LOG_START]).round(3)
    shown = [op for op in range(len(ops.graph)) if ops.graph.name(op).endswith(", transfer@0")]
    assert set((ops.times.end_us - ops.times.moved_us)[shown].round(3)) <= set(lengths)


def test_a_replay_without_a_log_has_no_ops():
    with pytest.raises(InputError, match="log=True"):
        iteration_ops(schedule().iterations())
