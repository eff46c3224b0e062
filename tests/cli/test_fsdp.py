"""What `replay` and `diagnose` say of a recorded fully sharded job: a real two-rank recording of a small model."""

from pathlib import Path

import pytest

from dpro_search.collect.torch_assemble import assemble_torch
from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError
from dpro_search.space.plan import Plan
from tests.cli.facts import CONTRACT, printed, replayed

RAW = Path(__file__).parents[1] / "data" / "fsdp_mlp"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return assemble_torch(RAW)


def test_a_replay_has_the_facts_of_the_contract(trace):
    result = replayed(trace)
    assert set(result) >= CONTRACT
    # Steps of milliseconds are the scheduler's: this asks for the right size, real workloads for accuracy.
    assert 0.3 < result["predicted_iteration_us"] / result["measured_iteration_us"] < 3


def test_knobs_are_set_one_after_the_other(trace):
    slow = replayed(trace, changes=("rate=5mbit",))["predicted_iteration_us"]
    kept = replayed(trace, changes=("rate=5mbit", "reshard_after_forward=0"))["predicted_iteration_us"]
    both = replayed(trace, changes=("rate=5mbit", "reshard_after_forward=0", "prefetch=1"))["predicted_iteration_us"]
    # 50 kB are gathered again: 25 kB on each link at 5 Mbit/s.
    assert replayed(trace)["predicted_iteration_us"] < kept < slow - 30_000
    assert both < kept * 1.02
    assert replayed(trace, changes=("ranks=4", "cores=2", "compute=0.9"))["predicted_iteration_us"] > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("bucket_cap_bytes=3", "has no knob 'bucket_cap_bytes'"),
        ("prefetch=0", "only 1 can be replayed"),
        ("reshard_after_forward=1", "only 0 can be replayed"),
        ("prefetch=maybe", "neither on nor off"),
    ],
)
def test_a_change_that_cannot_be_made_is_named(trace, change, said):
    with pytest.raises(InputError, match=said):
        replayed(trace, changes=(change,))


def test_a_plan_of_another_kind_of_job_is_refused(trace, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_bytes(Plan.of(bucket_cap_bytes=1).to_json())
    with pytest.raises(InputError, match="has no bucket_cap_bytes"):
        replayed(trace, plan=Plan.load(plan))


def test_a_held_out_step_and_own_durations_are_replayed(trace):
    assert replayed(trace, holdout_step=9)["measured_iteration_us"] > 0
    assert replayed(trace, own_durations=True)["error_pct"] >= 0


def test_a_replay_is_written_beside_the_measured_step(trace, tmp_path):
    replayed(trace, perfetto=tmp_path / "p.json", timeline=tmp_path / "t.csv")
    assert "reduce-scatter of the root" in (tmp_path / "p.json").read_text()
    names = {row.split(",")[1] for row in (tmp_path / "t.csv").read_text().splitlines()[1:]}
    assert {"all-gather of 1 for backward@0", "forward until all-gather of 2 is back@1"} <= names


def test_a_diagnosis_names_collectives_and_what_sharding_otherwise_would_gain(trace, capsys):
    result = printed(trace)
    assert {row["kind"] for row in result["critical_path"]} <= {"compute", "late_rank", "communication"}
    assert [row["rank"] for row in result["ranks"]] == [0, 1]
    assert {row["what_if"] for row in result["gains"]} >= {"communication=0", "prefetch=1", "reshard_after_forward=0"}
    assert len(result["collectives"]) == 11
    assert result["findings"][0].startswith(("Communication that nothing hides", "All ranks wait"))
    out = capsys.readouterr().out
    assert "reshard_after_forward=0" in out
    assert "all-gather of 2 for backward" in out
