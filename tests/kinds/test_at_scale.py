"""Recorded data-parallel jobs on clusters of GPUs: rings on the cluster's links, message by message, ranks folded."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
import pytest

from dpro_search.cluster import Cluster, parse_cluster
from dpro_search.costmodel.collectives.nccl import Placement, collective_us
from dpro_search.errors import InputError
from dpro_search.kinds import JobInScenario, job_of
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scale, Scenario
from tests.recordings import trace_of


@functools.cache
def ddp() -> JobInScenario:
    return job_of(trace_of("ddp_blocks"))


def on(cluster: str, *changes: str) -> tuple[JobInScenario, Plan]:
    job = ddp()
    return job.under(job.job.scenario(changes, Scenario().on(cluster)))


def iteration_us(cluster: str, *changes: str) -> float:
    job, plan = on(cluster, *changes)
    return job.predict(plan).iteration_us


def all_reduce_us(cluster: Cluster, size_bytes: float) -> float:
    placement = Placement(ranks_per_node=cluster.ranks // cluster.hosts, nodes=cluster.hosts)
    return float(collective_us("all_reduce", size_bytes, cluster, placement))


def test_one_bucket_that_nothing_hides_takes_what_the_model_of_collectives_says(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text('base = "g4dn.8xlarge"\nhosts = 8\n')
    name = str(tmp_path / "one.toml")
    gradients_bytes = sum(tensor.size_bytes for tensor in ddp().job.tensors)
    all_at_the_end = iteration_us(name, "bucket_cap_bytes=1GiB")
    job, _ = on(name)
    compute_us = job.predict(Plan()).breakdown_us["compute"]
    assert all_at_the_end - compute_us == pytest.approx(all_reduce_us(parse_cluster(name), gradients_bytes), rel=1e-3)


def test_more_hosts_never_make_an_iteration_shorter() -> None:
    times = [iteration_us(f"{hosts}xhgx-h100") for hosts in (1, 2, 8, 64)]
    assert times == sorted(times)


def test_the_interval_spans_what_published_clusters_reach_of_the_bare_links() -> None:
    job, plan = on("8xpolaris")
    prediction = job.predict(plan)
    low, high = prediction.interval_us
    assert low <= prediction.iteration_us < high
    assert job.calibration is not None
    assert not job.calibration.calibrated
    assert min(high - prediction.iteration_us, prediction.iteration_us - low) >= 0.1 * prediction.iteration_us
    assert prediction.source == "extrapolated"


def test_a_scenario_on_gpus_is_lowered_to_what_is_predicted_there() -> None:
    scenario = Scenario(scales=(Scale.parse("rank1.compute=0.5"),)).on("8xhgx-h100")
    job, plan = ddp().under(scenario)
    lowered = ddp().job.lower(scenario)
    assert lowered.prediction(lowered.replayable.iterations()) == job.predict(plan)
    assert lowered.cluster.ranks == 64
    assert any("compute like the" in sentence for sentence in lowered.assumptions)


def test_faster_compute_is_asked_for_like_elsewhere() -> None:
    assert iteration_us("8xhgx-h100", "compute=0.5") < 0.6 * iteration_us("8xhgx-h100")


def test_ranks_may_be_fewer_than_devices() -> None:
    assert iteration_us("8xhgx-h100", "ranks=8") == iteration_us("1xhgx-h100")


def test_a_diagnosis_says_what_is_on_the_path_and_what_would_gain() -> None:
    job, _ = on("16xhgx-h100")
    facts = msgspec.to_builtins(job.diagnose())
    assert facts["iteration_us"] == pytest.approx(job.predict(Plan()).iteration_us, rel=1e-3)
    assert sum(row["alike"] for row in facts["ranks"]) == 128
    assert sum(row["duration_us"] for row in facts["critical_path"]) == pytest.approx(facts["iteration_us"], rel=0.02)
    gains = {row["what_if"]: row for row in facts["gains"]}
    assert gains["communication=0"]["predicted_iteration_us"] == pytest.approx(job.predict(Plan()).breakdown_us["compute"])
    for text in ("compute=0.9", "bandwidth=2"):
        changed_job, plan = on("16xhgx-h100", text)
        assert gains[text]["predicted_iteration_us"] == changed_job.predict(plan).iteration_us
    assert any("would gain" in sentence for sentence in facts["findings"])
    for table in job.diagnose().tables:
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_faster_links_and_a_rate_are_asked_for_like_elsewhere() -> None:
    slow = iteration_us("8xg4dn.8xlarge", "rate=1gbit")
    assert iteration_us("8xg4dn.8xlarge") < iteration_us("8xg4dn.8xlarge", "rate=10gbit") < slow
    assert iteration_us("8xg4dn.8xlarge", "rate=1gbit", "bandwidth=2") == pytest.approx(
        iteration_us("8xg4dn.8xlarge", "rate=2gbit"), rel=1e-9
    )


def test_what_is_not_known_there_is_one_line() -> None:
    job, _ = on("2xhgx-h100")
    with pytest.raises(InputError, match="cannot be predicted without one of its steps"):
        job.job.compared(0)
    with pytest.raises(InputError, match="a GPU each; leave cores out"):
        on("2xhgx-h100", "cores=2")
    with pytest.raises(InputError, match="has no rank 16: ranks are 0 to 15"):
        on("2xhgx-h100", "ranks=99")
