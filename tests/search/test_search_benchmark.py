"""What the benchmark searches: a small job that is the recorded one, and jobs of real models' tensors."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from benchmarks.ring_job import RingJob
from dpro_search.collect.trace import Trace
from dpro_search.graph.build import build_graph
from dpro_search.space.data_parallel import layered_step
from dpro_search.space.plan import Plan
from tests.sample import horovod_trace_path


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")  # a script's own folder comes first
        yield importlib.import_module("benchmarks.search")


def test_few_tensors_carry_all_bytes_and_all_work(benchmark: ModuleType) -> None:
    graph = build_graph(Trace.load(horovod_trace_path()))
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


def test_a_ring_of_equal_ranks_takes_the_time_of_its_messages(benchmark: ModuleType) -> None:
    step = layered_step([8000.0, 4000.0], forward_us=10.0, backward_us=0.0, update_us=0.0)
    job = RingJob(step=step, ranks=4, link_bytes_per_us=100.0, message_us=3.0, reduce_us_per_byte=0.01)
    predictor = benchmark.FusionObjective(job)
    together = predictor.predict(Plan(tensor_groups=(("tensor0", "tensor1"),)))
    assert together.iteration_us == pytest.approx(10.0 + 2 * 3 * (3.0 + 12_000 / 4 / 100) + 3 * 12_000 / 4 * 0.01)


def test_plans_of_fused_tensors_become_groups(benchmark: ModuleType) -> None:
    step = layered_step([4000.0, 2000.0, 1000.0, 8000.0], forward_us=1.0, backward_us=5.0, update_us=2.0)
    predictor = benchmark.FusionObjective(benchmark.search_jobs.serial(step, 2))
    assert predictor.groups(Plan(tensor_groups=(("tensor1", "tensor3"),))) == ((0,), (2,), (1, 3))
    assert predictor.groups(Plan.of(fusion_threshold_bytes=6000)) == ((0, 1), (2,), (3,))
    assert predictor.groups(Plan()) == ((0,), (1,), (2,), (3,))
