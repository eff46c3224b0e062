"""Cores that ranks of an all-reduce keep busy, from what the kernel counted."""

import pytest

from dpro_search.measure.conversation import Cell, cell_times

CALLS_NS = 1_440_000_000
CELL = Cell(algorithm="ring", size_bytes=1 << 20, before_bytes=1 << 20, before=1, calls=16, meet=False)


def rank(work_ns: int, rest_ns: int, cores: list[int]) -> dict:
    return {"spans_ns": [[0, CALLS_NS]], "sent_bytes": 1 << 24, "work_ns": work_ns, "rest_ns": rest_ns, "cores": cores}


def test_what_is_not_rest_is_busy_on_the_busiest_core():
    times = cell_times(CELL, [rank(30_000_000, CALLS_NS - 40_000_000, [0]), rank(50_000_000, CALLS_NS - 60_000_000, [1])])
    assert (times.call_us, times.busy_us) == (pytest.approx(90_000), pytest.approx(60_000 / 16))


def test_time_that_a_virtual_machine_counts_twice_is_not_taken_from_the_busy_time():
    times = cell_times(CELL, [rank(40_000_000, CALLS_NS + 40_000_000, [0])])
    assert times.busy_us == pytest.approx(40_000 / 16)


def test_a_step_of_the_kernels_clock_is_no_time_counted_twice():
    times = cell_times(CELL, [rank(10_000_000, CALLS_NS, [0]), rank(10_000_000, CALLS_NS + 5_000_000, [0])])
    assert times.busy_us == pytest.approx(-2_500 / 16), "steps even out over rounds only where they are kept"
