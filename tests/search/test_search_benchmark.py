"""What the benchmark searches: a small job that is the recorded one, and jobs of real models' tensors."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dpro_search.collect.trace import Trace
from dpro_search.kinds.horovod.predictor import Predictor
from tests.sample import horovod_trace_path


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")  # a script's own folder comes first
        yield importlib.import_module("benchmarks.search")


def test_few_tensors_carry_all_bytes_and_all_work(benchmark: ModuleType) -> None:
    graph = Predictor.from_trace(Trace.load(horovod_trace_path())).graph
    small = benchmark.with_few_tensors(graph, 6)
    assert len(small.tensors) == 6
    assert sum(t.size_bytes for t in small.tensors) == sum(t.size_bytes for t in graph.tensors)
    for few, many in zip(small.profiles, graph.profiles, strict=True):
        np.testing.assert_array_equal(few.main_us, many.main_us)
        np.testing.assert_array_equal(few.post_us.max(axis=1), many.post_us.max(axis=1))
        assert sum(r.work_us.sum() for r in few.releases) == sum(r.work_us.sum() for r in many.releases)


def test_models_have_the_published_tensors(benchmark: ModuleType) -> None:
    resnet, bert = benchmark.search_jobs.resnet50(), benchmark.search_jobs.bert()
    assert len(resnet.tensor_bytes) == 161
    assert resnet.tensor_bytes.sum() == 4 * 25_557_032
    assert len(bert.tensor_bytes) == 199
    assert bert.tensor_bytes.sum() == 4 * 109_482_240
    assert len(bert) == 4975


def test_every_shortcut_is_measured_on_the_same_prices(benchmark: ModuleType) -> None:
    few = benchmark.search_jobs.with_few_tensors(benchmark.search_jobs.resnet50(3), 12)
    result = benchmark.shortcuts.ablation(benchmark.search_jobs.ring(few, 3), plans=5)
    assert len(result["plans_per_s"]) == 9
    assert min(result["plans_per_s"].values()) > 0
