"""The benchmark prices all plans of a small job: what "all" means, and that the small job is the recorded one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dpro_search.collect.sample import sample_trace_path
from dpro_search.collect.trace import Trace
from dpro_search.replay import Predictor
from dpro_search.space.moves import canonical

BELL = (1, 1, 2, 5, 15, 52, 203)


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")  # a script's own folder comes first
        yield importlib.import_module("benchmarks.search")


@pytest.mark.parametrize("count", range(1, 7))
def test_groupings_are_all_there_once(benchmark: ModuleType, count: int) -> None:
    names = tuple("abcdef"[:count])
    position = {name: i for i, name in enumerate(names)}
    partitions = {canonical(grouping, position) for grouping in benchmark.all_groupings(names)}
    assert len(partitions) == len(list(benchmark.all_groupings(names))) == BELL[count]
    contiguous = set(benchmark.contiguous_groupings(names))
    assert len(contiguous) == 2 ** (count - 1)
    assert contiguous <= partitions


def test_cycle_times_are_those_that_samplers_propose(benchmark: ModuleType) -> None:
    cycles_us = {plan.cycle_time_us for plan in benchmark.all_plans([])}
    assert {None, 500.0, 510.0, 9900.0, 10_000.0, 11_000.0, 50_000.0} <= cycles_us
    assert len(cycles_us) == 182


def test_few_tensors_carry_all_bytes_and_all_work(benchmark: ModuleType) -> None:
    graph = Predictor.from_trace(Trace.load(sample_trace_path())).graph
    small = benchmark.with_few_tensors(graph, 6)
    assert len(small.tensors) == 6
    assert sum(t.size_bytes for t in small.tensors) == sum(t.size_bytes for t in graph.tensors)
    for few, many in zip(small.profiles, graph.profiles, strict=True):
        np.testing.assert_array_equal(few.main_us, many.main_us)
        np.testing.assert_array_equal(few.post_us.max(axis=1), many.post_us.max(axis=1))
        assert sum(r.work_us.sum() for r in few.releases) == sum(r.work_us.sum() for r in many.releases)
