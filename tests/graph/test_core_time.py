"""Core time: what an interval holds of work when several threads share a core."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.graph.core_time import ShareProfile, StepWork, divide_step, scaled, without_overhead

NOBODY = ShareProfile(edge_us=np.zeros(0), share=np.zeros(0))


def divide(intervals, *, main=None, share=NOBODY, ready=None, step_start_us=0.0) -> StepWork:
    start, end = (np.array(column, dtype=float) for column in zip(*intervals, strict=True))
    is_main = np.ones(len(start), dtype=bool) if main is None else np.array(main)
    ready_us = np.full(len(start), -np.inf) if ready is None else np.array(ready, dtype=float)
    return divide_step(start, end, ready_us, is_main, share, step_start_us)


def test_an_op_alone_used_its_whole_interval():
    assert divide([(0, 10)]).work_us.tolist() == [10]


def test_two_ops_at_once_used_half_of_the_common_time():
    work = divide([(0, 10), (4, 10)])
    assert work.work_us.tolist() == [7, 3]
    assert work.concurrency == (4 * 1 + 6 * 2) / 10


def test_communication_takes_its_share_first():
    share = ShareProfile(edge_us=np.array([0.0, 10.0]), share=np.array([0.25]))
    assert divide([(0, 10), (0, 10)], share=share).work_us.tolist() == [3.75, 3.75]


def test_a_gap_before_the_end_of_the_main_stream_is_overhead_of_the_next_op():
    assert divide([(0, 4), (6, 10)]).work_us.tolist() == [4, 6]


def test_a_gap_in_which_an_update_waits_for_communication_is_no_work():
    work = divide([(0, 4), (9, 10)], main=[True, False], ready=[0, 8])
    assert work.work_us.tolist() == [4, 2]


def test_main_core_time_is_known_at_every_instant():
    work = divide([(0, 10), (4, 10)], main=[True, False])
    assert work.main_until_us(np.array([0, 4, 7, 10])).tolist() == [0, 4, 5.5, 7]


def test_profiler_overhead_is_taken_from_each_op_but_never_more_than_it_used():
    start, end = np.array([0.0, 5.0]), np.array([5.0, 5.5])
    work = divide_step(start, end, np.full(2, -np.inf), np.ones(2, dtype=bool), NOBODY, 0.0)
    less = without_overhead(work, end, np.ones(2, dtype=bool), 1.0)
    assert less.work_us.tolist() == [4, 0]
    assert less.main_us[-1] == 4


INTERVALS = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 100)), min_size=1, max_size=30)


@given(INTERVALS)
def test_work_adds_up_to_the_time_in_which_something_ran_or_was_ready(spans):
    intervals = [(start, start + length) for start, length in spans]
    work = divide(intervals)
    last = max(end for _, end in intervals)
    assert np.isclose(work.work_us.sum(), last)  # every gap before the end is overhead, the step began at 0
    assert np.isclose(work.main_us[-1], last)
    assert (np.diff(work.main_us) >= -1e-9).all()


@given(INTERVALS, st.floats(0.1, 2.0))
def test_scaling_scales_everything(spans, factor):
    work = divide([(start, start + length) for start, length in spans])
    changed = scaled(work, factor)
    assert np.allclose(changed.work_us, work.work_us * factor)
    assert np.isclose(changed.main_us[-1], work.main_us[-1] * factor)
