"""Slack: what an op can take longer before the makespan does."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from timelines import data_parallel, timeline_of, timelines

from dpro_search.replay.kernels.executed import dependencies, executed
from dpro_search.replay.path.critical_path import critical_path
from dpro_search.replay.path.slack import slack_us

many = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


def makespan_with(timeline, longer_us):
    """The makespan in the same order on all devices if the work of each op, [n], takes longer: the longest path, by relaxation."""
    _, unit, previous = executed(timeline)
    work_us = timeline.times.end_us - timeline.times.moved_us
    source, destination = dependencies(timeline)
    served = np.flatnonzero(previous >= 0)
    source, destination = np.append(source, previous[served]), np.append(destination, served)
    longest = np.zeros(len(unit))
    np.maximum.at(longest, unit, work_us + longer_us)  # of each collective's parts
    start, end = np.zeros(len(unit)), longest[unit]
    while True:
        posted = start.copy()
        np.maximum.at(posted, destination, end[source])
        moved = np.zeros(len(unit))
        np.maximum.at(moved, unit, posted)
        ended = moved[unit] + longest[unit]
        if (posted == start).all() and (ended == end).all():
            return float(end.max())
        start, end = posted, ended


@many
@given(timelines(), st.data())
def test_an_op_can_end_later_by_its_slack_and_no_more(timeline, data):
    slack = slack_us(timeline)
    op = data.draw(st.integers(0, len(slack) - 1))
    assert makespan_with(timeline, np.zeros(len(slack))) == pytest.approx(timeline.makespan_us, abs=1e-9)
    later = np.zeros(len(slack))
    later[op] = slack[op]
    assert makespan_with(timeline, later) == pytest.approx(timeline.makespan_us, abs=1e-9)
    later[op] += 1
    assert makespan_with(timeline, later) == pytest.approx(timeline.makespan_us + 1, abs=1e-9)


@many
@given(timelines())
def test_the_critical_path_has_none(timeline):
    slack = slack_us(timeline)
    assert (slack >= 0).all()
    assert (slack[[step.op for step in critical_path(timeline)]] == 0).all()


def test_the_faster_rank_has_slack_until_it_posts():
    timeline = timeline_of(data_parallel(forward_us=(10.0, 30.0)))
    assert slack_us(timeline).tolist() == [20.0, 20.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_a_long_chain_has_a_slack_of_exactly_0():
    count = 1000
    graph = data_parallel(
        forward_us=(0.0,),
        duration_us=np.full(count, 0.1),
        device=np.zeros(count, np.int32),
        kind=np.zeros(0, np.int8),
        collective=np.zeros(0, np.int32),
        pred_ptr=np.append(0, np.arange(count)).astype(np.int32),
        pred_idx=np.arange(count - 1, dtype=np.int32),
        names=(),
    )
    assert not slack_us(timeline_of(graph)).any()
