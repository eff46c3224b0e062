"""Verbs on another cluster than the recorded one: what `run` was told stays in its folder, where the other verbs find it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kineto_machine import Launch, Synchronize
from kineto_machine import run as run_of_kernels

from dpro_search.collect.assemble.torch.job import assemble_torch
from dpro_search.kinds import job_of, recorded_job
from dpro_search.kinds._job_on_cluster import job_on_cluster
from dpro_search.kinds._real_runs import _here
from dpro_search.search.run_folder import read_run
from tests.kinds.verbs import refusal, verb

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp") / "trace"
    assemble_torch(DATA / "ddp_blocks").save(folder)
    return folder


@pytest.fixture(scope="module")
def run(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "far"
    verb("run", trace, "--cluster", "4xg4dn.8xlarge", "--set", "rate=1gbit", *SEARCH, "--out", folder)
    return folder


SEARCH = ("--trials", 6, "--sampler", "mcmc")


def test_diagnose_on_gpus_says_where_and_what_the_interval_is_from(trace: Path) -> None:
    facts = verb("diagnose", trace, "--cluster", "16xhgx-h100", "--set", "ranks=64")
    assert facts["cluster"]["name"] == "16xhgx-h100, ranks=64"
    assert facts["cluster"]["ranks"] == 64
    assert "not calibrated" in facts["cluster"]["interval"]
    assert any("computation is as fast as it was recorded" in sentence for sentence in facts["cluster"]["assumed"])
    assert any("64 ranks compute like the 2 recorded ones" in sentence for sentence in facts["cluster"]["assumed"])


def test_diagnose_of_more_ranks_on_the_recorded_cluster(trace: Path) -> None:
    facts = verb("diagnose", trace, "--set", "ranks=4")
    assert len(facts["ranks"]) == 4
    assert facts["iteration_us"] > verb("diagnose", trace)["iteration_us"]


def test_the_recorded_setting_has_no_cluster(trace: Path) -> None:
    assert "cluster" not in verb("diagnose", trace)


@pytest.mark.parametrize("name", ["diagnose", "run"])
def test_a_change_of_the_plan_is_refused_where_plans_are_not_asked_about(trace: Path, name: str) -> None:
    assert "'dpro-search replay' predicts a plan" in refusal(name, trace, "--set", "bucket_cap_bytes=1MiB")


def test_a_run_folder_remembers_its_cluster(trace: Path, run: Path) -> None:
    assert verb("run", trace, "--cluster", "4xg4dn.8xlarge", "--set", "rate=1gbit", *SEARCH, "--out", run)["trials"] == 6
    place = read_run(run).cluster
    assert place is not None
    assert (place.name, place.ranks, place.ranks_per_host) == ("4xg4dn.8xlarge, rate=1gbit", 4, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cluster", "8xg4dn.8xlarge", "--set", "rate=1gbit"), "a search for 4xg4dn.8xlarge, rate=1gbit, not for 8xg4dn.8xlarge"),
        (("--cluster", "4xg4dn.8xlarge"), "not for 4xg4dn.8xlarge; give the same --set"),
        ((), "not for the recorded cluster; give the same --cluster"),
    ],
)
def test_another_cluster_cannot_continue_it(trace: Path, run: Path, options: tuple[str, ...], said: str) -> None:
    assert said in refusal("run", trace, *options, *SEARCH, "--out", run)


def test_a_file_that_changed_is_another_cluster(trace: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "g4dn.8xlarge"\nhosts = 2\n')
    search = ("run", trace, "--cluster", mine, *SEARCH, "--out", tmp_path / "run")
    verb(*search)
    verb(*search)
    mine.write_text('base = "g4dn.8xlarge"\nhosts = 4\n')
    assert f"a search for {mine}, whose file or machine has changed since; give the same --cluster" in refusal(*search)


def test_an_export_says_what_was_assumed(run: Path, tmp_path: Path) -> None:
    verb("export", run, "--out", tmp_path / "tuned")
    readme = (tmp_path / "tuned" / "README.md").read_text()
    assert "searched for 4xg4dn.8xlarge, rate=1gbit (4 ranks), where no run of the job was measured" in readme
    assert "Assumed: computation is as fast as it was recorded" in readme
    assert "Interval: not calibrated on" in readme
    assert "dpro-search validate" not in readme


def test_a_report_shows_the_cluster_and_predicts_there(run: Path, tmp_path: Path) -> None:
    verb("report", run, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "All predictions on this page are for 4xg4dn.8xlarge, rate=1gbit, 4 ranks" in page
    assert "not calibrated on" in page
    assert "dpro-search validate RUN" not in page


def test_a_run_for_another_cluster_is_not_validated_here(run: Path) -> None:
    said = refusal("validate", run)
    assert "the search was for 4xg4dn.8xlarge, rate=1gbit, which is not here" in said
    assert "dpro-search export" in said


def test_a_run_for_the_recorded_cluster_under_another_name_is_validated(trace: Path, run: Path) -> None:
    recording = assemble_torch(DATA / "ddp_blocks")
    job, real = job_of(recording), recorded_job(recording, ("true",))
    place = job_on_cluster(job, None, ("ranks=2",), verb="run").cluster
    assert place is not None
    assert _here(real, job, run, _with(run, place), place) is real


def _with(run: Path, place: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(read_run(run), cluster=place)


def test_a_memory_limit_that_nothing_tells_about_there_is_refused(trace: Path, tmp_path: Path) -> None:
    search = ("run", trace, "--cluster", "4xg4dn.8xlarge", "--memory-limit", 2**30, "--out", tmp_path / "run")
    assert "the memory limit cannot be kept" in refusal(*search)


def test_a_memory_limit_holds_on_other_links(trace: Path, tmp_path: Path) -> None:
    result = verb("run", trace, "--set", "rate=1gbit", "--memory-limit", 1, *SEARCH, "--out", tmp_path / "run")
    assert not result["feasible"]


@pytest.mark.parametrize(("where", "worker_hosts"), [(("--set", "ranks=4"), (0, 1, 2, 3)), (("--cluster", "4xh100"), (0, 0, 0, 0))])
def test_parameter_servers_elsewhere_name_the_hosts_of_all_processes(where: tuple[str, str], worker_hosts: tuple[int, ...]) -> None:
    facts = verb("diagnose", "--sample", "bert_kvstore_500mbit", *where)
    assert [row["role"] for row in facts["ranks"]] == ["worker"] * 4 + ["server"] * 2
    assert [row["host"] for row in facts["ranks"]] == [f"host {number}" for number in (*worker_hosts, 4, 5)]
    assert [row["rank"] for row in facts["servers"]] == [4, 5]


def test_parameter_servers_of_thousands_of_workers_are_replayed_as_few() -> None:
    facts = verb("replay", "--sample", "bert_kvstore_500mbit", "--cluster", "2048xhgx-h100")
    assert facts["ops"] < 10_000


def test_a_profile_of_one_gpu_on_a_host_of_eight_is_told_what_answers(tmp_path: Path) -> None:
    profile = run_of_kernels([Launch("gemm", 10, 400), Synchronize(50)], 6)[0].write(tmp_path / "rank0.json.gz")
    verb("import", profile, "--out", tmp_path / "T")
    assert "--cluster h100 predicts it on one device" in refusal(
        "replay", tmp_path / "T", "--cluster", "hgx-h100", "--set", "recorded_on=dgx-a100"
    )
    assert verb("replay", tmp_path / "T", "--cluster", "h100", "--set", "recorded_on=dgx-a100")["predicted_iteration_us"] > 0
