"""The verb `replay` on the bundled sample of Horovod, as a process."""

import csv
import json
import subprocess

import pytest
from sample import HOROVOD_SAMPLE

from tests.every_case import every_case
from tests.in_process import dpro

KEYS = {
    "measured_iteration_us", "predicted_iteration_us", "error_pct", "interval_us",
    "breakdown_us", "peak_memory_bytes", "ops", "replay_seconds",
}  # fmt: skip


def replay(*args: object) -> subprocess.CompletedProcess[str]:
    return dpro("replay", "--sample", HOROVOD_SAMPLE, *args)


def as_json(*args: object) -> dict:
    done = replay(*args, "--json")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    return json.loads(done.stdout)


def test_the_recorded_setting_is_compared_with_its_measurement():
    result = as_json()
    assert set(result) >= KEYS
    assert result["error_pct"] == pytest.approx((result["predicted_iteration_us"] / result["measured_iteration_us"] - 1) * 100)


def test_a_changed_setting_has_no_measurement():
    result = as_json("--set", "fusion_threshold_bytes=0", "--set", "rate=500mbit")
    assert result["measured_iteration_us"] is None
    assert result["error_pct"] is None


def test_every_kind_of_change_and_question_is_understood(tmp_path):
    changes = ("cycle_time_us=5000", "groups=4", "ranks=4", "cores=2", "rate=1gbit")
    result = as_json(*(part for change in changes for part in ("--set", change)), "--what-if", "compute=0.9")
    assert result["predicted_iteration_us"] > 0


def test_a_held_out_step_and_own_durations():
    step = as_json("--own-durations")
    assert 0 <= step["error_pct"] < 10
    assert abs(as_json("--holdout-step", "15")["error_pct"]) < 15


def test_the_recorded_setting_is_shown_op_by_op_beside_the_measured_step(tmp_path):
    as_json("--perfetto", tmp_path / "t.json", "--timeline", tmp_path / "t.csv")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {"predicted rank 1", "measured rank 1"} <= {e["args"].get("name") for e in events if e["ph"] == "M"}
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    ops = {row["name"] for row in rows}
    assert {"script@0", "step ends@1"} <= ops
    assert all(float(row["end_us"]) >= float(row["start_us"]) for row in rows)
    shown = {event["name"] for event in events if event["ph"] == "X"}
    assert "script@0" in shown


def test_a_changed_setting_is_shown_as_horovods_phases(tmp_path):
    as_json("--perfetto", tmp_path / "t.json", "--set", "groups=4")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert "Horovod of rank 0" in {event["args"].get("name") for event in events if event["ph"] == "M"}


def test_samples_give_quantiles_around_the_prediction():
    result = as_json("--samples", "20")
    quantiles = result["quantiles_us"]
    assert quantiles["p5"] <= quantiles["p50"] <= quantiles["p95"]
    assert quantiles["p50"] == pytest.approx(result["predicted_iteration_us"], rel=0.05)
    done = replay("--samples", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert "p95" in done.stdout


def test_ten_thousand_ranks_are_replayed_like_two():
    result = as_json("--set", "ranks=10240")
    assert result["predicted_iteration_us"] > as_json()["predicted_iteration_us"]


def test_a_named_cluster_is_the_same_as_its_ranks_and_rate():
    named = as_json("--cluster", "4xtestbed@1gbit")
    assert named["predicted_iteration_us"] == as_json("--set", "ranks=4", "--set", "rate=1gbit")["predicted_iteration_us"]
    assert named["measured_iteration_us"] is None
    assert named["cluster"]["name"].startswith("4 x testbed")


@every_case(
    ("args", "message"),
    [
        (("--set", "threshold=1"), "a Horovod job has no knob 'threshold'"),
        (("--set", "cycle_time_us=fast"), "'fast' is not a time"),
        (("--set", "rate=fast"), "'fast' is not a rate"),
        (("--set", "groups=0"), "groups"),
        (("--what-if", "magic"), "a Horovod job has no knob 'magic'"),
        (("--holdout-step", "0"), "step 0 was not profiled; choose a step from"),
        (("--holdout-step", "15", "--own-durations"), "give one of them"),
        (("--holdout-step", "15", "--set", "ranks=4"), "leave out"),
        (("--timeline", "t.csv", "--set", "ranks=4"), "--timeline has the ops of the recorded setting"),
        (("--cluster", "8xhgx-h10"), "no cluster is called 'hgx-h10'; did you mean hgx-h100"),
        (("--samples", "0"), "--samples"),
        (("/nowhere",), "and /nowhere: leave out one of them"),
        (
            ("--sample", "none"),
            "--sample none: no such sample (known: gpt_ddp_1gbit, bert_kvstore_500mbit, ",
        ),
        (("--plan", "/nowhere.json"), "no such plan file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, message):
    done = replay(*args)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert message in line
