"""Recorded data-parallel jobs on clusters of GPUs: rings on the cluster's links, message by message, ranks folded."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from dpro_search.cluster import Cluster, parse_cluster
from dpro_search.errors import InputError
from dpro_search.kinds import Job, job_of
from dpro_search.kinds._at_scale import RING_EFFICIENCY
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario
from tests.recordings import trace_of


@functools.cache
def ddp() -> Job:
    return job_of(trace_of("ddp_blocks"))


def on(cluster: str, *changes: str) -> tuple[Job, Plan]:
    job = ddp()
    known = (*job.askable, *job.settings)
    return job.under(Scenario().on(cluster).changed(changes, known=known, job=job.title))


def iteration_us(cluster: str, *changes: str) -> float:
    job, plan = on(cluster, *changes)
    return job.predict(plan).iteration_us


def ring_us(cluster: Cluster, size_bytes: float) -> float:
    """A ring all-reduce of all ranks of hosts with one device each (Thakur et al. 2005): 2 (p - 1) (alpha + n / (p B))."""
    ranks, rate = cluster.ranks, cluster.bandwidth_bytes_per_us(range(cluster.ranks)) * RING_EFFICIENCY
    return 2 * (ranks - 1) * (cluster.latency_us(range(ranks)) + size_bytes / ranks / rate)


def test_one_bucket_that_nothing_hides_takes_what_the_ring_formula_says(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text('base = "g4dn.8xlarge"\nhosts = 8\n')
    name = str(tmp_path / "one.toml")
    gradients_bytes = sum(tensor.size_bytes for tensor in ddp().tensors)
    all_at_the_end = iteration_us(name, "bucket_cap_bytes=1GiB")
    job, _ = on(name)
    compute_us = job.predict(Plan()).breakdown_us["compute"]
    assert all_at_the_end - compute_us == pytest.approx(ring_us(parse_cluster(name), gradients_bytes), rel=1e-3)


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


def test_faster_compute_is_asked_for_like_elsewhere() -> None:
    assert iteration_us("8xhgx-h100", "compute=0.5") < 0.6 * iteration_us("8xhgx-h100")


def test_ranks_may_be_fewer_than_devices() -> None:
    assert iteration_us("8xhgx-h100", "ranks=8") == iteration_us("1xhgx-h100")


def test_what_is_not_known_there_is_one_line() -> None:
    job, _ = on("2xhgx-h100")
    with pytest.raises(InputError, match="diagnose the recording"):
        job.diagnose()
    servers = job_of(trace_of("byteps_mlp"))
    with pytest.raises(InputError, match=r"a job with BytePS cannot .* other devices; a Horovod job and a DistributedDataParallel"):
        servers.under(Scenario().on("2xhgx-h100"))
