"""Predictions of a recorded DistributedDataParallel job: a real two-rank recording of a small model."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from dpro_search.collect.torch_assemble import assemble_ddp
from dpro_search.collect.trace import Trace
from dpro_search.errors import GraphError, InputError
from dpro_search.graph.ddp import build_ddp_graph
from dpro_search.graph.main_thread import main_waits_us
from dpro_search.kinds.ddp.predictor import DdpPredictor
from dpro_search.space.plan import Plan

RAW = Path(__file__).parents[2] / "data" / "ddp_mlp"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return assemble_ddp(RAW)


@pytest.fixture(scope="module")
def predictor(trace: Trace) -> DdpPredictor:
    return DdpPredictor.from_trace(trace)


def test_core_time_is_what_the_kernel_counted_without_the_profiler_and_what_others_always_took(trace):
    graph = build_ddp_graph(trace)
    untraced = ~trace.steps.traced & (trace.steps.index >= 4)
    for rank in range(2):
        counted = float(np.median(trace.steps.compute_cpu_us[untraced & (trace.steps.rank == rank)]))
        used = graph.backward_us[:, rank] + graph.copy_us[:, rank].sum(axis=1) + graph.after_us[:, rank]
        assert 0.8 * counted < float(np.median(used)) < 2 * counted


def test_the_main_thread_waits_for_each_last_bucket(trace):
    for step in build_ddp_graph(trace).steps:
        assert all(len(main_waits_us(trace, rank, int(step))) for rank in range(2))


def test_the_recording_is_predicted(trace, predictor):
    measured = float(np.median(trace.iterations_us()))
    prediction = predictor.predict(Plan())
    # Steps of milliseconds are the scheduler's: this asks for the right size, real workloads for accuracy.
    assert 0.3 * measured < prediction.iteration_us < 3 * measured
    assert prediction.source == "recorded"
    assert prediction.interval_us[0] < prediction.iteration_us < prediction.interval_us[1]
    assert prediction.peak_memory_bytes == trace.meta.peak_rss_bytes


def test_the_same_seed_predicts_the_same(trace):
    first, second = (DdpPredictor.from_trace(trace, seed=3).predict(Plan()) for _ in range(2))
    assert first == second


def test_a_slower_link_takes_longer_and_is_extrapolated(predictor):
    slow = msgspec.structs.replace(predictor.cluster, rate_bps=5e6)
    prediction = predictor.predict(Plan(), slow)
    assert prediction.source == "extrapolated"
    assert prediction.iteration_us > predictor.predict(Plan()).iteration_us + 50_000  # 54 kB at 5 Mbit/s
    assert predictor.at(cluster=slow).predict(Plan()).iteration_us == prediction.iteration_us


def test_slower_compute_takes_longer(predictor):
    assert predictor.faster(20).predict(Plan()).iteration_us > predictor.predict(Plan()).iteration_us
    assert predictor.faster(20, rank=1).predict(Plan()).iteration_us > predictor.predict(Plan()).iteration_us


def test_many_buckets_cost_their_latencies(predictor):
    each = predictor.predict(Plan.of(bucket_cap_bytes=1)).iteration_us
    assert each > predictor.predict(Plan.of(bucket_cap_bytes=10**9)).iteration_us


@pytest.mark.parametrize(
    "plan", [Plan.of(cycle_time_us=1000.0), Plan.of(fusion_threshold_bytes=1), Plan(tensor_groups=(("9.bias",),))]
)
def test_plans_that_ddp_cannot_follow_are_refused(predictor, plan):
    with pytest.raises(InputError, match="it knows bucket_cap_bytes"):
        predictor.predict(plan)


def test_a_rank_that_does_not_exist_is_refused(predictor):
    with pytest.raises(InputError, match="ranks 0 to 1"):
        predictor.faster(0.9, rank=2)


def test_samples_do_not_depend_on_the_number_of_threads(predictor):
    one, two = (predictor.sampled(Plan(), samples=4, threads=threads) for threads in (1, 2))
    np.testing.assert_array_equal(one, two)


def test_a_step_that_was_not_profiled_cannot_be_asked_for(trace):
    with pytest.raises(GraphError, match=r"profiled: \[8, 9, 10, 11\]"):
        build_ddp_graph(trace, (3,))
