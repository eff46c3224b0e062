"""The critical path of the sample's replay, and who keeps the others waiting."""

import itertools

import pytest
from sample import sample, schedule

from dpro_search.graph.recorded_collectives import arrivals
from dpro_search.replay.horovod.ops import iteration_ops
from dpro_search.replay.path.segments import path_segments


def path_of(*changes):
    return path_segments(iteration_ops(schedule(None, *changes).logged()))


def test_the_path_has_no_gap_and_is_as_long_as_the_iteration():
    timeline = schedule().logged()
    path = path_segments(iteration_ops(timeline))
    assert path[0].start_us == 0
    for before, after in itertools.pairwise(path):
        assert after.start_us == pytest.approx(before.start_us + before.duration_us, abs=2)
    assert sum(segment.duration_us for segment in path) == pytest.approx(timeline.iteration_us, rel=0.1)


def test_a_slow_link_makes_collectives_the_path():
    path = path_of("rate=200mbit")
    collective = sum(segment.duration_us for segment in path if segment.kind == "communication")
    assert collective > 0.8 * sum(segment.duration_us for segment in path)


def test_free_communication_makes_compute_the_path():
    path = path_of("communication=0")
    compute = sum(segment.duration_us for segment in path if segment.kind in ("compute", "late_rank"))
    assert compute > 0.95 * sum(segment.duration_us for segment in path)


def test_somebody_comes_last_and_does_not_wait():
    arrival_rows = arrivals(sample())
    assert sum(arrival.last_pct for arrival in arrival_rows) == pytest.approx(100)
    assert all(arrival.waited_us >= 0 for arrival in arrival_rows)
    assert len(arrival_rows) == sample().meta.ranks
