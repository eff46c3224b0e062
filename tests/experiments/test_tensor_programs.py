"""Tables of tensor programs: what cannot be is refused, and features of a known loop nest."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dpro_search.errors import DproSearchError
from experiments.tensor_programs.additive import AdditiveTrees, Settings
from experiments.tensor_programs.features import moved_bytes, traffic
from experiments.tensor_programs.leaves import LeafRows, _pressure
from experiments.tensor_programs.models import groups, used_by
from experiments.tensor_programs.table import Programs, check, distinct, joined, load, ops_of
from experiments.tensor_programs.trees import Rows, Trees
from experiments.tensor_programs.workloads import MOST_MULTIPLY_ADDS, multiply_adds, tasks


@pytest.fixture(scope="module")
def programs() -> Programs:
    return load()


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
    copied = traffic([64, 64], [[64, 1], [64, 1]], 1024 * 1024)
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


def test_tasks_are_thousands_of_distinct_ops_that_many_models_run() -> None:
    every = tasks()
    assert len(every) >= 2000
    assert len({task.name for task in every}) == len(every)
    assert len({model for task in every for model in task.models}) >= 25
    assert all(min(task.dims) >= 0 and task.dims[0] > 0 for task in every)
    assert max(multiply_adds(task.op, task.dims) for task in every) <= MOST_MULTIPLY_ADDS


@pytest.mark.parametrize(
    ("op", "dims"),
    [("conv2d", (64, 56, 64, 1, 1, 0)), ("depthwise", (32, 112, 3, 1, 1)), ("dense", (1, 1000, 2048)), ("lookup", (128, 64, 1000))],
)
def test_architectures_list_the_published_layers(op: str, dims: tuple[int, ...]) -> None:
    assert (op, dims) in {(task.op, task.dims) for task in tasks()}


def test_a_stride_of_a_page_leaves_one_set_of_the_cache() -> None:
    page_of_floats = 1024
    assert _pressure([24], [page_of_floats]) == pytest.approx(2.0)
    assert _pressure([24], [page_of_floats + 16]) < 0.1
    assert _pressure([24], [1]) == 0


def test_a_joined_table_keeps_machines_apart_and_tasks_together(programs: Programs) -> None:
    one, other = programs[np.arange(50)], programs[np.arange(20, 60)]
    both = joined([one, other])
    assert len(distinct(both)) == len(distinct(one)) + len(distinct(other))
    assert len(both.tasks) == len(programs.tasks)


def test_trees_of_leaves_predict_sums_and_do_not_see_what_is_left_out(programs: Programs) -> None:
    some = distinct(programs)[np.arange(150)]
    rows, log_us = LeafRows.of(some), np.log(some.us.T.ravel())
    fitted = np.tile(np.arange(150) < 120, 3)
    changed = np.where(fitted, log_us, log_us + 2)
    one, same = (AdditiveTrees.fit(rows, us, fitted, 0, Settings(rounds=40)).us(rows, ~fitted) for us in (log_us, changed))
    assert one == pytest.approx(same)
    assert (
        np.median(np.abs(np.log(AdditiveTrees.fit(rows, log_us, fitted, 0, Settings(rounds=40)).us(rows, fitted)) - log_us[fitted]))
        < 0.4
    )


def test_groups_of_models_share_no_model(programs: Programs) -> None:
    listed = groups(programs, 0)
    every = [model for models in listed for model in models]
    assert len(set(every)) == len(every)
    assert used_by(programs, listed[0]).any()
