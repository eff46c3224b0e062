"""`dpro-search run`: what people and programs get to see."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bus_objective import BusObjective, tensors_of
from rich.console import Console

from dpro_search.cli.run import SamplerName, print_result, progress
from dpro_search.collect.byteps_assemble import assemble_byteps
from dpro_search.collect.torch_assemble import assemble_ddp
from dpro_search.collect.trace import CommSettings, Trace
from dpro_search.search import SearchResult, Trial, run_search
from dpro_search.search.request import digest_of
from dpro_search.search.samplers import SAMPLERS
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan

UNFUSED = CommSettings(fusion_threshold_bytes=0, cycle_time_us=20_000.0)


def searched(tmp_path: Path, recorded: CommSettings, noise: float = 0.005) -> SearchResult:
    objective = BusObjective(tensors_of([8_000] * 40), recorded, compute_us=50.0, noise=noise)
    return run_search(objective, trials=60, sampler="mcmc", out=tmp_path / "run", trace_digest="bus")


def printed(result: SearchResult) -> str:
    text = io.StringIO()
    print_result(Console(file=text, width=80), result)
    return text.getvalue()


def test_every_sampler_can_be_asked_for() -> None:
    assert sorted(SamplerName) == sorted(SAMPLERS)


def test_the_result_fits_80_columns_and_says_where_it_is(tmp_path: Path) -> None:
    result = searched(tmp_path, UNFUSED)
    text = printed(result)
    table = text[: text.index("Best plan")]
    assert max(map(len, table.splitlines())) <= 80
    assert f"{result.plans[0].speedup:.2f}x" in table
    assert "as recorded" in table
    assert str(tmp_path / "run") in text
    assert "\x1b" not in text, "no colours where there is no terminal"


def test_a_gain_that_is_large_but_not_certain_is_to_be_measured(tmp_path: Path) -> None:
    result = searched(tmp_path, UNFUSED, noise=0.9)
    assert result.plans[0].speedup > 1.03
    assert result.summary()["worth_measuring"]
    text = " ".join(printed(result).split())
    assert (
        f"No gain is certain: the intervals overlap. The best plan is predicted to be {result.plans[0].speedup:.2f}x as fast"
        in text
    )
    assert "measure it with `dpro-search validate`" in text


def test_a_small_gain_that_is_not_certain_is_none(tmp_path: Path) -> None:
    found = searched(tmp_path, UNFUSED, noise=0.9)
    small = msgspec.structs.replace(found.plans[0], speedup=1.02)
    result = msgspec.structs.replace(found, plans=(small, *found.plans[1:]))
    assert not result.summary()["worth_measuring"]
    assert "No gain found" in printed(result)


def test_json_has_the_keys_that_other_tools_read(tmp_path: Path) -> None:
    result = searched(tmp_path, UNFUSED)
    summary = json.loads(json.dumps(result.summary()))
    assert {"run", "trials", "seconds", "baseline_us", "best_us", "speedup", "plans"} <= summary.keys()
    assert {"plan", "predicted_iteration_us", "interval_us", "peak_memory_bytes"} <= summary["plans"][0].keys()
    assert summary["best_us"] == summary["plans"][0]["predicted_iteration_us"]
    assert summary["speedup"] == summary["baseline_us"] / summary["best_us"]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(), "as recorded"),
        (Plan.of(fusion_threshold_bytes=0), "no fusion"),
        (Plan.of(fusion_threshold_bytes=2**21, cycle_time_us=2500.0), "fusion 2.0 MiB, cycle 2.5 ms"),
        (Plan(tensor_groups=(("a", "b"),)), "1 group"),
        (Plan.of(bucket_cap_bytes=2**20), "buckets of 1.0 MiB"),
        (Plan.of(servers=2, bigarray_bound=1000), "2 servers, spread from 1000 elements"),
        (Plan(servers=3, servers_on_workers=True), "3 servers, servers on the workers' hosts"),
        (Plan(servers_on_workers=False), "servers on hosts of their own"),
        (Plan.of(p3=True, slice_threshold=5000), "priority slices, slices of 5000 elements"),
        (Plan.of(partition_bytes=2**20, credit=0), "partitions of 1.0 MiB, no credit"),
        (Plan(op_clusters=(("a", "b"),), bfloat16_ops=("c", "d")), "1 op cluster, 2 ops in bfloat16"),
        (Plan(recomputed_ops=("a",), micro_batches=2), "1 op recomputed, 2 micro-batches"),
        (Plan(compression="fp16"), "gradients in fp16"),
        (Plan(compression="powersgd-2"), "gradients by PowerSGD of rank 2"),
    ],
)
def test_plans_are_described_in_a_few_words(plan: Plan, words: str) -> None:
    assert describe(plan) == words


@pytest.mark.parametrize(("terminal", "wanted", "shown"), [(True, True, True), (True, False, False), (False, True, False)])
def test_progress_is_for_terminals(terminal: bool, wanted: bool, shown: bool) -> None:
    text = io.StringIO()
    with progress(Console(file=text, force_terminal=terminal, width=80), 2, shown=wanted) as bar:
        for number in range(2):
            prediction = BusObjective(tensors_of([400])).predict(Plan())
            bar.trial(Trial(number=number, origin="mcmc", plan=Plan(), prediction=prediction))
        bar.reevaluated(1, 3)
        bar.reevaluated(2, 3)
    assert ("searching" in text.getvalue()) is shown
    assert ("re-evaluating" in text.getvalue() and "2/3" in text.getvalue()) is shown


def test_a_digest_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    for name, data in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "meta.json").write_bytes(b"{}")
        (tmp_path / name / "trace.npz").write_bytes(data)
    assert digest_of(tmp_path / "a") == digest_of(tmp_path / "b") != digest_of(tmp_path / "c")


@pytest.mark.parametrize(
    ("raw", "assemble", "fields"),
    [
        ("byteps_mlp", assemble_byteps, {"partition_bytes", "credit", "servers"}),
        ("ddp_mlp", assemble_ddp, {"bucket_cap_bytes", "first_bucket_bytes"}),
    ],
)
def test_every_kind_of_job_is_searched_and_its_plan_replayed(
    raw: str, assemble: Callable[[Path], Trace], fields: set[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    assemble(Path(__file__).parents[1] / "data" / raw).save(trace)
    command = [sys.executable, "-m", "dpro_search.cli"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}

    def as_json(*options: str) -> dict[str, Any]:
        done = subprocess.run([*command, *options, "--json"], env=environment, capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout))

    found = as_json("run", str(trace), "--trials", "15", "--sampler", "mcmc", "--out", str(tmp_path / "run"))
    assert found["trials"] == 15
    assert set(found["plans"][0]["plan"]) <= fields
    best = as_json("replay", str(trace), "--plan", str(tmp_path / "run" / "plans" / "plan-0.json"))
    assert best["predicted_iteration_us"] == pytest.approx(found["best_us"])


class TestOnTheBundledSample:
    """Real processes, the whole way from the sample to the run folder."""

    @pytest.fixture(autouse=True)
    def _sample(self) -> None:
        sample = pytest.importorskip("dpro_search.collect.sample", reason="this checkout has no bundled sample")
        if not sample.sample_trace_path().is_dir():
            pytest.skip("this checkout has no bundled sample")

    def command(self, *options: str) -> list[str]:
        return [sys.executable, "-m", "dpro_search.cli", "run", "--sampler", "mcmc", *options]

    def environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}

    def test_one_json_object_and_nothing_else(self, tmp_path: Path) -> None:
        done = subprocess.run(
            self.command("--trials", "20", "--json"),
            cwd=tmp_path,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        result = json.loads(done.stdout)
        assert result["trials"] == 20
        assert (tmp_path / result["run"] / "plans" / "plan-0.json").is_file()
        assert done.stderr == ""

    def test_workers_and_a_storage_find_the_same_trials_for_all(self, tmp_path: Path) -> None:
        shared = ("--trials", "20", "--storage", f"journal:///{tmp_path}/study", "--json")
        for run, workers in (("a", "2"), ("b", "1")):
            done = subprocess.run(
                self.command(*shared, "--workers", workers, "--out", run),
                cwd=tmp_path,
                env=self.environment(),
                capture_output=True,
                text=True,
                check=True,
            )
            result = json.loads(done.stdout)
            assert (result["trials"], result["stopped"], result["workers_lost"]) == (20, "finished", 0)
            assert "syncs the disk" in done.stderr
        assert (tmp_path / "a" / "trials.jsonl").read_bytes() == (tmp_path / "b" / "trials.jsonl").read_bytes()

    @pytest.mark.parametrize(
        ("options", "code", "message"),
        [
            (("--workers", "0"), 2, "--workers"),
            (("--storage", "nowhere"), 2, "--storage nowhere: not an address"),
            (("--engine", "ray"), 1, "--engine ray: RAY_ADDRESS is not set"),
        ],
    )
    def test_what_cannot_work_is_one_line(self, options: tuple[str, ...], code: int, message: str, tmp_path: Path) -> None:
        environment = {name: value for name, value in self.environment().items() if name != "RAY_ADDRESS"}
        done = subprocess.run(self.command(*options), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert message in done.stderr
        assert done.stderr.count("\n") == 1

    def test_ctrl_c_is_one_line_and_the_same_command_continues(self, tmp_path: Path) -> None:
        command = self.command("--trials", "1000000", "--out", "r")
        search = subprocess.Popen(command, cwd=tmp_path, env=self.environment(), stderr=subprocess.PIPE, text=True)
        while search.poll() is None and not _has_trials(tmp_path / "r"):
            os.sched_yield()
        search.send_signal(signal.SIGINT)
        assert "the same command continues r" in search.communicate(timeout=60)[1]
        assert search.returncode == 1
        found = SearchResult.load(tmp_path / "r").trials
        more = self.command("--trials", str(found + 5), "--out", "r", "--json")
        done = subprocess.run(more, cwd=tmp_path, env=self.environment(), capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["trials"] == found + 5


def _has_trials(run: Path) -> bool:
    journal = run / "trials.jsonl"
    return journal.is_file() and journal.stat().st_size > 0
