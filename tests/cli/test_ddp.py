"""What `replay` and `diagnose` say of a recorded DistributedDataParallel job: a real two-rank recording of a small model."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from dpro_search.errors import InputError
from dpro_search.graph.measured import ProfiledSteps
from dpro_search.kinds import job_of
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario
from tests.cli.facts import CONTRACT, printed, replayed

RECORDING = "ddp_mlp"


def test_a_replay_has_the_facts_of_the_contract(trace):
    result = replayed(trace)
    assert set(result) >= CONTRACT
    assert result["measured_iteration_us"] == float(np.median(trace.iterations_us()))
    assert result["error_pct"] == pytest.approx((result["predicted_iteration_us"] / result["measured_iteration_us"] - 1) * 100)


def test_knobs_are_set_one_after_the_other(trace):
    slow = replayed(trace, changes=("rate=5mbit",))["predicted_iteration_us"]
    both = replayed(trace, changes=("rate=5mbit", "bucket_cap_bytes=1B"))["predicted_iteration_us"]
    assert replayed(trace)["predicted_iteration_us"] < slow
    assert both != slow
    assert replayed(trace, changes=("ranks=4", "cores=2"))["predicted_iteration_us"] > 0
    assert replayed(trace, changes=("rate=5mbit",))["measured_iteration_us"] is None


def test_a_plan_file_sets_the_bucket_size(trace, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_bytes(Plan.of(bucket_cap_bytes=1).to_json())
    assert (
        replayed(trace, plan=Plan.load(plan))["predicted_iteration_us"]
        == replayed(trace, changes=("bucket_cap_bytes=1B",))["predicted_iteration_us"]
    )


def test_the_first_bucket_has_a_size_of_its_own(trace):
    small = replayed(trace, changes=("rate=5mbit", "first_bucket_bytes=1B"))
    same = replayed(trace, changes=("rate=5mbit", "bucket_cap_bytes=31457", "first_bucket_bytes=31457"))
    assert small["predicted_iteration_us"] != same["predicted_iteration_us"]
    assert replayed(trace, changes=("first_bucket_bytes=1B",))["measured_iteration_us"] is None


def test_a_held_out_step_is_predicted_from_the_others(trace):
    measured = float(np.diff(trace.steps.start_us[trace.steps.rank == 0])[9])
    others = ProfiledSteps(replayed=(8, 10, 11), fitted=(8, 10, 11))
    predicted = job_of(trace).job.lower(Scenario(), steps=others).replayable.iterations().iteration_us
    assert replayed(trace, holdout_step=9)["error_pct"] == pytest.approx((predicted / measured - 1) * 100)
    with pytest.raises(InputError, match="step 3 was not profiled; choose a step from 8 to 11"):
        replayed(trace, holdout_step=3)


def test_steps_are_replayed_from_their_own_durations(trace):
    comparison = job_of(trace).job.compared(None)
    assert replayed(trace, own_durations=True)["error_pct"] == pytest.approx(comparison.error_pct)
    assert comparison.measured_us > 0


def test_questions_change_the_job(trace):
    base = replayed(trace)["predicted_iteration_us"]
    for text in ("compute=0.5", "rank1.compute=0.5", "communication=0", "bandwidth=4"):
        assert replayed(trace, changes=(text,))["predicted_iteration_us"] <= base * 1.01, text
    with pytest.raises(InputError, match="ranks 0 to 1"):
        replayed(trace, changes=("rank7.compute=0.5",))
    with pytest.raises(InputError, match="rate of the recording's links is not known"):
        replayed(trace, changes=("rate=unlimited", "bandwidth=2"))


def test_samples_give_quantiles_in_order(trace):
    drawn = replayed(trace, samples=5)["quantiles_us"]
    assert drawn["p5"] <= drawn["p50"] <= drawn["p95"]


def processes(path: Path) -> set[str]:
    events = msgspec.json.decode(path.read_bytes())["traceEvents"]
    return {event["args"]["name"] for event in events if event["name"] == "process_name"}


def test_a_replay_is_written_beside_the_measured_step(trace, tmp_path):
    replayed(trace, perfetto=tmp_path / "p.json", timeline=tmp_path / "t.csv")
    assert processes(tmp_path / "p.json") == {f"{what} rank {rank}" for what in ("predicted", "measured") for rank in (0, 1)}
    names = {row.split(",")[1] for row in (tmp_path / "t.csv").read_text().splitlines()[1:]}
    assert {"buffers 0@0", "bucket 1@1", "end of backward@0"} <= names


def test_a_changed_replay_is_written_alone(trace, tmp_path):
    replayed(trace, changes=("bucket_cap_bytes=1B",), perfetto=tmp_path / "p.json", timeline=tmp_path / "t.csv")
    assert processes(tmp_path / "p.json") == {"predicted rank 0", "predicted rank 1"}
    assert "bucket 13@0" in (tmp_path / "t.csv").read_text()


def test_a_diagnosis_follows_the_critical_path(trace):
    result = printed(trace)
    path = result["critical_path"]
    assert {row["kind"] for row in path} <= {"compute", "late_rank", "communication"}
    assert sum(row["duration_us"] for row in path) == pytest.approx(
        path[-1]["start_us"] + path[-1]["duration_us"] - path[0]["start_us"]
    )
    assert all(isinstance(sentence, str) for sentence in result["findings"])


def test_a_diagnosis_names_ranks_buckets_and_gains(trace, capsys):
    result = printed(trace)
    assert [row["rank"] for row in result["ranks"]] == [0, 1]
    assert sum(row["bytes"] for row in result["buckets"]) == 54056
    assert [row["bucket"] for row in result["buckets"]] == [0, 1]
    assert {row["what_if"] for row in result["gains"]} >= {"compute=0.9", "communication=0", "bucket_cap_bytes=25MiB"}
    gained = [row["gain_us"] for row in result["gains"]]
    assert gained == sorted(gained, reverse=True)
    assert "bucket_cap_bytes=25MiB" in capsys.readouterr().out
