"""Predictions of a recorded DistributedDataParallel job: a real two-rank recording of a small model."""

import numpy as np
import pytest

from dpro_search.collect.trace import Trace
from dpro_search.errors import GraphError, InputError
from dpro_search.graph.ddp import build_ddp_graph
from dpro_search.graph.main_thread import main_waits_us
from dpro_search.kinds import JobInScenario, job_of
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import Scenario

RECORDING = "ddp_mlp"


def under(job: JobInScenario, *changes: str) -> tuple[JobInScenario, Plan]:
    """The job with changes as text, and the plan."""
    return job.under(job.job.scenario(changes))


def predicted(job: JobInScenario, *changes: str) -> Prediction:
    changed_job, plan = under(job, *changes)
    return changed_job.predict(plan)


@pytest.fixture(scope="module")
def ddp(trace: Trace) -> JobInScenario:
    return job_of(trace)


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


def test_the_recording_is_predicted(trace, ddp):
    measured = float(np.median(trace.iterations_us()))
    prediction = predicted(ddp)
    # Steps of milliseconds are the scheduler's: this asks for the right size, real workloads for accuracy.
    assert 0.3 * measured < prediction.iteration_us < 3 * measured
    assert prediction.source == "recorded"
    assert prediction.interval_us[0] < prediction.iteration_us < prediction.interval_us[1]
    assert prediction.peak_memory_bytes == trace.meta.peak_rss_bytes


def test_predictions_are_deterministic(trace, ddp):
    assert predicted(job_of(trace)) == predicted(ddp)


def test_a_slower_link_takes_longer_and_is_extrapolated(ddp):
    prediction = predicted(ddp, "rate=5mbit")
    assert prediction.source == "extrapolated"
    assert prediction.iteration_us > predicted(ddp).iteration_us + 50_000  # 54 kB at 5 Mbit/s


def test_slower_compute_takes_longer(ddp):
    assert predicted(ddp, "compute=20").iteration_us > predicted(ddp).iteration_us
    assert predicted(ddp, "rank1.compute=20").iteration_us > predicted(ddp).iteration_us


def test_many_buckets_cost_their_latencies(ddp):
    assert predicted(ddp, "bucket_cap_bytes=1B").iteration_us > predicted(ddp, "bucket_cap_bytes=1GB").iteration_us


@pytest.mark.parametrize(
    "plan", [Plan.of(cycle_time_us=1000.0), Plan.of(fusion_threshold_bytes=1), Plan(tensor_groups=(("9.bias",),))]
)
def test_plans_that_ddp_cannot_follow_are_refused(ddp, plan):
    for priced in (ddp.predict, lambda refused: ddp.job.lower(Scenario(plan=refused))):
        with pytest.raises(InputError, match="it knows bucket_cap_bytes"):
            priced(plan)


def test_a_rank_that_does_not_exist_is_refused(ddp):
    with pytest.raises(InputError, match="ranks 0 to 1"):
        under(ddp, "rank2.compute=0.9")


def test_more_samples_extend_fewer(ddp):
    few, many = (ddp.sampled(Plan(), samples=samples) for samples in (2, 4))
    np.testing.assert_array_equal(few, many[:2])


def test_a_step_that_was_not_profiled_cannot_be_asked_for(trace):
    with pytest.raises(GraphError, match=r"profiled: \[8, 9, 10, 11\]"):
        build_ddp_graph(trace, (3,))


def test_a_diagnosis_asks_about_faster_links_only_where_links_limit(ddp):
    def asks(*changes: str) -> bool:
        job, _ = under(ddp, *changes)
        return any(row.what_if == "bandwidth=2" for row in job.job.gains(job.scenario, {}))

    assert asks()
    assert not asks("rate=unlimited")
