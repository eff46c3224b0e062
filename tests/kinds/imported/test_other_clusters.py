"""Profiles of GPUs on other GPUs, links and numbers of ranks, from real traces."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from importer_kit import shared_trace

from dpro_search.cluster import parse_cluster
from dpro_search.costmodel.roofline import kernel_ratio
from dpro_search.errors import InputError
from dpro_search.kinds import JobInScenario, PlanOptions
from dpro_search.kinds.imported.job import Imported
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import Scenario

SHARED = Path(__file__).parents[4] / "shared" / "traces"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="no shared traces")


@functools.cache
def resnet() -> Imported:
    """Rank 0 of 2 A100; DistributedDataParallel."""
    trace = shared_trace("kineto_single/ddp_resnet50_a100_rank0of2.json.gz")
    return Imported.of(trace, PlanOptions())


@functools.cache
def dlrm() -> Imported:
    """All 8 ranks, V100."""
    return Imported.of(shared_trace("kineto_dlrm_8ranks"), PlanOptions())


@functools.cache
def resnet_on_a_v100() -> Imported:
    """ResNet-50 with 32 images, V100."""
    return Imported.of(shared_trace("kineto_single/resnet50_v100_workers0.json.gz"), PlanOptions())


def under(job: Imported, *changes: str, cluster: str | None = None) -> JobInScenario:
    return JobInScenario(job).under(job.scenario(changes, Scenario().on(cluster)))[0]


@functools.cache
def predicted(job: Imported, *changes: str, cluster: str | None = None) -> Prediction:
    return under(job, *changes, cluster=cluster).predict(Plan())


@pytest.mark.parametrize(("job", "ranks", "machine"), [(resnet, 2, "dgx-a100-40"), (dlrm, 8, "dgx-1-v100")])
def test_the_recorded_cluster_and_ranks_change_nothing(job, ranks: int, machine: str) -> None:
    recorded_us = predicted(job()).iteration_us
    place = f"recorded_on={machine}"
    assert predicted(job(), place, f"ranks={ranks}").iteration_us == recorded_us
    assert predicted(job(), place, f"ranks={ranks}", cluster=machine).iteration_us == recorded_us


def test_the_recorded_machine_is_known_from_the_gpus_and_said() -> None:
    assumed = under(resnet(), "ranks=16").assumptions
    assert assumed[0].startswith("the job was recorded on DGX A100 40GB, going by its GPUs (NVIDIA A100-PG509-200)")
    assert "groups of all 2 ranks become groups of all 16" in assumed
    assert "16 ranks compute like the 1 recorded ones" in assumed


def test_without_the_name_of_the_gpus_one_line_names_the_option() -> None:
    trace = resnet().trace
    job = Imported.of(replace(trace, meta=msgspec.structs.replace(trace.meta, devices=())), PlanOptions())
    with pytest.raises(InputError, match=r"does not say on what GPUs.*--set recorded_on=hgx-h100"):
        predicted(job, "ranks=16")
    assert predicted(job, "ranks=16", "recorded_on=dgx-a100-40").iteration_us > 0


def test_without_the_name_of_the_gpus_kernels_stay_and_transfers_take_what_the_cluster_says() -> None:
    trace = resnet().trace
    unnamed = replace(trace, meta=msgspec.structs.replace(trace.meta, devices=()))
    moved = under(Imported.of(unnamed, PlanOptions()), "launch=0", cluster="2xhgx-h100")
    assumed = moved.assumptions
    assert assumed[0].startswith("the trace does not say on what GPUs it was recorded; recorded_on=MACHINE")
    assert any("the recorded GPU is not known" in sentence for sentence in assumed)
    here, prediction = predicted(resnet(), "launch=0"), moved.predict(Plan())
    assert prediction.breakdown_us["compute"] == pytest.approx(here.breakdown_us["compute"], rel=0.02)
    unsized = replace(unnamed, events=replace(trace.events, size_bytes=np.full(len(trace.events), -1)))
    with pytest.raises(InputError, match=r"neither the names of its GPUs nor the sizes of its collectives: name the machine"):
        predicted(Imported.of(unsized, PlanOptions()), cluster="2xhgx-h100")


def test_a_faster_gpu_shortens_what_the_host_does_not_bound() -> None:
    before, after = predicted(resnet(), "launch=0"), predicted(resnet(), "launch=0", "ranks=2", cluster="hgx-h100")
    assert 0.4 < after.iteration_us / before.iteration_us < 0.75  # memory is 2.15 times as fast, tf32 3.2 times
    low, high = after.interval_us
    assert low < 0.85 * after.iteration_us
    assert high > 1.15 * after.iteration_us
    assert after.source == "extrapolated"


def test_a_model_recorded_on_a_v100_takes_on_an_a100_what_a_profile_of_it_there_shows() -> None:
    """ResNet-50 with 32 images on both; what the kernels take, without launches and input."""
    free = ("launch=0", "loading=0")
    moved = predicted(resnet_on_a_v100(), *free, "recorded_on=dgx-1-v100", "ranks=1", cluster="dgx-a100-40")
    there_us = predicted(resnet(), "launch=0").iteration_us
    assert moved.iteration_us == pytest.approx(there_us, rel=0.2)
    assert moved.interval_us[0] < there_us < moved.interval_us[1]


def test_one_rank_alone_communicates_nothing_and_waits_for_none() -> None:
    alone = predicted(resnet(), "ranks=1", "launch=0")
    assert alone.breakdown_us["exposed_communication"] == alone.breakdown_us["waiting_for_ranks"] == 0
    assert alone.iteration_us == pytest.approx(alone.breakdown_us["compute"] + alone.breakdown_us["unknown"])


def test_more_hosts_take_longer_and_slower_nics_longer_still() -> None:
    fewer, more, slow = (
        predicted(dlrm(), "launch=0", *changes, cluster=cluster).iteration_us
        for cluster, changes in (("2xdgx-1-v100", ()), ("16xdgx-1-v100", ()), ("16xdgx-1-v100", ("rate=10gbit",)))
    )
    assert fewer < more < slow


@settings(max_examples=8, deadline=None)
@given(gbit=st.floats(1, 400), factor=st.floats(1, 10))
def test_faster_nics_never_make_an_iteration_longer(gbit: float, factor: float) -> None:
    slow, fast = (predicted(dlrm(), f"rate={rate}gbit", cluster="4xdgx-1-v100").iteration_us for rate in (gbit, gbit * factor))
    assert fast <= slow * (1 + 1e-9)


def test_pcie_in_place_of_nvlink_takes_longer(tmp_path: Path) -> None:
    file = tmp_path / "pcie.toml"
    file.write_text('base = "dgx-a100-40"\nnvlink = false\n[pcie]\nrate = "31.5 GB/s"\nlatency = "1us"\ndevices = 8\n')
    changes = ("launch=0", "ranks=2")
    nvlink, pcie = (predicted(resnet(), *changes, cluster=one).iteration_us for one in ("dgx-a100-40", str(file)))
    assert pcie > 1.2 * nvlink


def test_sizes_that_were_not_recorded_are_said_to_come_from_the_times() -> None:
    trace = resnet().trace
    events = replace(trace.events, size_bytes=np.full(len(trace.events), -1))
    silent = Imported.of(replace(trace, events=events), PlanOptions())
    assumed = under(silent, cluster="2xhgx-h100").assumptions
    assert any("collectives were not recorded: they are taken from their transfer times" in sentence for sentence in assumed)


@pytest.mark.parametrize(
    ("changes", "cluster", "message"),
    [
        (("cores=2",), None, "no knob 'cores'"),
        ((), "4xtestbed", "has no GPUs"),
        (("ranks=99",), "hgx-h100", "99 ranks do not fit on HGX H100: it has 8 devices"),
    ],
)
def test_what_is_not_possible_is_one_line(changes: tuple[str, ...], cluster: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        predicted(resnet(), *changes, cluster=cluster)


def test_a_model_that_was_profiled_on_two_gpus_is_predicted_from_one_for_the_other() -> None:
    """ResNet-50, 32 images, V100 with shapes to A100: kernels take 38.6 ms of a step there, of another version of PyTorch."""
    v100 = resnet_on_a_v100()
    place = "recorded_on=p3.16xlarge", "ranks=1"
    changed_job = under(v100, *place, cluster="1xa100-sxm-40gb")
    shapeless = Imported.of(replace(v100.trace, shapes=(), events=without_shapes(v100.trace.events)), PlanOptions())
    without = under(shapeless, *place, cluster="1xa100-sxm-40gb")
    assert changed_job.predict(Plan()).breakdown_us["compute"] == pytest.approx(38_575, rel=0.03)
    assert without.predict(Plan()).breakdown_us["compute"] == pytest.approx(38_575, rel=0.1)
    assert any("like square GEMMs" in line for line in without.assumptions)
    assert any("norms whose shapes were recorded (81 %" in line for line in changed_job.assumptions)


def without_shapes(events):
    return replace(events, shapes=np.full(len(events), -1, np.int32))


def test_a_diagnosis_there_has_no_measured_iteration() -> None:
    facts = msgspec.to_builtins(under(resnet(), "ranks=2", cluster="hgx-h100").diagnose())
    assert facts["measured_iteration_us"] is None
    assert facts["iteration_us"] > 0


def test_kernels_bound_by_arithmetic_and_by_memory_change_with_the_rate_that_bounds_them() -> None:
    v100, h100 = (parse_cluster(name).devices[0] for name in ("dgx-1-v100", "hgx-h100"))
    memory = kernel_ratio("vectorized_elementwise_kernel", "", v100, h100)
    assert memory.middle == pytest.approx(900 / 3350)
    half = kernel_ratio("volta_fp16_s884gemm_fp16_128x128", "", v100, h100)
    assert half.middle == pytest.approx(125 / 989.4)
    single = kernel_ratio("volta_sgemm_128x64_nn", "float", v100, h100)
    assert single.middle == pytest.approx(15.7 / 66.9)
    for ratio in (memory, half, single):
        assert ratio.low < ratio.middle < ratio.high
    assert kernel_ratio("sgemm", "", h100, h100) == (1.0, 1.0, 1.0)
