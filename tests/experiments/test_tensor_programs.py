"""Tables of tensor programs: what cannot be is refused, and features of a known loop nest."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dpro_search.errors import DproSearchError
from experiments.tensor_programs.features import _traffic, moved_bytes
from experiments.tensor_programs.table import BUNDLED, Programs, check, distinct, load, ops_of
from experiments.tensor_programs.trees import Rows, Trees


@pytest.fixture(scope="module")
def programs() -> Programs:
    return load(BUNDLED)


def test_the_ops_of_a_stored_convolution_are_those_of_its_dims(programs: Programs) -> None:
    place = next(
        i for i, one in enumerate(programs.task) if programs.tasks[one].op == "conv2d" and programs.tasks[one].dims[3] == 1
    )
    channels, height, filters, _, stride, _ = programs.tasks[programs.task[place]].dims
    multiply_adds = channels * filters * (height // stride) ** 2
    assert ops_of(programs.leaves[place]) == pytest.approx(2 * multiply_adds, rel=0.1)


@pytest.mark.parametrize(("factor", "says"), [(1e-3, "in ms"), (1e3 * 1e3, "in ns")])
def test_times_in_other_units_are_refused(programs: Programs, factor: float, says: str) -> None:
    with pytest.raises(DproSearchError, match=says):
        check(dataclasses.replace(programs, us=programs.us * factor), "table")


def test_an_out_of_memory_sentinel_is_refused(programs: Programs) -> None:
    us = programs.us.copy()
    us[3, 0] = 1e7
    with pytest.raises(DproSearchError, match=r"program 3 .* out of memory"):
        check(dataclasses.replace(programs, us=us), "table")


def test_a_nest_that_fits_a_cache_moves_its_lines_once() -> None:
    copied = _traffic([64, 64], [[64, 1], [64, 1]], 1024 * 1024)
    assert copied == 2 * 64 * 64 * np.dtype(np.float32).itemsize


def test_a_lookup_moves_no_more_than_it_reads(programs: Programs) -> None:
    lookups = [i for i, one in enumerate(programs.task) if programs.tasks[one].op == "lookup"]
    rows, width, _ = programs.tasks[programs.task[lookups[0]]].dims
    read_and_written = 2 * rows * width * np.dtype(np.float32).itemsize
    assert read_and_written <= moved_bytes(programs)[lookups[0]] <= 2 * read_and_written


def test_times_on_a_target_that_was_left_out_change_nothing(programs: Programs) -> None:
    rows = Rows.of(distinct(programs)[np.arange(60)])
    other = dataclasses.replace(rows, us=rows.us * [1.0, 1.0, 7.0])
    every = np.arange(60)
    one, same = (Trees.fit(each, every, [0, 1], 0, loops=True, ratio=True).us(each, every, 2) for each in (rows, other))
    assert one == pytest.approx(same)
    assert np.median(np.abs(np.log(one / rows.us[:, 2]))) < np.log(2)
