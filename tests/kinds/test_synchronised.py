"""Jobs of workers of unequal speed go through every verb from short recorded runs; what is predicted is what their law says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dpro_search.kinds import job_of, load_source
from dpro_search.runtime.schemes import parse_paces
from dpro_search.space.plan import Plan
from tests.kinds import synchronised_runs as runs
from tests.kinds.verbs import printed, refusal, verb


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.recording(tmp_path_factory.mktemp("runs") / "runs.jsonl")


@pytest.fixture(scope="module")
def searched(recording: Path) -> tuple[Path, dict[str, Any]]:
    out = recording.parent / "run"
    return out, verb("run", recording, "--trials", 60, "--out", out)


def truth_s(scheme: str, mix: str = runs.MIX, commit_s: float = runs.COMMIT_S) -> float:
    """When the window's mean reaches the target by the law."""
    paces = parse_paces(mix, step_s=runs.STEP_S, commit_s=commit_s)
    return float(runs.trained(scheme, paces).rows[-1][0].time_s)


def test_the_recorded_scheme_is_the_setting_without_a_plan(recording: Path) -> None:
    facts = verb("replay", recording)
    assert facts["synchronisation"] == "bsp"
    assert facts["target_loss"] == runs.TARGET
    assert facts["measured_iteration_us"] == pytest.approx(1e6 * truth_s("bsp"), rel=0.01)
    assert abs(facts["error_pct"]) < 5
    assert sum(facts["breakdown_us"].values()) == pytest.approx(facts["predicted_iteration_us"], rel=0.1)
    assert "training to a loss of 0.4" in printed("replay", recording)


@pytest.mark.parametrize("scheme", ["asp", "ssp(staleness=2)", "adsp(commits=2)", "local-sgd(steps=4)"])
def test_schemes_that_were_not_recorded_are_predicted(recording: Path, scheme: str) -> None:
    result = verb("replay", recording, "--set", f"synchronisation={scheme}")
    assert result["time_to_loss_s"] == pytest.approx(truth_s(scheme), rel=0.1)


@pytest.mark.parametrize(
    ("change", "mix", "commit_s"),
    [
        ("speeds=1:2:3:4", "1:2:3:4", runs.COMMIT_S),
        ("rank2.compute=2", "1:1:1", runs.COMMIT_S),
        ("ranks=4", "1:1:2:1", runs.COMMIT_S),
        ("delay=20ms", runs.MIX, runs.COMMIT_S + 0.04),
        ("communication=3", runs.MIX, 3 * runs.COMMIT_S),
    ],
)
def test_other_workers_and_links(recording: Path, change: str, mix: str, commit_s: float) -> None:
    result = verb("replay", recording, "--set", change, "--set", "synchronisation=asp")
    assert result["time_to_loss_s"] == pytest.approx(truth_s("asp", mix, commit_s), rel=0.1)


def test_another_target(recording: Path) -> None:
    assert verb("replay", recording, "--set", "target_loss=0.8")["time_to_loss_s"] < verb("replay", recording)["time_to_loss_s"]
    assert "none of 2 runs reached a loss of 0.01" in refusal("replay", recording, "--set", "target_loss=0.01")
    assert "not below the loss at the start" in refusal("replay", recording, "--set", "target_loss=5")


def test_the_search_finds_the_fastest_of_all_schemes(searched: tuple[Path, dict[str, Any]], recording: Path) -> None:
    _, facts = searched
    best = facts["plans"][0]["plan"]["synchronisation"]
    times = {scheme: truth_s(scheme) for scheme in (best, "bsp", "asp", "adsp(commits=1)", "fixed-adacomm(steps=16)")}
    assert times[best] == pytest.approx(min(times.values()), rel=0.05)
    assert facts["speedup"] > 1.2
    assert facts["plans"][0]["change"] == "script"
    names = {row["plan"].get("synchronisation", "").partition("(")[0] for row in verb_trials(searched[0])}
    assert {"asp", "ssp", "adsp", "adacomm", "fixed-adacomm", "local-sgd", "accumulation"} <= names


def verb_trials(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "trials.jsonl").read_text().splitlines()]


def test_a_search_for_other_workers(recording: Path, tmp_path: Path) -> None:
    facts = verb("run", recording, "--trials", 4, "--out", tmp_path / "run", "--set", "speeds=1:1:1", "--set", "delay=1ms")
    assert facts["cluster"]["ranks"] == 3
    assert "speeds=1:1:1" in facts["cluster"]["name"]


