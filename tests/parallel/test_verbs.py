"""A job.toml goes through every verb."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dpro_search
from dpro_search.space.plan import Plan
from tests.kinds.verbs import printed, refusal, verb
from tests.parallel.jobs import text


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(text("tp = 4\npp = 2"))
    return path


@pytest.fixture(scope="module")
def searched(job: Path) -> dict[str, Any]:
    """The JSON of a complete search."""
    return verb("run", job, "--out", job.parent / "run")


@pytest.fixture(scope="module")
def run(job: Path, searched: dict[str, Any]) -> Path:
    assert searched["plans"]
    return job.parent / "run"


def test_replay_has_the_keys_of_parallel_jobs(job):
    facts = verb("replay", job)
    keys = {"measured_iteration_us", "predicted_iteration_us", "error_pct", "interval_us", "breakdown_us", "peak_memory_bytes"}
    keys |= {"ops", "replay_seconds", "tokens_per_second_per_device", "mfu_pct", "cost_per_million_tokens", "memory_bytes"}
    assert facts.keys() >= keys
    tokens = 64 * 4096 / facts["predicted_iteration_us"] * 1e6
    assert facts["tokens_per_second"] == pytest.approx(tokens)
    assert sum(facts["memory_bytes"].values()) == pytest.approx(facts["peak_memory_bytes"], rel=1e-6)
    assert 5 < facts["mfu_pct"] < 80


def test_a_change_is_the_same_in_the_file_and_on_the_command_line(job, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(text("tp = 8\npp = 2"))
    changed = verb("replay", job, "--set", "tp=8")
    assert changed["predicted_iteration_us"] == verb("replay", path)["predicted_iteration_us"]
    assert changed["strategy"]["dp"] == 1


def test_a_price_that_is_given_is_used(job):
    facts = verb("replay", job, "--set", "price=2")
    per_second = 16 * 2 / 3600
    assert facts["cost_per_million_tokens"] == pytest.approx(per_second / facts["tokens_per_second"] * 1e6)


def test_diagnose_under_a_plan(job):
    facts = verb("diagnose", job, "--set", "tp=2")
    assert facts["iteration_us"] == verb("replay", job, "--set", "tp=2")["predicted_iteration_us"]
    assert "pipeline stages" in printed("diagnose", job)


def test_files_for_ui_and_tables(job, tmp_path):
    verb("replay", job, "--perfetto", tmp_path / "p.json", "--timeline", tmp_path / "t.csv")
    assert (tmp_path / "p.json").stat().st_size > 1000
    assert len((tmp_path / "t.csv").read_text().splitlines()) > 50


def test_run_is_complete_explained_and_continued(job, run, searched):
    result = verb("run", job, "--out", run)
    assert result["stopped"] == "complete"
    assert result["best_us"] == searched["best_us"] <= result["baseline_us"]
    assert any("longer than plan 1" in sentence for sentence in result["reasons"])
    assert "no other way to cut the job can be faster" in printed("run", job, "--out", run)


def test_run_finds_the_same_with_two_workers(job, searched, tmp_path):
    result = verb("run", job, "--workers", 2, "--out", tmp_path / "run")
    assert result["best_us"] == searched["best_us"]


def test_run_begins_with_a_plan(job, tmp_path):
    result = verb("run", job, "--set", "tp=8", "--trials", 5, "--out", tmp_path / "run")
    assert result["baseline_us"] == pytest.approx(verb("replay", job, "--set", "tp=8")["predicted_iteration_us"])


def test_other_samplers_walk_the_same_plans(job, searched, tmp_path):
    result = verb("run", job, "--sampler", "mcmc", "--trials", 40, "--out", tmp_path / "run")
    assert result["best_us"] >= searched["best_us"] * (1 - 0.005)


def test_a_memory_limit_is_kept(job, tmp_path):
    limit = 30 * 2**30
    result = verb("run", job, "--memory-limit", limit, "--out", tmp_path / "run")
    assert all(row["peak_memory_bytes"] <= limit for row in result["plans"])


def test_report_of_the_run_and_of_the_description(job, run, tmp_path):
    verb("report", run, "--out", tmp_path / "run.html")
    assert "llama3-8b" in (tmp_path / "run.html").read_text()
    verb("report", job, "--out", tmp_path / "job.html")
    page = (tmp_path / "job.html").read_text()
    assert "the job was described, not recorded" in page
    assert "Nothing was measured of a described job" in page
    assert "recorded durations" not in page


def test_what_needs_other_devices_is_not_validated_here(run):
    assert "write it after '--'" in refusal("validate", run)
    assert "which are not here" in refusal("validate", run, "--", "python", "train.py")
    assert "which are not here" in refusal("validate", run, "--paced", "--", "python", "train.py")


@pytest.mark.parametrize("option", [("--holdout-step", 1), ("--own-durations",), ("--samples", 2)])
def test_what_needs_recorded_steps_is_one_line(job, option):
    assert "a parallel job cannot be" in refusal("replay", job, *option)


def test_a_misspelt_setting_is_one_line_with_the_nearest(job):
    assert "did you mean micro_batch?" in refusal("replay", job, "--set", "micro_bach=2")
    assert "use tp 2" in refusal("diagnose", job, "--set", "tp=3")


def test_a_plan_file_is_replayed(job, run, searched):
    facts = verb("replay", job, "--plan", run / "plans" / "plan-1.json")
    assert facts["predicted_iteration_us"] == searched["best_us"]


def test_doctor(job):
    checks = {check["name"]: check for check in verb("doctor", job)["checks"]}
    assert checks["run"]["detail"].startswith("plans may change tp, pp, dp")


def test_networks_are_described_too(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(printed("describe", "resnet50", "--cluster", "2xhgx-h100", "--global-batch", 4096))
    assert verb("replay", path)["strategy"]["micro_batch"] == 256


def test_the_python_api(job):
    opened_job = dpro_search.load(job)
    assert opened_job.replay(Plan.of(tp=8)).iteration_us > 0
    assert opened_job.diagnose().gains


def test_clusters_are_compared_by_time_price_and_size(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(text(None))
    (tmp_path / "cheap.toml").write_text('base = "dgx-a100-80"\nhosts = 2\nprice_per_device_hour_usd = 0.5\n')
    (tmp_path / "dear.toml").write_text('base = "hgx-h100"\nhosts = 4\nprice_per_device_hour_usd = 90\n')
    names = ",".join([str(tmp_path / "cheap.toml"), str(tmp_path / "dear.toml"), "3xhgx-h100"])
    result = verb("run", path, "--cluster", names, "--tokens-per-second", 1, "--out", tmp_path / "run")
    assert result["cheapest"] == result["fewest_devices"] == str(tmp_path / "cheap.toml")
    assert result["fastest"] == str(tmp_path / "dear.toml")
    cheap, dear, impossible = result["clusters"]
    assert cheap["cost_per_million_tokens"] < dear["cost_per_million_tokens"]
    assert "24" in impossible["error"]
    assert Path(cheap["run"], "result.json").is_file()
    said = printed("run", path, "--cluster", names, "--tokens-per-second", 1e9, "--out", tmp_path / "run")
    assert "None of the clusters gives 1,000,000,000 tokens a second" in said
    assert "give several" in refusal("run", path, "--tokens-per-second", 1)


def test_batches_are_compared_by_sequences_a_second_and_price(tmp_path):
    """On 16 H100s: with 16 sequences an update is a large part of a step, with 1,024 a small one; 10 are no batch of any plan."""
    path = tmp_path / "job.toml"
    path.write_text(text("tp = 1\nmicro_batch = 1"))
    result = verb("run", path, "--global-batch", "10,16,512,1024", "--out", tmp_path / "run")
    impossible, small, large, largest = result["clusters"]
    assert "global_batch 10" in impossible["error"]
    assert small["tokens_per_second"] < 0.95 * large["tokens_per_second"] < largest["tokens_per_second"]
    assert (result["fastest_batch"], result["smallest_batch"]) == (1024, 512)
    assert verb("export", small["run"], "--out", tmp_path / "out", "--target", "pytorch")["files"]
    said = printed("run", path, "--global-batch", "16,512,1024", "--out", tmp_path / "run")
    assert "Fastest: as described with a batch of 1,024." in said
    assert "At most 5% slower: a batch of 512." in said


def test_another_batch_is_asked_for_like_any_other_change(job):
    once, twice = (verb("replay", job, "--set", f"global_batch={size}")["predicted_iteration_us"] for size in (64, 128))
    assert 1.5 * once < twice < 2 * once
    assert "global_batch must be from 1" in refusal("replay", job, "--set", "global_batch=0")


def test_a_plan_is_exported_to_its_framework_or_to_another(run, tmp_path):
    assert "MEGATRON_ARGUMENTS" in verb("export", run, "--out", tmp_path / "out")["usage"]
    files = verb("export", run, "--out", tmp_path / "other", "--target", "pytorch")["files"]
    assert {Path(file).name for file in files} == {
        *("README.md", "parallel_plan.json", "parallel_plan.py", "plan.json"),
        *("measure_slurm.sh", "measure_torchrun.sh"),
    }
    said = refusal("export", run, "--out", tmp_path / "no", "--target", "horovod")
    assert "a parallel job, whose plans are followed by torchtitan, megatron" in said


def test_a_plan_for_another_cluster_has_its_ranks(job, tmp_path):
    verb("run", job, "--cluster", "4xhgx-h100", "--trials", 5, "--out", tmp_path / "run")
    verb("export", tmp_path / "run", "--out", tmp_path / "out", "--target", "megatron")
    assert "--nnodes 4" in (tmp_path / "out" / "README.md").read_text()


def test_machines_without_gpus_are_refused(job):
    assert "a parallel job runs on machines with GPUs, like 16xhgx-h100" in refusal("replay", job, "--cluster", "8xtestbed")


def test_what_only_other_kinds_can_is_refused_with_their_names(job):
    said = refusal("replay", job, "--own-durations")
    assert "a parallel job cannot be replayed step by step (--own-durations); a Horovod job, a " in said
