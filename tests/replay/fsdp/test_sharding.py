"""What ways to shard cost, on steps whose times can be worked out by hand."""

import pytest
from ddp_jobs import FREE
from fsdp_graphs import two_units

from dpro_search.errors import InputError
from dpro_search.kinds import JobInScenario
from dpro_search.kinds._measured import MeasuredStep
from dpro_search.kinds._program import program_replay
from dpro_search.kinds.fsdp.job import Fsdp
from dpro_search.replay import replay
from dpro_search.replay.path.segments import path_segments
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario

CLUSTER = ClusterSpec(cores=(0, 1))
GATHER, SCATTER = 1 + 20, 1 + 40  # a latency of 1 us, and 1 us a byte of an all-reduce
COMPUTE = 4 * 100 + 8 * 5 + 30


def sharded(**options) -> Fsdp:
    return Fsdp(MeasuredStep(graph=two_units(**options), costs=FREE, cluster=CLUSTER, peak_rss_bytes=10**6))


def iteration_us(job: Fsdp, plan: Plan | None = None, *changes: str) -> float:
    scenario = Scenario(plan=plan or Plan()).changed(changes, known=job.settings, job=job.title)
    return job.lower(scenario).replayable.iterations().iteration_us


def test_nothing_is_hidden_where_every_collective_is_waited_for_at_once():
    assert iteration_us(sharded()) == pytest.approx(COMPUTE + 4 * GATHER + 2 * SCATTER)


def test_prefetching_hides_the_gather_of_every_unit_but_the_first_in_the_forward_pass():
    saved = iteration_us(sharded()) - iteration_us(sharded(), Plan.of(prefetch=True))
    assert saved == pytest.approx(GATHER, abs=3)  # latencies beside computing ranks vary


def test_prefetching_cannot_hide_more_than_there_is_to_compute():
    small = sharded(work=5.0)
    assert iteration_us(small) - iteration_us(small, Plan.of(prefetch=True)) == pytest.approx(5, abs=3)


def test_parameters_that_are_kept_cost_no_second_gather_and_no_copies():
    kept = Plan.of(reshard_after_forward=False)
    assert iteration_us(sharded()) - iteration_us(sharded(), kept) == pytest.approx(2 * GATHER + 4 * 5)
    prediction = JobInScenario(sharded()).predict(kept)
    assert (prediction.source, prediction.peak_memory_bytes) == ("extrapolated", None)
    assert JobInScenario(sharded()).predict(Plan()).peak_memory_bytes == 10**6


def test_slower_compute_takes_longer_on_any_rank():
    assert iteration_us(sharded(), None, "compute=2") == pytest.approx(2 * COMPUTE + 4 * GATHER + 2 * SCATTER)
    assert iteration_us(sharded(), None, "rank1.compute=2") == pytest.approx(2 * COMPUTE + 4 * GATHER + 2 * SCATTER)


@pytest.mark.parametrize("plan", [Plan.of(bucket_cap_bytes=1), Plan(micro_batches=2)])
def test_plans_of_other_kinds_of_jobs_are_refused(plan):
    with pytest.raises(InputError, match=r"a fully sharded job has no (bucket_cap_bytes|micro_batches)"):
        JobInScenario(sharded()).predict(plan)


def test_an_iteration_is_a_graph_with_the_times_of_the_machine():
    program = program_replay(sharded().lower(Scenario()))
    timeline, ops = program.iterations(), program.timeline()
    ops.graph.validate()
    assert replay(ops.graph).makespan_us == pytest.approx(ops.makespan_us)
    assert ops.makespan_us == pytest.approx(timeline.iteration_us, rel=0.01)


def test_findings_name_gathers_and_the_knobs():
    job = sharded(size=400.0)
    program = program_replay(job.lower(Scenario()))
    path, gained = path_segments(program.timeline()), job.gains(Scenario(), job.questions(Scenario()))
    sentences = job.findings(path, gained, program.iterations().iteration_us)
    assert f"all-gathers {4 * 201:.1f} us of it, reduce-scatter of " in sentences[0]
    assert any("reshard_after_forward=False) would gain" in sentence for sentence in sentences)
    assert any("set_modules_to_forward_prefetch" in sentence for sentence in sentences)