def test_the_best_plan_is_exported_and_reported(searched: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run, facts = searched
    verb("export", run, "--out", tmp_path / "tuned")
    written = json.loads((tmp_path / "tuned" / "synchronisation.json").read_text())
    assert written["synchronisation"] == facts["plans"][0]["plan"]["synchronisation"]
    verb("report", run, "--out", tmp_path / "report.html")
    assert "adsp" in (tmp_path / "report.html").read_text()


def test_a_timeline_ends_when_the_training_does(recording: Path, tmp_path: Path) -> None:
    for scheme in ("bsp", "asp", "adsp(commits=2)"):
        job = job_of(load_source(recording))
        plan = Plan(synchronisation=scheme)
        assert job.timeline(plan).makespan_us == pytest.approx(job.predict(plan).iteration_us, rel=0.2)
    verb("replay", recording, "--perfetto", tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["traceEvents"]


def test_a_diagnosis_names_who_waits_and_who_is_slow(tmp_path: Path) -> None:
    path = runs.recording(tmp_path / "runs.jsonl", runs.lines_of("bsp", "4:4:1"), runs.lines_of("asp", "4:4:1"))
    facts = verb("diagnose", path)
    said = " ".join(facts["findings"])
    assert "Worker 2 takes 4.0 times as long" in said
    assert "wait for each other" in said
    assert any(row["what_if"] == "rank2.compute=0.25" for row in facts["gains"])
    assert "workers" in printed("diagnose", path)


def test_a_worker_a_thousand_times_slower_is_named(tmp_path: Path) -> None:
    path = runs.recording(tmp_path / "runs.jsonl", runs.lines_of("asp", "1:1:0.001"), runs.lines_of("fixed-adacomm(steps=2)"))
    facts = verb("diagnose", path)
    assert any("Worker 2 is 1000 times slower" in each for each in facts["findings"])
    stuck = verb("replay", path, "--set", "synchronisation=bsp")
    assert stuck["time_to_loss_s"] is None


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    lines = runs.lines_of("bsp")
    alone = [{**line, "workers": 1} for line in lines[:1]]
    assert "one worker" in refusal("run", runs.recording(tmp_path / "alone.jsonl", alone))
    silent = [{**line, "commits": [[*c[:4], None, *c[5:]] for c in line["commits"]]} for line in lines]
    assert "call sync.step(loss)" in refusal("run", runs.recording(tmp_path / "silent.jsonl", silent))
    short = [{**line, "commits": line["commits"][:5]} for line in lines]
    assert "has 15 steps" in refusal("run", runs.recording(tmp_path / "short.jsonl", short))
    never = [{**line, "target_loss": 0.01} for line in lines]
    assert "none of 1 runs reached" in refusal("run", runs.recording(tmp_path / "never.jsonl", never))
    path = runs.recording(tmp_path / "cut.jsonl")
    path.write_text(path.read_text()[:-20])
    assert "line 6: not what a worker records" in refusal("run", path)


def test_a_worker_that_was_killed_is_a_warning(tmp_path: Path) -> None:
    path = runs.recording(tmp_path / "runs.jsonl", runs.lines_of("bsp"), runs.lines_of("asp")[:2])
    assert any("worker 2 left no line" in each for each in verb("diagnose", path)["warnings"])


def test_outer_momentum_is_predicted_from_a_run_of_it_only(tmp_path: Path) -> None:
    without = runs.recording(tmp_path / "without.jsonl")
    assert "record a short run" in refusal("replay", without, "--set", "synchronisation=diloco(steps=8)")
    fast = runs.lines_of("diloco(steps=8)", goal=0.8)
    for line in fast:
        for commit in line["commits"]:
            commit[4] = max(commit[4] ** 2 / 2.4, 0.1)  # the loss falls faster than that of the same updates without
    both = runs.recording(tmp_path / "both.jsonl", runs.lines_of("bsp"), fast)
    result = verb("replay", both, "--set", "synchronisation=diloco(steps=8, outer_lr=0.7, outer_momentum=0.9)")
    same = verb("replay", both, "--set", "synchronisation=local-sgd(steps=8)")
    assert result["time_to_loss_s"] < 0.8 * same["time_to_loss_s"]


def test_real_runs_need_a_command(searched: tuple[Path, dict[str, Any]]) -> None:
    assert "write it after '--'" in refusal("validate", searched[0])


def test_recorded_runs_need_no_import(recording: Path, tmp_path: Path) -> None:
    assert "needs no import" in refusal("import", recording, "--out", tmp_path / "trace")


def test_one_worker_is_refused(recording: Path) -> None:
    assert "one worker has nobody" in refusal("replay", recording, "--set", "ranks=1")
    assert "give one of them" in refusal("replay", recording, "--set", "ranks=2", "--set", "speeds=1:2")


def test_a_job_of_mxnet_has_the_schemes_with_a_server_and_its_own_two_lines(tmp_path: Path) -> None:
    schemes = ("bsp", "fixed-adacomm(steps=8)")
    path = runs.recording(tmp_path / "runs.jsonl", *(runs.lines_of(scheme, framework="mxnet") for scheme in schemes))
    refused = refusal("replay", path, "--set", "synchronisation=local-sgd(steps=4)")
    assert "local-sgd uses all-reduces, which MXNet's KVStore has not" in refused
    verb("run", path, "--trials", 60, "--out", tmp_path / "run")
    result = verb("export", tmp_path / "run", "--target", "synchronisation", "--out", tmp_path / "tuned")
    assert "synchronise(net, trainer)" in result["usage"]


def test_runs_of_two_frameworks_are_no_job(tmp_path: Path) -> None:
    two = (runs.lines_of("bsp"), runs.lines_of("asp", framework="mxnet"))
    assert "has runs of mxnet and of pytorch" in refusal("replay", runs.recording(tmp_path / "runs.jsonl", *two))


def test_a_line_without_a_framework_is_of_pytorch(recording: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in recording.read_text().splitlines()]
    old = tmp_path / "old.jsonl"
    old.write_text(
        "".join(json.dumps({name: value for name, value in line.items() if name != "framework"}) + "\n" for line in lines)
    )
    assert load_source(old).framework == "pytorch"
