"""Profiles of GPUs in another precision: whole jobs, as verbs answer, beside measured pairs, and what is refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from importer_kit import shared_trace
from kineto_files import small_job

from dpro_search.collect.readers.kineto.importer import read
from dpro_search.collect.sample import sample_trace_path
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.kinds import JobInScenario, PlanOptions
from dpro_search.kinds.imported.job import Imported
from dpro_search.kinds.profiled_ddp.job import ProfiledDdp
from dpro_search.kinds.recorded.job import recorded_replay
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import Scenario
from tests.every_case import every_case
from tests.kinds.verbs import printed, refusal, verb
from tests.recordings import DATA, imported

SHARED = Path(__file__).parents[3] / "shared" / "traces"
SAMPLE = ("--sample", "resnet50_ddp_a100")


@functools.cache
def on_a100() -> Imported:
    return Imported.of(Trace.load(sample_trace_path("resnet50_ddp_a100")), PlanOptions())


@functools.cache
def on_h200() -> Imported:
    return Imported.of(imported(DATA / "ddp_resnet50_h200.json.gz"), PlanOptions())


@functools.cache
def on_v100(name: str) -> Imported:
    return Imported.of(shared_trace(f"kineto_single/{name}.json.gz"), PlanOptions())


def under(job: Imported, *changes: str, cluster: str | None = None) -> JobInScenario:
    return JobInScenario(job).under(job.scenario(changes, Scenario().on(cluster)))[0]


@functools.cache
def predicted(job: Imported, *changes: str, cluster: str | None = None) -> Prediction:
    return under(job, *changes, cluster=cluster).predict(Plan())


def ratio(job: Imported, precision: str, *changes: str) -> tuple[float, float, float]:
    """New over old step, and the ends of its interval."""
    before, after = predicted(job, *changes), predicted(job, f"precision={precision}", *changes)
    return tuple(us / before.iteration_us for us in (after.iteration_us, *after.interval_us))


def test_a_job_that_its_host_bounds_gains_nothing() -> None:
    before, after = predicted(on_a100()), predicted(on_a100(), "precision=bf16")
    assert after.breakdown_us["compute"] < 0.85 * before.breakdown_us["compute"]
    assert after.iteration_us > before.iteration_us  # casts are launched, too


def test_buckets_of_gradients_stay_as_they_are() -> None:
    graphs = [recorded_replay(under(on_a100(), *changes).lowered(Plan())).graph(5) for changes in ((), ("precision=bf16",))]
    moved_us = [graph.duration_us[graph.op_kind == OpKind.COMM] for graph in graphs]
    assert len(moved_us[0]) > 0
    np.testing.assert_array_equal(*moved_us)


def test_tf32_changes_what_was_not_in_tf32_alone() -> None:
    middle, low, high = ratio(on_a100(), "tf32", "launch=0")
    assert 0.95 < middle < 1
    assert low < 1 < high


def test_the_recorded_precision_is_said_and_the_interval_is_an_estimate() -> None:
    moved = under(on_a100(), "precision=fp16", "launch=0")
    assert (
        moved.assumptions[0]
        == "products were recorded in tf32 (93 %), fp32 (7 %) of their time, by the names and types of their kernels"
    )
    assert any("a GradScaler" in sentence for sentence in moved.assumptions)
    assert moved.predict(Plan()).source == "extrapolated"
    low, high = moved.predict(Plan()).interval_us
    assert low < 0.9 * moved.predict(Plan()).iteration_us < 0.7 * high


def test_resnet_in_bf16_takes_on_an_h200_what_was_measured() -> None:
    """As CUDA graphs 16.92 ms for 32 images in fp32 (TF32), 53.46 ms for 128 in bf16 (experiments/validation/gpu_jobs.md).

    The time of its batch norms is from the same measurement.
    """
    middle, low, high = ratio(on_h200(), "bf16", "launch=0")
    measured = 53.46 / 4 / 16.92
    assert middle == pytest.approx(measured, rel=0.15)
    assert low < measured < high


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared traces")
@every_case("name, within, more", [("resnet50_v100_workers0", 0.1, ("loading=0",)), ("convnet_v100_ns_timestamps", 0.25, ())])
def test_resnet_in_fp16_takes_on_a_v100_what_is_published(name: str, within: float, more: tuple[str, ...]) -> None:
    """367 and 1,200, 356 and 1,156 images a second in PyTorch, channels-last in fp16 (NVIDIA DeepLearningExamples)."""
    middle, low, high = ratio(on_v100(name), "fp16", "launch=0", "recorded_on=dgx-1-v100", *more)
    for published in (367 / 1200, 356 / 1156):
        assert middle == pytest.approx(published, rel=within)
        assert low < published < high


def test_the_precision_changes_on_the_other_gpu() -> None:
    changes = ("launch=0", "ranks=2")
    jobs = [under(on_a100(), *changes, *more, cluster="hgx-h100") for more in ((), ("precision=fp16",))]
    computes_us = []
    for job in jobs:
        graph = recorded_replay(job.lowered(Plan())).graph(5)
        computes_us.append(graph.duration_us[np.isin(graph.op_kind, (OpKind.FORWARD, OpKind.BACKWARD))].sum())
    assert 0.45 < computes_us[1] / computes_us[0] < 0.65
    widths = [np.divide(*job.predict(Plan()).interval_us[::-1]) for job in jobs]
    assert widths[1] > widths[0]
    assert predicted(on_a100(), *changes, "precision=fp8", cluster="hgx-h100").iteration_us > 0


def test_what_was_in_tf32_is_in_fp32_on_a_gpu_without() -> None:
    moved = predicted(on_a100(), "launch=0", "precision=fp16", cluster="dgx-1-v100")
    assert moved.breakdown_us["compute"] < 0.7 * predicted(on_a100(), "launch=0", cluster="dgx-1-v100").breakdown_us["compute"]


def test_plans_of_ddp_follow_in_another_precision() -> None:
    job = ProfiledDdp.of(Trace.load(sample_trace_path("resnet50_ddp_a100")), PlanOptions())
    moved = under(job, "precision=bf16")
    assert moved.predict(Plan.of(gradient_as_bucket_view=True)).iteration_us < moved.predict(Plan()).iteration_us
    assert moved.predict(Plan()).peak_memory_bytes is None


def test_mfu_is_of_the_peak_in_the_precision_that_is_asked_about(tmp_path: Path) -> None:
    verb("import", DATA / "ddp_resnet50_h200.json.gz", "--out", tmp_path / "T")
    asked = ("replay", tmp_path / "T", "--what-if", "launch=0")
    recorded, half = verb(*asked), verb(*asked, "--what-if", "precision=bf16")
    shares = [one["mfu_pct"] * one["predicted_iteration_us"] for one in (recorded, half)]
    assert shares[0] / shares[1] == pytest.approx(989.4 / 494.7, rel=0.01)


class TestVerbs:
    def test_replay_takes_it_as_a_setting_and_as_a_what_if(self) -> None:
        asked, set_first = (
            verb("replay", *SAMPLE, "--what-if", "precision=bf16"),
            verb("replay", *SAMPLE, "--set", "precision=bf16"),
        )
        assert asked["predicted_iteration_us"] == set_first["predicted_iteration_us"]

    def test_diagnose_asks_it_and_replay_answers_with_the_same_number(self, tmp_path: Path) -> None:
        row = next(row for row in verb("diagnose", *SAMPLE)["gains"] if row["topic"] == "precision")
        assert row["what_if"] == "precision=bf16"
        assert not row["certain"]
        answer = verb("replay", *SAMPLE, "--what-if", row["what_if"])
        assert answer["predicted_iteration_us"] == pytest.approx(row["predicted_iteration_us"])

    def test_diagnose_in_another_precision_does_not_ask_it_again(self) -> None:
        gains = verb("diagnose", *SAMPLE, "--set", "precision=bf16")["gains"]
        assert gains
        assert not [row for row in gains if row["topic"] == "precision"]

    def test_diagnose_does_not_ask_what_is_not_known(self, tmp_path: Path) -> None:
        small_job().write(tmp_path / "t.json", header={"deviceProperties": [{"name": "NVIDIA A100-SXM4-40GB"}]})
        printed("import", tmp_path / "t.json", "--out", tmp_path / "T")
        assert not [row for row in verb("diagnose", tmp_path / "T")["gains"] if row["topic"] == "precision"]

    def test_help_and_errors_name_it(self) -> None:
        assert "precision" in refusal("replay", *SAMPLE, "--what-if", "precison=bf16")


class TestRefusals:
    @every_case(
        "precision, message",
        [
            ("int4", "precision=int4: use fp32, tf32, fp16, bf16, fp8"),
            ("fp8", "precision=fp8: NVIDIA A100 SXM4 40GB has no peak in fp8"),
        ],
    )
    def test_a_type_that_does_not_exist_there(self, precision: str, message: str) -> None:
        assert message in refusal("replay", *SAMPLE, "--what-if", f"precision={precision}")

    def test_a_gpu_that_is_not_known(self) -> None:
        trace = on_a100().trace
        job = Imported.of(replace(trace, meta=msgspec.structs.replace(trace.meta, devices=())), PlanOptions())
        with pytest.raises(InputError, match=r"precision=bf16: the trace does not say on what GPUs.*--set recorded_on=hgx-h100"):
            predicted(job, "precision=bf16")
        assert predicted(job, "precision=bf16", "recorded_on=dgx-a100-40").iteration_us > 0

    def test_a_recorded_precision_that_nothing_tells(self, tmp_path: Path) -> None:
        """Kernels called "gemm" with no types."""
        header = {"deviceProperties": [{"name": "NVIDIA A100-SXM4-40GB"}]}
        job = Imported.of(read([small_job().write(tmp_path / "t.json", header=header)]), PlanOptions())
        with pytest.raises(InputError, match=r"neither names nor types .* tell the recorded precision; profile with record_shapes"):
            predicted(job, "precision=bf16")

    def test_a_program_of_xla(self) -> None:
        trace = on_a100().trace
        job = Imported.of(replace(trace, meta=msgspec.structs.replace(trace.meta, framework="xla")), PlanOptions())
        with pytest.raises(InputError, match=r"a program that XLA compiled; only PyTorch's autocast is known"):
            predicted(job, "precision=bf16")

    def test_a_trace_without_products(self) -> None:
        trace = on_a100().trace
        relu = trace.names.index(next(name for name in trace.names if "threshold" in name or "elementwise" in name))
        names = np.where(trace.events.kind == EventKind.KERNEL, relu, trace.events.name)
        unnamed = replace(trace.events, name=names, op=np.full(len(names), -1))
        job = Imported.of(replace(trace, events=unnamed), PlanOptions())
        with pytest.raises(InputError, match="shows no kernels of products"):
            predicted(job, "precision=bf16")

    def test_a_recording_of_processors(self) -> None:
        assert "has no knob 'precision'" in refusal("replay", "--sample", "gpt_ddp_1gbit", "--what-if", "precision=bf16")
