"""The memory curve, against a plain count of what is alive."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from timelines import data_parallel, timeline_of, timelines

from dpro_search.replay.memory import memory

many = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


def lifetimes(timeline):
    """(number, rank, bytes, from, to) of every buffer of every iteration; persistent ones once."""
    graph, times = timeline.graph, timeline.times
    collected = []
    for iteration in range(timeline.iterations):
        first = iteration * len(graph)
        for j, op in enumerate(graph.buffer_op.tolist()):
            uses = graph.buffer_use[graph.buffer_ptr[j] : graph.buffer_ptr[j + 1]].tolist()
            if uses or iteration == 0:
                until = max((float(times.end_us[first + use]) for use in uses), default=np.inf)
                number = iteration * len(graph.buffer_op) + j
                collected.append((number, graph.rank_of_op[op], graph.buffer_bytes[j], times.moved_us[first + op], until))
    return collected


@many
@given(timelines(buffers=True))
def test_the_curve_counts_the_buffers_alive_at_each_instant(timeline):
    buffers = lifetimes(timeline)
    for curve in memory(timeline):
        rank_buffers = [buffer for buffer in buffers if buffer[1] == curve.rank]
        assert (np.diff(curve.times_us) > 0).all()
        assert curve.times_us[0] == 0
        for at_us, taken in zip(curve.times_us, curve.bytes, strict=True):
            assert taken == sum(size for _, _, size, begins, ends in rank_buffers if begins <= at_us < ends)
        instants = {at for _, _, _, begins, ends in rank_buffers for at in (begins, ends) if begins < ends < np.inf}
        assert instants <= set(curve.times_us.tolist())


@many
@given(timelines(buffers=True))
def test_the_peak_is_what_is_alive_then(timeline):
    buffers = {number: (rank, size, begins, ends) for number, rank, size, begins, ends in lifetimes(timeline)}
    for curve in memory(timeline):
        assert curve.peak_bytes == curve.bytes.max() == curve.alive_bytes.sum()
        assert (np.diff(curve.alive_bytes) <= 0).all()
        for number, size in zip(curve.alive.tolist(), curve.alive_bytes.tolist(), strict=True):
            rank, buffer_bytes, begins, ends = buffers[number]
            assert (rank, buffer_bytes) == (curve.rank, size)
            assert begins <= curve.peak_us < ends
        if curve.peak_bytes:
            assert timeline.times.moved_us[curve.peak_op] == curve.peak_us
            assert timeline.graph.rank_of_op[curve.peak_op % len(timeline.graph)] == curve.rank


def two_buffers(**fields):
    """Forward makes 100 bytes for backward; backward makes 10 bytes for the update; 7 bytes of parameters stay."""
    return data_parallel(
        forward_us=(10.0,),
        **{
            "buffer_op": np.array([0, 1, 0], np.int32),
            "buffer_bytes": np.array([100.0, 10.0, 7.0]),
            "buffer_ptr": np.array([0, 1, 2, 2], np.int32),
            "buffer_use": np.array([1, 3], np.int32),
        }
        | fields,
    )


def test_a_buffer_lives_from_the_start_of_its_op_to_the_end_of_its_last_use():
    (memory_use,) = memory(timeline_of(two_buffers()))
    assert memory_use.times_us.tolist() == [0, 10, 30, 75]
    assert memory_use.bytes.tolist() == [107, 117, 17, 7]
    assert (memory_use.peak_bytes, memory_use.peak_us, memory_use.peak_op) == (117, 10, 1)
    assert memory_use.alive.tolist() == [0, 1, 2]
    assert memory_use.alive_bytes.tolist() == [100, 10, 7]


def test_what_is_freed_makes_room_for_what_is_allocated_at_the_same_instant():
    graph = two_buffers(buffer_op=np.array([0, 2, 0], np.int32))  # the reduction begins when backward ends
    (memory_use,) = memory(timeline_of(graph))
    assert memory_use.peak_bytes == 107
    assert memory_use.bytes.tolist() == [107, 17, 7]


def test_a_part_of_a_collective_allocates_when_data_move():
    graph = replace(
        data_parallel(forward_us=(10.0, 30.0)),
        buffer_op=np.array([2], np.int32),
        buffer_bytes=np.array([8.0]),
        buffer_ptr=np.array([0, 1], np.int32),
        buffer_use=np.array([2], np.int32),
    )
    early, late = memory(timeline_of(graph))
    assert early.times_us.tolist() == [0, 50, 90]
    assert (late.peak_bytes, late.peak_op, len(late.alive)) == (0, -1, 0)


def test_each_iteration_has_its_buffers_and_persistent_ones_count_once():
    graph = two_buffers(carry_src=np.array([3], np.int32), carry_dst=np.array([0], np.int32))
    (memory_use,) = memory(timeline_of(graph, iterations=3))
    assert memory_use.peak_bytes == 117
    assert memory_use.bytes[-1] == 7
    assert memory_use.bytes.tolist() == pytest.approx([107, 117, 17, *[107, 117, 17] * 2, 7])
