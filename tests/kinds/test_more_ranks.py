"""Fully sharded jobs and jobs with parameter servers with other numbers of ranks, on the recorded links and on machines of GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.cluster import parse_cluster
from dpro_search.collect.assemble.byteps import assemble_byteps
from dpro_search.collect.assemble.torch.job import assemble_torch
from dpro_search.collect.trace import Trace
from dpro_search.costmodel.collectives.horovod import at_cluster
from dpro_search.costmodel.collectives.nccl import Placement, collective_us
from dpro_search.errors import InputError
from dpro_search.kinds import JobInScenario, job_of
from dpro_search.kinds._gpu_cluster import GpuClusterJob
from dpro_search.kinds.servers.job import ParameterServerJob
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario
from dpro_search.space.servers.kvstore_job import process_loads
from dpro_search.space.servers.store_job import StoreJob

DATA = Path(__file__).parents[1] / "data"


@functools.cache
def fsdp() -> JobInScenario:
    return job_of(assemble_torch(DATA / "fsdp_mlp"))


@functools.cache
def kvstore() -> JobInScenario:
    return job_of(Trace.load(DATA / "kvstore_mlp"))


@functools.cache
def byteps() -> JobInScenario:
    return job_of(assemble_byteps(DATA / "byteps_mlp"))


def unplanned(here: JobInScenario) -> StoreJob:
    """Workers and servers before any plan."""
    assert isinstance(here.job, ParameterServerJob)
    job = here.job.unplanned_job(here.scenario)
    assert isinstance(job, StoreJob)
    return job


ALL = pytest.mark.parametrize("job", [fsdp, kvstore, byteps])
STORES = pytest.mark.parametrize("job", [kvstore, byteps])


def under(job: JobInScenario, *changes: str, cluster: str | None = None) -> tuple[JobInScenario, Plan]:
    return job.under(job.job.scenario(changes, Scenario().on(cluster)))


def iteration_us(job: JobInScenario, *changes: str, cluster: str | None = None) -> float:
    changed_job, plan = under(job, *changes, cluster=cluster)
    return changed_job.predict(plan).iteration_us


@ALL
def test_the_recorded_number_of_ranks_is_the_recorded_prediction(job: Callable[[], JobInScenario]) -> None:
    changed_job, plan = under(job(), f"ranks={job().cluster.ranks}")
    assert changed_job.predict(plan) == job().predict(Plan())
    assert changed_job.calibration == job().calibration


@ALL
def test_another_number_of_ranks_is_not_calibrated(job: Callable[[], JobInScenario]) -> None:
    changed_job, plan = under(job(), f"ranks={2 * job().cluster.ranks}")
    assert changed_job.calibration is not None
    assert "number of" in changed_job.calibration.text
    assert changed_job.calibration.widening > 1
    assert changed_job.calibration.model_error[1] >= job().calibration.model_error[1]  # type: ignore[union-attr]
    assert changed_job.predict(plan).source == "extrapolated"


@ALL
def test_more_ranks_make_no_iteration_shorter(job: Callable[[], JobInScenario]) -> None:
    count = job().cluster.ranks
    times = [iteration_us(job(), f"ranks={ranks}", "rate=500mbit") for ranks in (count, 2 * count, 4 * count)]
    assert times == sorted(times)
    assert times[-1] > times[0]


@ALL
def test_faster_links_make_no_iteration_longer(job: Callable[[], JobInScenario]) -> None:
    times = [iteration_us(job(), "ranks=4", f"rate={rate}") for rate in ("1mbit", "500mbit", "2gbit", "unlimited")]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


@settings(max_examples=40)
@given(ranks=st.integers(2, 512), more=st.integers(1, 512), rate=st.floats(1e8, 4e11))
def test_a_collective_of_more_ranks_is_never_cheaper(ranks: int, more: int, rate: float) -> None:
    measured = fsdp().job.measured  # type: ignore[attr-defined]
    recorded = (measured.cluster.rate_bps, measured.cluster.ranks)
    few, many = (at_cluster(measured.costs, 1.0, recorded, (rate, count)) for count in (ranks, ranks + more))
    for name in ("alpha_busy_us", "alpha_more_us", "alpha_tail_us", "beta_busy_us", "beta_tail_us"):
        assert getattr(many, name) >= getattr(few, name) - 1e-12, name


# On machines of GPUs.


def test_units_are_gathered_and_scattered_over_all_ranks_of_a_machine() -> None:
    """Without anything to hide behind, what communication adds is what the collectives take one after the other."""
    cluster = "8xg4dn.8xlarge"
    machine = parse_cluster(cluster)
    job, plan = under(fsdp(), "compute=0.000001", cluster=cluster)
    graph = fsdp().job.measured.graph  # type: ignore[attr-defined]
    placement = Placement(ranks_per_node=1, nodes=8)
    expected_us = sum(float(collective_us("all_gather", size, machine, placement)) for size in graph.size_bytes.tolist())
    assert job.predict(plan).iteration_us == pytest.approx(expected_us, rel=0.02)


def test_the_plans_of_a_sharded_job_are_predicted_there() -> None:
    job, _ = under(fsdp(), cluster="8xg4dn.8xlarge@1gbit")
    assert isinstance(job.job, GpuClusterJob)
    recorded_us = job.predict(Plan()).iteration_us
    assert job.predict(Plan.of(reshard_after_forward=False)).iteration_us < recorded_us
    assert job.predict(Plan.of(prefetch=True)).iteration_us <= recorded_us
    assert {row.what_if for row in job.diagnose().gains} >= {"prefetch=1", "reshard_after_forward=0"}
    assert job.calibration is not None
    assert not job.calibration.calibrated


@pytest.mark.parametrize("job", [fsdp, byteps])
def test_more_hosts_of_a_machine_make_no_iteration_shorter(job: Callable[[], JobInScenario]) -> None:
    times = [iteration_us(job(), cluster=f"{hosts}xg4dn.8xlarge@1gbit") for hosts in (2, 4, 8)]
    assert times == sorted(times)


@pytest.mark.parametrize("job", [fsdp, byteps])
def test_faster_nics_make_no_iteration_longer(job: Callable[[], JobInScenario]) -> None:
    times = [iteration_us(job(), cluster=f"4xg4dn.8xlarge@{rate}") for rate in ("1mbit", "1gbit", "10gbit", "100gbit")]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


@STORES
def test_workers_of_a_host_share_its_link(job: Callable[[], JobInScenario]) -> None:
    changed_job, _ = under(job(), cluster="2xabci-v@1gbit")
    assert changed_job.cluster.ranks == 8
    assert unplanned(changed_job).host[:8].tolist() == [0] * 4 + [1] * 4  # type: ignore[attr-defined]
    assert "(GPU hosts)" in changed_job.calibration.text  # type: ignore[union-attr]


def test_a_worker_s_link_carries_what_all_workers_of_its_host_send() -> None:
    together, apart = (unplanned(under(kvstore(), cluster=name)[0]) for name in ("2xabci-v@1gbit", "8xg4dn.8xlarge@2gbit"))  # type: ignore[attr-defined]
    assert together.bytes_per_us == apart.bytes_per_us  # abci-v has two NICs a host
    assert process_loads(together)[0].link_us == pytest.approx(4 * process_loads(apart)[0].link_us)


@STORES
def test_servers_are_chosen_for_more_workers(job: Callable[[], JobInScenario]) -> None:
    changed_job, _ = under(job(), "ranks=8", "rate=500mbit")
    assert changed_job.predict(Plan(servers=8)).iteration_us < changed_job.predict(Plan(servers=1)).iteration_us
    assert changed_job.predict(Plan(servers_on_workers=True)).iteration_us > 0


def test_a_server_s_link_carries_what_all_workers_send() -> None:
    few, many = (unplanned(under(kvstore(), f"ranks={ranks}", "rate=500mbit")[0]) for ranks in (2, 8))  # type: ignore[attr-defined]
    servers = slice(-len(few.server_core), None)
    before = [load.sent_bytes for load in process_loads(few)[servers]]
    after = [load.sent_bytes for load in process_loads(many)[servers]]
    assert after == pytest.approx([4 * size for size in before])


def test_machines_of_gpus_with_the_recorded_cores_and_links_leave_the_recorded_job_as_it_is() -> None:
    on_gpus, _ = under(byteps(), "rate=unlimited", cluster="2xg4dn.8xlarge")
    assert on_gpus.cluster == byteps().cluster
    assert "(GPU hosts)" in on_gpus.calibration.text  # type: ignore[union-attr]
    assert "(GPU hosts)" not in byteps().calibration.text  # type: ignore[union-attr]


@STORES
def test_hosts_of_different_sizes_are_refused(job: Callable[[], JobInScenario]) -> None:
    with pytest.raises(InputError, match="as many workers on each host"):
        under(job(), "ranks=6", cluster="2xabci-v")
