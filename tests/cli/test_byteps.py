"""What `replay` and `diagnose` say of a recorded BytePS job: a real recording of two workers and two servers."""

import json
from dataclasses import replace

import msgspec
import pytest

from dpro_search.analysis.search import servers_note
from dpro_search.deploy.parts.part import Servers
from dpro_search.errors import InputError
from dpro_search.space.plan import Plan
from tests.cli.facts import CONTRACT, printed, replayed
from tests.in_process import succeeds

RECORDING = "byteps_mlp"


def test_a_replay_has_the_facts_of_the_contract(trace):
    result = replayed(trace)
    assert set(result) >= CONTRACT
    low, high = result["interval_us"]
    assert low < result["predicted_iteration_us"] < high
    assert sum(result["breakdown_us"].values()) > 0


def test_a_slower_link_takes_longer(trace):
    fast = replayed(trace, changes=("rate=1gbit",))["predicted_iteration_us"]
    slow = replayed(trace, changes=("rate=5mbit",))["predicted_iteration_us"]
    assert fast < slow
    assert replayed(trace, changes=("rate=5mbit",))["measured_iteration_us"] is None


@pytest.mark.parametrize("change", ["servers=1", "partition_bytes=4096", "credit=4", "rate=unlimited", "compression=fp16"])
def test_every_knob_can_be_set(trace, change):
    assert replayed(trace, changes=(change,))["predicted_iteration_us"] > 0


def test_single_steps_cannot_be_replayed(trace):
    with pytest.raises(InputError, match=r"a job with BytePS cannot be replayed step by step \(--own-durations\); a Horovod job"):
        replayed(trace, own_durations=True)


def test_a_timeline_can_be_written(trace, tmp_path):
    replayed(trace, perfetto=tmp_path / "replay.json", timeline=tmp_path / "ops.csv")
    assert (tmp_path / "replay.json").stat().st_size > 0
    assert "dense" not in (tmp_path / "ops.csv").read_text().splitlines()[0]


def test_a_diagnosis_reports_the_load_of_the_servers_and_the_knobs_to_turn(trace, capsys):
    result = printed(trace)
    assert [row["server"] for row in result["servers"]] == [0, 1]
    assert sum(row["bytes"] for row in result["servers"]) == sum(tensor.size_bytes for tensor in trace.tensors)
    assert sum(row["share_pct"] for row in result["servers"]) == pytest.approx(100)
    what_ifs = {row["what_if"] for row in result["gains"]}
    assert {"servers=3", "partition_bytes=2048", "partition_bytes=32768"} <= what_ifs
    assert [row["gain_us"] for row in result["gains"]] == sorted((row["gain_us"] for row in result["gains"]), reverse=True)
    assert "what the servers sum" in capsys.readouterr().out
    assert {row["reason"] for row in result["critical_ops"]} <= {"start", "dependency", "device", "collective"}


def test_a_diagnosis_asks_for_other_hosts_of_servers_where_links_have_a_rate(trace):
    slow = replace(trace, meta=msgspec.structs.replace(trace.meta, rate_bps=1e6))
    result = printed(slow)
    assert "servers_on_workers=1" in {row["what_if"] for row in result["gains"]}
    assert "servers_on_workers=1" not in {row["what_if"] for row in printed(trace)["gains"]}


def test_a_plan_says_what_its_options_say(trace, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_bytes(Plan.of(partition_bytes=4096, servers=1).to_json())
    predicted_us = replayed(trace, plan=Plan.load(plan))["predicted_iteration_us"]
    assert predicted_us == replayed(trace, changes=("partition_bytes=4096", "servers=1"))["predicted_iteration_us"]
    assert replayed(trace, plan=Plan.load(plan))["measured_iteration_us"] is None
    plan.write_bytes(Plan.of(p3=True).to_json())
    with pytest.raises(InputError, match="plan: a job with BytePS has no p3; it knows partition_bytes, credit, servers"):
        replayed(trace, plan=Plan.load(plan))


def test_halves_are_found_by_a_search_that_may_lose_something_and_exported(trace, tmp_path):
    replace(trace, meta=msgspec.structs.replace(trace.meta, rate_bps=2e6)).save(tmp_path / "trace")
    args = ("run", tmp_path / "trace", "--trials", 30, "--sampler", "auto")
    plain = json.loads(succeeds(*args, "--out", tmp_path / "plain", "--json"))
    lossy = json.loads(succeeds(*args, "--allow-lossy", "--out", tmp_path / "lossy", "--json"))
    assert all("compression" not in row["plan"] for row in plain["plans"])
    assert lossy["plans"][0]["plan"]["compression"] == "fp16"
    assert lossy["best_us"] < plain["best_us"]
    succeeds("export", tmp_path / "lossy", "--out", tmp_path / "tuned")
    assert json.loads((tmp_path / "tuned" / "trainer.json").read_text())["options"] == {"compression_params": {"fp16": True}}


def test_a_search_says_which_plans_need_more_hosts_for_servers(trace, tmp_path):
    trace.save(tmp_path / "trace")
    args = ("run", tmp_path / "trace", "--trials", 20, "--sampler", "mcmc", "--out", tmp_path / "run")
    rows = json.loads(succeeds(*args, "--json"))["plans"]
    more = {number: row["more_servers"] for number, row in enumerate(rows, 1) if row["more_servers"]}
    assert more == {number: row["plan"]["servers"] - 2 for number, row in enumerate(rows, 1) if row["plan"].get("servers", 0) > 2}
    assert more, "twenty plans hold one with more servers"
    text = " ".join(succeeds(*args).split())
    assert (
        "Plans with more than the 2 recorded servers: " + ", ".join(f"plan {n} ({count} more)" for n, count in more.items()) in text
    )
    assert servers_note([Plan(), Plan(servers=2), Plan(servers=1), Plan(servers=4, servers_on_workers=True)], Servers(2)) == ""


def test_plans_with_servers_on_hosts_of_their_own_are_listed_with_the_hosts_that_they_need():
    plans = [Plan(), Plan(servers=4), Plan(servers_on_workers=False), Plan(servers=1, servers_on_workers=False)]
    assert "need further hosts for servers: plan 3 (2 more), plan 4 (1 more), with links like the workers'" in servers_note(
        plans, Servers(2, on_workers=True)
    )
