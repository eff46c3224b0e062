"""A job that a file describes goes through every verb without a trace: nothing of the package needs a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dpro_search
from dpro_search.errors import InputError
from dpro_search.kinds import _names, job_of, load_source
from dpro_search.space.plan import Plan
from tests.kinds import described
from tests.kinds.verbs import printed, refusal, verb

JOB = """
[model]
layers = 24
hidden = 2048
[mesh]
dp = 16
[run]
cluster = "2xhgx-h100"
sequence = 2048
batch = 1
"""
SEARCH = ("--trials", 12, "--sampler", "mcmc")


@pytest.fixture(autouse=True, scope="module")
def registered() -> Any:
    """The one line that a new kind adds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_names, "KINDS", ("tests.kinds.described", *_names.KINDS))
        yield


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("described") / "job.toml"
    file.write_text(JOB)
    return file


@pytest.fixture(scope="module")
def run(job: Path) -> Path:
    assert verb("run", job, *SEARCH, "--out", job.parent / "run")["plans"]
    return job.parent / "run"


def test_replay(job: Path) -> None:
    facts = verb("replay", job)
    assert facts["measured_iteration_us"] is None
    assert facts["error_pct"] is None
    flops = 3 * 24 * (24 * 2048 * 2048**2 + 4 * 2048 * 2048 * 2048)
    assert facts["breakdown_us"]["compute"] == pytest.approx(flops / (989e12 * described.SHARE_OF_PEAK) * 1e6, rel=0.01)
    said = printed("replay", job)
    assert "not calibrated" in said
    assert "assumed: layers reach 40% of their device's peak" in said


def test_replay_on_other_machines_computes_as_fast_as_these(job: Path) -> None:
    a100 = verb("replay", job, "--cluster", "2xdgx-a100-80")
    assert a100["breakdown_us"]["compute"] > 2 * verb("replay", job)["breakdown_us"]["compute"]
    assert a100["cluster"]["left_out"] == ["layers reach 40% of their device's peak"]


@pytest.mark.parametrize("change", ["ranks=8", "rate=100gbit", "compute=0.5", "bandwidth=2", "bucket_cap_bytes=200MiB"])
def test_changes_are_asked_like_elsewhere(job: Path, change: str) -> None:
    assert verb("replay", job, "--set", change)["predicted_iteration_us"] != verb("replay", job)["predicted_iteration_us"]


def test_more_ranks_than_the_cluster_has_are_refused(job: Path) -> None:
    assert "ranks are 0 to 15" in refusal("replay", job, "--set", "ranks=32")


def test_files_for_ui_and_tables(job: Path, tmp_path: Path) -> None:
    verb("replay", job, "--perfetto", tmp_path / "p.json", "--timeline", tmp_path / "t.csv")
    assert (tmp_path / "p.json").stat().st_size > 1000
    assert len((tmp_path / "t.csv").read_text().splitlines()) > 50


def test_diagnose(job: Path) -> None:
    facts = verb("diagnose", job)
    assert {row["what_if"] for row in facts["gains"]} >= {"compute=0.9", "bucket_cap_bytes=100MiB"}
    assert "critical path" in printed("diagnose", job)


def test_run_is_continued_and_knows_its_description(job: Path, run: Path) -> None:
    assert verb("run", job, *SEARCH, "--out", run)["trials"] >= 2
    other = job.parent / "other.toml"
    other.write_text(JOB.replace("layers = 24", "layers = 12"))
    assert "a search of another trace" in refusal("run", other, *SEARCH, "--out", run)


def test_run_calls_nothing_recorded(job: Path, run: Path) -> None:
    said = printed("run", job, *SEARCH, "--out", run)
    assert "as described" in said
    assert "recorded" not in said


def test_run_on_another_cluster(job: Path, tmp_path: Path) -> None:
    result = verb("run", job, "--cluster", "2xdgx-a100-80", *SEARCH, "--out", tmp_path / "run")
    assert result["cluster"]["name"] == "2xdgx-a100-80"
    verb("export", tmp_path / "run", "--out", tmp_path / "tuned")
    assert "layers reach 40% of their device's peak" in (tmp_path / "tuned" / "README.md").read_text()


def test_export(run: Path, tmp_path: Path) -> None:
    files = verb("export", run, "--out", tmp_path / "tuned")["files"]
    assert {Path(name).name for name in files} >= {"ddp.json", "ddp.py", "README.md", "plan.json"}
    readme = (tmp_path / "tuned" / "README.md").read_text()
    assert "searched for the described cluster (16 ranks), where no run of the job was measured" in readme
    assert "layers reach 40% of their device's peak" in readme
    assert "dpro-search validate" not in readme


def test_a_search_depends_on_the_files_that_a_description_names(tmp_path: Path) -> None:
    cluster, job = tmp_path / "mine.toml", tmp_path / "job.toml"
    cluster.write_text('base = "hgx-h100"\nhosts = 2\n')
    job.write_text(JOB.replace("2xhgx-h100", str(cluster)))
    search = ("run", job, *SEARCH, "--out", tmp_path / "run")
    verb(*search)
    verb(*search)
    cluster.write_text('base = "hgx-h100"\nhosts = 2\nnic.rate = "100gbit"\n')
    assert "a search with another options" in refusal(*search)


def test_report_of_the_run_and_of_the_description(job: Path, run: Path, tmp_path: Path) -> None:
    verb("report", run, "--out", tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert "as described" in page
    assert "recorded setting" not in page
    assert "24 layers of 2048" in page
    assert "2 x HGX H100" in page
    verb("report", job, "--out", tmp_path / "job.html")
    assert "the job was described, not recorded" in (tmp_path / "job.html").read_text()


def test_what_was_never_run_is_not_validated(run: Path) -> None:
    assert "was never run: record it with 'dpro-search collect'" in refusal("validate", run)


@pytest.mark.parametrize("option", [("--holdout-step", 1), ("--own-durations",), ("--samples", 2)])
def test_what_needs_recorded_steps_is_one_line(job: Path, option: tuple[object, ...]) -> None:
    assert "a described transformer cannot be" in refusal("replay", job, *option)


def test_a_memory_limit_that_nothing_tells_about_is_refused(job: Path) -> None:
    assert "memory limit cannot be kept" in refusal("run", job, "--memory-limit", 2**30, "--out", job.parent / "limited")


def test_doctor(job: Path) -> None:
    checks = {check["name"]: check for check in verb("doctor", job)["checks"]}
    assert checks["run"]["detail"] == "plans may change bucket_cap_bytes"
    assert checks["export"]["detail"] == "for ddp"
    assert not checks["validate"]["ok"]


def test_the_python_api(job: Path) -> None:
    opened_job = dpro_search.load(job)
    assert opened_job.replay(Plan.of(bucket_cap_bytes=2**30)).iteration_us >= opened_job.replay().iteration_us
    assert opened_job.diagnose().gains
    assert "24 layers of 2048" in opened_job._repr_html_()
    with pytest.raises(InputError, match="was not recorded"):
        _ = opened_job.trace


def test_errors_of_a_description_are_one_line(tmp_path: Path) -> None:
    wrong = tmp_path / "job.toml"
    wrong.write_text(JOB.replace("hidden = 2048\n", ""))
    assert f"{wrong}: [model] has no 'hidden'" in refusal("replay", wrong)
    wrong.write_text("nothing = 1\n")
    assert "describes no job" in refusal("replay", wrong)


def test_the_job_has_no_trace(job: Path) -> None:
    opened_job = job_of(load_source(job))
    assert opened_job.trace is None
    assert opened_job.measurement.median_us is None
