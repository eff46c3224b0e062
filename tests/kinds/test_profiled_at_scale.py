"""Profiles of GPU jobs go through the importer, and from there through every verb, on the recorded cluster and on others."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from importer_kit import shared_trace

from dpro_search.cluster import parse_cluster
from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.trace import Trace
from dpro_search.costmodel.collectives.nccl import Placement, collective_us
from dpro_search.kinds import imported, job_of, kind_of, profiled_ddp, profiled_fsdp
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario
from tests.collect.kineto_files import COLLECTIVES, START, Profile, distributed
from tests.kinds.conformance import KindConformance
from tests.kinds.verbs import verb

SHARED = Path(__file__).parents[3] / "shared" / "traces"
MIB = 2**20
TWO = Placement(ranks_per_node=1, nodes=2)
NAMES = {"AllReduce": "allreduce", "AllGather": "_allgather_base", "ReduceScatter": "_reduce_scatter_base"}
SEARCH = ("--trials", 6, "--sampler", "mcmc")


def nccl(profile: Profile, kind: str, at: float, dur: float, size_bytes: int, launched: float) -> None:
    """A collective's kernel, with the size that NCCL's records have, in float elements."""
    stream_waits(profile, launched - 4)
    profile.kernel(
        f"ncclDevKernel_{kind}_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)",
        at,
        dur,
        launched=launched,
        stream=COLLECTIVES,
        **{
            "Collective name": NAMES[kind],
            "In msg nelems": size_bytes // 4 // (2 if kind == "AllGather" else 1),
            "Out msg nelems": size_bytes // 4 // (2 if kind == "ReduceScatter" else 1),
            "dtype": "Float",
            "Group size": 2,
            "Process Group Name": "0",
            "Process Group Ranks": "[0, 1]",
        },
    )


def stream_waits(profile: Profile, at: float) -> None:
    """The host makes a stream wait for another, as PyTorch does around each collective."""
    profile.call("cudaStreamWaitEvent", at, 1)


def ddp_profile(rank: int, steps: int = 4) -> Profile:
    """Steps of 1000 us: forward 200, two buckets in the backward pass, the last one exposed for 150, an optimizer of 100.

    The host launches all of it at once, and waits for the device.
    """
    profile = Profile(pid=100 + rank, device=rank)
    for number in range(steps):
        at = START + 1000 * number
        profile.step(number, at, 990)
        profile.kernel("forward", at + 20, 200, launched=at + 5)
        profile.kernel("backward1", at + 220, 200, launched=at + 30)
        nccl(profile, "AllReduce", at + 430, 200, 8 * MIB, at + 50)
        profile.kernel("backward0", at + 420, 250, launched=at + 60)
        nccl(profile, "AllReduce", at + 680, 150, 4 * MIB, at + 80)
        stream_waits(profile, at + 90)
        profile.kernel("optimizer", at + 840, 100, launched=at + 95)
        profile.call("cudaDeviceSynchronize", at + 105, 840)
    return profile


def fsdp_profile(rank: int, steps: int = 4) -> Profile:
    """Steps of 1000 us: a gather before the forward pass, one before the backward pass, a scatter after it."""
    profile = Profile(pid=100 + rank, device=rank)
    for number in range(steps):
        at = START + 1000 * number
        profile.step(number, at, 990)
        nccl(profile, "AllGather", at + 20, 100, 8 * MIB, at + 12)
        stream_waits(profile, at + 30)
        profile.kernel("forward", at + 130, 200, launched=at + 35)
        nccl(profile, "AllGather", at + 340, 100, 8 * MIB, at + 50)
        stream_waits(profile, at + 58)
        profile.kernel("backward", at + 450, 250, launched=at + 65)
        nccl(profile, "ReduceScatter", at + 710, 120, 8 * MIB, at + 80)
        stream_waits(profile, at + 88)
        profile.kernel("optimizer", at + 840, 100, launched=at + 95)
        profile.call("cudaDeviceSynchronize", at + 105, 840)
    return profile


def trace_of(profile: Any, folder: Path) -> Trace:
    files = [profile(rank).write(folder / f"rank{rank}.json", header=distributed(rank, 2)) for rank in range(2)]
    return import_trace(files)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return trace_of(ddp_profile, tmp_path_factory.mktemp("ddp"))


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return trace_of(fsdp_profile, tmp_path_factory.mktemp("fsdp"))


@pytest.fixture(scope="module")
def folder(ddp: Trace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "trace"
    ddp.save(path)
    return path


def on(trace: Trace, cluster: str, *changes: str) -> Any:
    job = job_of(trace)
    return job.under(job.job.scenario(changes, Scenario().on(cluster)))


def test_both_are_recognised(ddp: Trace, fsdp: Trace) -> None:
    assert kind_of(ddp) is profiled_ddp.KIND
    assert kind_of(fsdp) is profiled_fsdp.KIND


def test_the_recorded_steps_are_replayed_stream_by_stream(folder: Path) -> None:
    facts = verb("replay", folder)
    assert facts["predicted_iteration_us"] == pytest.approx(1000, rel=0.02)
    assert verb("diagnose", folder)["findings"] is not None


def test_compute_is_kept_and_exposed_communication_left_out(ddp: Trace, fsdp: Trace) -> None:
    """Of DDP's 1000 us nothing but the second all-reduce is exposed, from 680 to 830; of FSDP's the two gathers and the scatter."""
    for trace, exposed_us in ((ddp, 150), (fsdp, 100 + 100 + 120)):
        job, plan = on(trace, "2xg4dn.8xlarge", "communication=0")
        # Streams start what waited a few us after what they waited for, as recorded.
        assert job.predict(plan).iteration_us == pytest.approx(1000 - exposed_us, abs=30)


def test_buckets_overlap_with_the_backward_pass_on_another_cluster(ddp: Trace) -> None:
    """The first bucket is posted 250 us before the end of the backward pass, and the second behind it."""
    job, plan = on(ddp, "2xg4dn.8xlarge")
    first, second = (collective_us("all_reduce", size, parse_cluster("2xg4dn.8xlarge"), TWO) for size in (8 * MIB, 4 * MIB))
    exposed_us = max(first + second - 250, second)
    assert job.predict(plan).iteration_us == pytest.approx(850 + exposed_us, rel=0.05)


def test_units_gather_over_all_ranks_of_a_cluster(fsdp: Trace) -> None:
    few, many = (on(fsdp, f"{hosts}xg4dn.8xlarge")[0].predict(Plan()).iteration_us for hosts in (2, 16))
    assert few < many
    placement = Placement(ranks_per_node=1, nodes=16)
    gather_us, scatter_us = (
        collective_us(kind, 8 * MIB, parse_cluster("16xg4dn.8xlarge"), placement) for kind in ("all_gather", "reduce_scatter")
    )
    assert many == pytest.approx(680 + 2 * gather_us + scatter_us, rel=0.05)


def test_it_is_searched_exported_and_reported_on_a_cluster(folder: Path, tmp_path: Path) -> None:
    result = verb("run", folder, "--cluster", "16xg4dn.8xlarge", *SEARCH, "--out", tmp_path / "run")
    assert result["cluster"]["ranks"] == 16
    assert result["plans"]
    verb("export", tmp_path / "run", "--target", "ddp", "--out", tmp_path / "tuned")
    assert "searched for 16xg4dn.8xlarge" in (tmp_path / "tuned" / "README.md").read_text()
    verb("report", tmp_path / "run", "--out", tmp_path / "page.html")
    assert "All predictions on this page are for 16xg4dn.8xlarge" in (tmp_path / "page.html").read_text()


def test_a_joined_bucket_overlaps_with_nothing(folder: Path) -> None:
    apart = verb("replay", folder, "--cluster", "2xg4dn.8xlarge")
    joined = verb("replay", folder, "--cluster", "2xg4dn.8xlarge", "--set", "bucket_cap_bytes=1GiB")
    assert joined["predicted_iteration_us"] > apart["predicted_iteration_us"]


def test_the_timeline_of_a_plan_can_be_looked_at(folder: Path, tmp_path: Path) -> None:
    facts = verb("replay", folder, "--set", "bucket_cap_bytes=1GiB", "--perfetto", tmp_path / "plan.json")
    events = json.loads((tmp_path / "plan.json").read_bytes())["traceEvents"]
    assert sum(event.get("ph") == "X" for event in events) >= facts["ops"]


@pytest.fixture(scope="module")
def real() -> Trace:
    """ResNet-50 in five buckets of 25,557,032 floats together, on GPUs that the profile names."""
    if not SHARED.is_dir():
        pytest.skip("no shared traces")
    return shared_trace("kineto_single/ddp_resnet50_a100_rank0of2.json.gz")


PLANS = (Plan(), Plan.of(gradient_as_bucket_view=True), Plan.of(bucket_cap_bytes=4 * MIB))


def test_plans_on_the_recorded_machine_are_those_of_the_recording(real: Trace) -> None:
    assert kind_of(real) is profiled_ddp.KIND
    job, _ = on(real, "dgx-a100-40", "ranks=2")
    for plan in PLANS:
        assert job.predict(plan).iteration_us == pytest.approx(job_of(real).predict(plan).iteration_us)


def test_plans_of_a_real_profile_are_predicted_with_the_kernels_and_links_of_another_machine(real: Trace) -> None:
    """The host of this job launches as late as before: faster kernels and more ranks change what is computed and exposed only."""
    recorded = job_of(real)
    for plan in PLANS:
        here = recorded.predict(plan)
        job, _ = on(real, "8xhgx-h100")
        prediction = job.predict(plan)
        assert prediction.breakdown_us["compute"] < 0.7 * here.breakdown_us["compute"]
        assert prediction.iteration_us == pytest.approx(here.iteration_us, rel=0.02)
        assert prediction.interval_us[0] <= here.interval_us[0] <= prediction.iteration_us <= prediction.interval_us[1]


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared traces")
def test_a_profile_with_other_collectives_stays_an_imported_trace() -> None:
    trace = shared_trace("kineto_dlrm_8ranks")
    assert kind_of(trace) is imported.KIND


class TestProfiledDdp(KindConformance):
    kind = profiled_ddp.KIND

    @classmethod
    def recording(cls) -> Trace:
        with tempfile.TemporaryDirectory() as folder:
            return trace_of(ddp_profile, Path(folder))
