"""The bundled recordings, and the first command: a search of the default one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from dpro_search.cli.options.sample import validation_of
from dpro_search.collect.sample import DEFAULT_SAMPLE, sample_of, sample_trace_path, samples
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.errors import InputError
from dpro_search.space.plan import Plan
from tests.in_process import done_once, succeeds

GPU_SAMPLE = "resnet50_ddp_a100"


@pytest.fixture
def first() -> tuple[Path, str]:
    """The folder in which the first command ran, with what it printed."""
    return done_once("run", "--trials", "500")


def test_the_first_command_shows_a_certain_gain_of_at_least_1_3(first: tuple[Path, str]) -> None:
    folder, text = first
    (run,) = (folder / "runs").iterdir()
    result = json.loads((run / "result.json").read_text())
    assert result["plans"][0]["gain_certain"]
    assert result["plans"][0]["speedup"] >= 1.3
    assert f"predicted speed-up {result['plans'][0]['speedup']:.2f}x" in text


def test_it_says_what_real_runs_gave(first: tuple[Path, str]) -> None:
    sample = samples()[0]
    validation = validation_of(sample)
    assert validation is not None
    (ran, *_) = validation.plans
    assert ran.plan != Plan()
    assert ran.speedup_measured >= 1.2
    assert ran.beyond_noise
    assert abs(validation.baseline_error_pct) < 5
    assert abs(ran.error_pct) < 10
    assert ran.losses is not None
    assert ran.losses.verdict == "same"
    text = " ".join(first[1].split())
    assert f"Plan 1 on real runs: {ran.measured_us / 1e3:.1f} ms" in text
    assert f"measured speed-up {ran.speedup_measured:.2f}x (predicted {ran.speedup_predicted:.2f}x)" in text


def test_the_page_of_the_search_shows_the_real_runs_that_came_with_the_sample(first: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = first
    (run,) = (folder / "runs").iterdir()
    succeeds("report", run, "--out", "page.html", cwd=tmp_path)
    page = (tmp_path / "page.html").read_text()
    validation = validation_of(samples()[0])
    assert validation is not None
    assert "Confirmed by real runs" in page
    assert f"{max(ran.speedup_measured for ran in validation.plans):.2f}\N{MULTIPLICATION SIGN} faster than recorded" in page
    assert "The real runs came with the sample" in page


def test_the_page_of_plans_that_never_ran_says_so(tmp_path: Path) -> None:
    succeeds("run", "--sample", "bert_kvstore_500mbit", "--trials", 8, "--out", "run", cwd=tmp_path)
    succeeds("report", "run", "--out", "page.html", cwd=tmp_path)
    page = (tmp_path / "page.html").read_text()
    assert "Predicted, not yet measured" in page
    assert "came with the sample" not in page


def test_it_names_the_next_file_and_the_commands_for_another_job(first: tuple[Path, str]) -> None:
    folder, text = first
    (line,) = (line for line in text.splitlines() if line.startswith("File of the best plan:"))
    assert Plan.load(folder / line.removeprefix("File of the best plan: ")) != Plan()
    verbs = [line.split()[1] for line in text.splitlines() if line.startswith("  dpro-search")]
    assert verbs == ["collect", "run", "validate"]


def test_every_sample_tells_what_it_is_and_is_small() -> None:
    assert next(sample.name for sample in samples()) == DEFAULT_SAMPLE
    for sample in samples():
        assert sample.description
        assert "A real recording" in sample.provenance
        assert sample_of(sample.folder) == sample
        assert sum(path.stat().st_size for path in sample.folder.iterdir()) < 1e6


def test_samples_are_listed_and_chosen_by_name(tmp_path: Path) -> None:
    rows = json.loads(succeeds("samples", "--json"))["samples"]
    assert [row["name"] for row in rows] == [sample.name for sample in samples()]
    assert rows[0]["measured_speedup"] >= 1.2
    assert all(row["name"] in succeeds("samples") for row in rows)
    facts = json.loads(succeeds("run", "--sample", rows[1]["name"], "--trials", 2, "--json", cwd=tmp_path))
    assert Path(facts["run"]).name.startswith(rows[1]["name"])


def test_an_unknown_sample_names_the_known_ones() -> None:
    with pytest.raises(InputError, match=f"--sample none: no such sample \\(known: {DEFAULT_SAMPLE}"):
        sample_trace_path("none")


def test_every_verb_answers_about_the_gpu_sample(tmp_path: Path) -> None:
    """Its provenance: the publisher's own tests name the elements of its first bucket (2,049,000) and 21 kernels of NCCL."""
    sample = next(sample for sample in samples() if sample.name == GPU_SAMPLE)
    events = Trace.load(sample.folder).events
    assert (events.kind == EventKind.COLLECTIVE).sum() == 21
    assert 2_049_000 * 4 in events.size_bytes
    replayed = json.loads(succeeds("replay", "--sample", GPU_SAMPLE, "--json"))
    diagnosed = json.loads(succeeds("diagnose", "--sample", GPU_SAMPLE, "--json"))
    assert replayed["measured_iteration_us"] == diagnosed["measured_iteration_us"] == pytest.approx(222_391, rel=1e-4)
    assert abs(replayed["error_pct"]) < 0.1
    facts = json.loads(succeeds("run", "--sample", GPU_SAMPLE, "--trials", 4, "--out", "run", "--json", cwd=tmp_path))
    assert facts["plans"][0]["predicted_iteration_us"] <= facts["baseline_us"]
    exported = json.loads(succeeds("export", "run", "--out", "plan", "--json", cwd=tmp_path))
    assert "ddp.py" in {Path(file).name for file in exported["files"]}
    succeeds("report", "--sample", GPU_SAMPLE, "--out", "sample.html", cwd=tmp_path)
    assert GPU_SAMPLE in (tmp_path / "sample.html").read_text()
    succeeds("report", "run", "--out", "run.html", cwd=tmp_path)
    assert "Not a certain gain" in (tmp_path / "run.html").read_text()


@pytest.mark.parametrize(("name", "tolerance"), [(GPU_SAMPLE, 1e-6), (DEFAULT_SAMPLE, 0.02)])
def test_the_command_that_a_diagnosis_prints_gives_its_largest_gain_again(name: str, tolerance: float) -> None:
    diagnosed = json.loads(succeeds("diagnose", "--sample", name, "--json"))
    command = diagnosed["command"]
    assert command.startswith(f"dpro-search replay --sample {name} --what-if ")
    assert command in succeeds("diagnose", "--sample", name)
    what_if = command.rpartition(" ")[2]
    row = next(row for row in diagnosed["gains"] if row["what_if"] == what_if)
    answered = json.loads(succeeds(*shlex.split(command)[1:], "--json"))
    assert answered["predicted_iteration_us"] == pytest.approx(row["predicted_iteration_us"], rel=tolerance)


def test_what_others_published_is_attributed() -> None:
    notice = (Path(__file__).parents[2] / "NOTICE").read_text()
    assert f"samples/{GPU_SAMPLE}" in notice
    assert "MIT License" in notice
    assert "Copyright (c) Meta Platforms, Inc. and affiliates." in notice
