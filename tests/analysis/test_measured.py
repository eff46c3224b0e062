"""Real times of plans that ran elsewhere: what is stored, what is refused, and what later answers make of it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import msgspec
import pytest

import dpro_search
from dpro_search.deploy.chosen import PlansOfRun
from dpro_search.deploy.measured_plans import measured_plans, reported
from dpro_search.deploy.validate import Validation
from dpro_search.errors import InputError
from dpro_search.kinds._measured_runs import learned_changes
from dpro_search.search import SearchResult
from dpro_search.search.calibration import Calibration
from dpro_search.space.plan import Plan
from tests.kinds.verbs import outcome, printed, refusal, verb
from tests.parallel.jobs import text

TITAN = (
    "[titan] 2025-12-13 06:45:34,345 - root - INFO - step: {step:2}  loss:  5.9  memory: 63.36GiB(45.35%)  tps: {tps:,}  mfu: 40%"
)
MEGATRON = "iteration {step}/ 100 | elapsed time per iteration (ms): {ms} | global batch size: {batch} | lm loss: 1.0 |"


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("searched")
    (folder / "job.toml").write_text(text("tp = 4\npp = 2"))
    verb("run", folder / "job.toml", "--trials", 12, "--out", folder / "run")
    return folder / "run"


@pytest.fixture
def run(searched: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(searched, tmp_path / "run"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    dpro_search.load().search(trials=4, sampler="mcmc", out=folder)
    return folder


def step_us(run: Path, number: int) -> float:
    result = SearchResult.load(run)
    return (result.plans[number - 1].prediction if number else result.baseline).iteration_us


def measure(run: Path, number: int, ratio: float, *more: object) -> dict:
    return verb("measured", run, "--plan", number, "--step-time", f"{step_us(run, number) * ratio:.0f}us", *more)


def test_the_python_api_gives_the_answer_of_the_verb(run):
    answer = dpro_search.load_run(run).measured(1, step_time=f"{step_us(run, 1) * 1.02:.0f}us")
    assert (answer.number, answer.measurements) == (1, 1)
    assert answer.error_pct == pytest.approx((1 / 1.02 - 1) * 100, abs=0.1)
    with pytest.raises(InputError, match="step_time"):
        dpro_search.load_run(run).measured(1)


def test_a_time_is_compared_with_the_prediction_and_kept(run):
    answer = measure(run, 1, 1.1, "--memory", "40GiB")
    assert answer["error_pct"] == pytest.approx((1 / 1.1 - 1) * 100, abs=0.1)
    assert answer["within"]
    (times,) = measured_plans(run).values()
    assert times.plan == SearchResult.load(run).plans[0].plan
    assert (times.step_us, times.memory_bytes) == (answer["step_us"], 40 * 2**30)


def test_several_measurements_of_a_plan_are_kept_and_show_the_noise(run):
    for ratio in (1.0, 1.1, 1.3):
        answer = measure(run, 1, ratio)
    (times,) = measured_plans(run).values()
    assert (answer["measurements"], len(times.measurements)) == (3, 3)
    assert times.step_us == pytest.approx(1.1 * step_us(run, 1), rel=1e-4)
    assert times.noise > 0.1
    assert all(one.when.endswith("Z") and one.origin == "reported" for one in times.measurements)


def test_runs_of_validate_and_reported_ones_are_read_together(run):
    plan = SearchResult.load(run).plans[0].plan
    row = {
        "plan": plan,
        "predicted_us": 1e6,
        "interval_us": (9e5, 2e6),
        "spread_us": 0.0,
        "error_pct": 0.0,
        "speedup_predicted": 1.0,
    }
    row |= {"measured_us": 2e6, "speedup_measured": 1.0, "speedup_interval": (0.9, 1.1), "beyond_noise": False}
    baseline = {"baseline_us": 3e6, "baseline_predicted_us": 3e6, "baseline_error_pct": 0.0, "noise_pct": 1.0, "rounds": 2}
    (run / "validation.json").write_bytes(msgspec.json.encode(baseline | {"plans": [row]}))
    assert Validation.load(run) is not None
    measure(run, 1, 1.0)
    measured = measured_plans(run)
    assert measured[Plan()].step_us == 3e6
    assert sorted(one.origin for one in measured[plan].measurements) == ["reported", "validate, 2 rounds"]


def test_a_log_of_rates_is_read_by_the_tokens_of_the_job(run, tmp_path):
    tokens = 64 * 4096 / 16
    tps = [round(tokens / step_us(run, 1) * 1e6 * factor) for factor in (0.1, 0.99, 1.0, 1.01)]
    (tmp_path / "train.log").write_text("\n".join(TITAN.format(step=step, tps=rate) for step, rate in enumerate(tps, 1)))
    answer = verb("measured", run, "--plan", 1, "--log", tmp_path / "train.log")
    assert answer["step_us"] == pytest.approx(step_us(run, 1), rel=1e-3)
    assert (answer["steps"], answer["left_out"], answer["memory_bytes"]) == (3, 1, round(63.36 * 2**30))
    assert answer["origin"] == "log of torchtitan, train.log"
    assert answer["spread_us"][0] < answer["step_us"] < answer["spread_us"][1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--plan", 99, "--step-time", "2s"), "run has plans 1 to"),
        (("--plan", 1), "give either --step-time 12.4s or --log FILE"),
        (("--step-time", "2s"), "name what was measured: --plan N, or --baseline"),
        (("--baseline", "--step-time", "2"), "probably a time in seconds was meant, 2.00 s"),
        (("--baseline", "--step-time", "2000s"), "probably a time in milliseconds was meant, 2.00 s"),
        (("--baseline", "--step-time", "0s"), "must be above 0"),
        (("--baseline", "--step-time", "1us"), "at the peak of its devices"),
        (("--baseline", "--step-time", "9h"), "check the unit"),
        (("--baseline", "--step-time", "2s", "--memory", "900GiB"), "a device has 79.6 GiB"),
    ],
)
def test_what_cannot_be_is_refused_and_not_kept(run, arguments, message):
    assert message in refusal("measured", run, *arguments)
    assert not (run / "measured.jsonl").exists()


def test_the_time_of_one_micro_batch_is_recognised(run):
    micro_batches = SearchResult.load(run).baseline.iteration_us / 8  # dp 2, micro-batch 1: 32 of them
    assert "probably the time of one micro-batch was meant" in refusal(
        "measured", run, "--baseline", "--step-time", f"{micro_batches / 4:.0f}us"
    )


def test_a_log_of_another_batch_or_without_steps_is_refused(run, tmp_path):
    log = tmp_path / "train.log"
    log.write_text("\n".join(MEGATRON.format(step=step, ms=2000.0, batch=512) for step in range(1, 6)))
    assert "have a batch of 512, those of the plan 64" in refusal("measured", run, "--plan", 1, "--log", log)
    log.write_text("nothing\n")
    assert "no step times in it" in refusal("measured", run, "--plan", 1, "--log", log)


def test_lines_of_another_job_and_damaged_ones_are_refused(run):
    measure(run, 1, 1.0)
    (line,) = reported(run)
    path = run / "measured.jsonl"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(line, trace_digest="0" * 64)))
    assert "line 1 was measured for another job" in refusal("validate", run, "--next")
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(line, step_us=-1.0)))
    assert "line 1 has a time that is not above 0" in refusal("report", run, "--out", run / "page.html")
    path.write_text("{")
    assert "line 1 is damaged" in refusal("measured", run, "--plan", 1, "--step-time", "2s")


def test_the_job_of_the_search_must_be_there_unchanged(run, searched, tmp_path):
    moved = tmp_path / "job.toml"
    moved.write_text((searched.parent / "job.toml").read_text() + "# changed\n")
    assert "changed since" in refusal("measured", run, "--plan", 1, "--step-time", "2s", "--trace", moved)


def test_the_next_run_is_named_with_its_cost_until_it_is_not_worth_it(run):
    first = verb("validate", run, "--next")
    assert first["number"] is not None
    assert first["device_minutes"] > 16 * 5
    assert first["pays_off_after_us"] > 0
    after = measure(run, first["number"], 1.0)["next"]
    assert after["number"] != first["number"]
    short = verb("validate", run, "--next", "--training", "1min")
    assert short["number"] is None
    assert "worth less than it costs" in short["reason"]


def test_when_every_plan_was_measured_it_says_stop(run):
    for number in range(len(SearchResult.load(run).plans) + 1):
        answer = measure(run, number, 1.0)
    assert answer["next"]["reason"] == "Stop: every listed plan was measured."


def test_a_plan_that_was_slower_than_predicted_makes_the_others_slower(run):
    before = {plan["number"]: plan["expected_us"] for plan in verb("validate", run, "--next")["plans"]}
    after = {plan["number"]: plan for plan in measure(run, 1, 1.4)["next"]["plans"]}
    assert after[1]["expected_us"] == pytest.approx(1.4 * step_us(run, 1), rel=0.02)
    assert after[2]["expected_us"] > before[2] * 1.05
    assert after[2]["predicted_us"] == pytest.approx(before[2])


def test_a_new_search_learns_from_it_also_for_other_plans(run, searched, tmp_path):
    measure(run, 1, 1.3)
    job = searched.parent / "job.toml"
    learned = verb("run", job, "--calibrate", run, "--trials", 12, "--out", tmp_path / "again")
    plain = SearchResult.load(run)
    assert learned["baseline_us"] > plain.baseline.iteration_us * 1.1
    assert learned["stopped"] == verb("run", job, "--trials", 12, "--out", searched)["stopped"]
    changes = json.loads((tmp_path / "again/run.json").read_text())["options"]["set"]
    assert verb("replay", job, "--set", changes)["predicted_iteration_us"] == pytest.approx(learned["baseline_us"])
    measure(tmp_path / "again", 1, 1.0)
    kept = dict(change.split("=") for change in learned_changes(job, tmp_path / "again", None))
    assert {name: float(factor) for name, factor in kept.items()} == pytest.approx(
        {name: float(factor) for name, factor in (change.split("=") for change in changes.split(","))}, abs=0.01
    )


def test_a_search_does_not_learn_from_a_folder_without_measurements(run, searched, tmp_path):
    assert "no plan was measured" in refusal("run", searched.parent / "job.toml", "--calibrate", run, "--out", tmp_path / "again")


def test_expect_takes_the_measurements_of_a_plan(run):
    measure(run, 1, 1.1, "--memory", "41GiB")
    answer = verb("expect", run, "--plan", 1)
    assert answer["measured"] == pytest.approx(1.1 * step_us(run, 1), rel=1e-4)
    assert answer["values"]["memory_bytes"]["measured"] == pytest.approx(41 * 2**30)
    assert verb("expect", run)["verdict"] == "not measured"
    assert "only of a run folder" in refusal("expect", run.parent / "job.toml", "--plan", 1)


def test_the_report_shows_what_was_measured(run):
    measure(run, 1, 1.1)
    verb("report", run, "--out", run / "page.html")
    page = (run / "page.html").read_text()
    assert "measured elsewhere" in page
    assert "Nothing was measured" not in page


def test_export_prefers_the_plan_that_was_measured_to_be_faster(run):
    measure(run, 0, 1.0)
    measure(run, 1, 1.5)
    measure(run, 2, 0.8)
    assert PlansOfRun(run).preferred[0] == 2
    assert PlansOfRun(run).chosen(2).measured.endswith(")")


def test_people_read_sentences(run):
    out = printed("measured", run, "--plan", 1, "--step-time", f"{step_us(run, 1) / 1e6:.2f}s")
    assert "measured (reported)" in out
    assert "Run next: plan" in out or "Stop" in out


def test_a_recorded_job_is_corrected_plan_by_plan_also_without_the_recorded_setting(recorded, tmp_path):
    run = Path(shutil.copytree(recorded, tmp_path / "run"))
    plan = SearchResult.load(run).plans[0].plan
    measure(run, 1, 1.2)
    calibration = Calibration.load(run)
    (session,) = calibration.sessions
    assert session.recorded is None
    assert [point.plan for point in session.changed] == [plan]
    measure(run, 0, 1.0)
    assert Calibration.load(run).sessions[0].recorded is not None
    assert verb("validate", run, "--next")["plans"]
    assert learned_changes(Path(json.loads((run / "run.json").read_text())["trace"]), run, None) == ()
    again = dpro_search.load().search(trials=4, sampler="mcmc", out=tmp_path / "again", calibrate=run)
    times = {ranked.plan: ranked.prediction.iteration_us for ranked in again.result.plans}
    assert times.get(plan, step_us(run, 1) * 1.1) > step_us(run, 1) * 1.02


def test_a_line_knows_its_version(run):
    measure(run, 1, 1.0)
    line = json.loads((run / "measured.jsonl").read_text())
    assert line["version"] == 1
    (run / "measured.jsonl").write_text(json.dumps(line | {"version": 2}))
    with pytest.raises(InputError, match="later version"):
        reported(run)


@pytest.mark.parametrize("tracker", ["mlflow", "wandb", "tensorboard"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(run, monkeypatch, tracker):
    monkeypatch.setitem(sys.modules, tracker, None)
    monkeypatch.delitem(sys.modules, f"dpro_search.deploy.trackers.{tracker}", raising=False)
    status, _, error = outcome("report", run, "--out", run / "page.html", "--to", tracker)
    assert status == 1
    assert f"pip install 'dpro-search[{tracker}]'" in error


def test_a_tracker_takes_runs_and_known_names_only(run, searched):
    assert "known are mlflow, wandb, tensorboard" in refusal("report", run, "--out", run / "page.html", "--to", "excel:x")
    assert "only of a run folder" in refusal("report", searched.parent / "job.toml", "--out", run / "page.html", "--to", "wandb")
