"""A search of a described job lists ten different plans with their whole strategies, and says what they are compared with."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpro_search.parallel.file.usual_strategy import MEMORY_HEADROOM
from dpro_search.parallel.job import limit_bytes
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.search.ranking import family
from dpro_search.parallel.settings import strategy_text
from dpro_search.parallel.strategy import Recompute, Strategy
from dpro_search.search import run_search
from dpro_search.space.describe import describe
from dpro_search.space.plan import Plan
from tests.every_case import every_case
from tests.kinds.verbs import printed, refusal, verb
from tests.parallel.jobs import job, prepared, text

GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planner")
    (path / "job.toml").write_text(text("tp = 4\npp = 2"))
    return path


@pytest.fixture(scope="module")
def result(folder: Path) -> Any:
    return verb("run", folder / "job.toml", "--out", folder / "run")


def test_ten_plans_differ_in_more_than_a_detail(result):
    strategies = [
        tuple(row["strategy"][name] for name in ("tp", "pp", "cp", "dp", "schedule", "zero_stage", "recompute"))
        for row in result["plans"]
    ]
    assert len(strategies) == 10
    assert len(set(strategies)) == 10


def test_plans_are_in_order_of_their_step(result):
    steps = [row["predicted_iteration_us"] for row in result["plans"]]
    assert steps == sorted(steps)


def test_every_plan_has_its_whole_strategy_and_what_it_gives_and_costs(result):
    for row in result["plans"]:
        assert {"tp", "pp", "cp", "dp", "virtual_stages", "zero_stage", "recompute", "micro_batch"} <= row["strategy"].keys()
        tokens = 64 * 4096 / row["predicted_iteration_us"] * 1e6
        assert row["tokens_per_second"] == pytest.approx(tokens)
        assert row["tokens_per_second_per_device"] == pytest.approx(tokens / 16)
        assert 5 < row["mfu_pct"] < 80
        assert "cost_per_million_tokens" in row
        assert row["memory_margin_bytes"] > 0
        assert row["slower_than_best_pct"] == pytest.approx((row["predicted_iteration_us"] / result["best_us"] - 1) * 100, abs=0.01)
        lost_us = sum(row["lost_to_best_us"].values())
        assert lost_us == pytest.approx(row["predicted_iteration_us"] - result["best_us"], rel=1e-3, abs=1)


def test_the_names_of_plans_are_whole_strategies(result):
    for row in result["plans"]:
        strategy = row["strategy"]
        for name in ("tp", "pp", "cp"):
            assert (f"{name} {strategy[name]}" in row["name"]) == (strategy[name] > 1)
        assert f"micro-batch {strategy['micro_batch']}" in row["name"]


def test_the_table_in_the_run_folder_has_the_same(result, folder):
    rows = list(csv.DictReader((folder / "run" / "topn.csv").open()))
    assert [row["name"] for row in rows] == [row["name"] for row in result["plans"]]
    for row, plan in zip(rows, result["plans"], strict=True):
        assert float(row["mfu_pct"]) == pytest.approx(plan["mfu_pct"])
        assert float(row["tokens_per_second_per_device"]) == pytest.approx(plan["tokens_per_second_per_device"])
        assert int(row["tp"]) == plan["strategy"]["tp"]
        assert int(row["micro_batch"]) == plan["strategy"]["micro_batch"]


def test_the_printed_table_has_speed_memory_and_the_described_strategy(folder, result):
    shown = printed("run", folder / "job.toml", "--out", folder / "run")
    for words in ("tokens/s", "MFU", "free", "as described: tp 4"):
        assert words in " ".join(shown.split())


@pytest.mark.parametrize("limit_gib", [80, 9])
def test_no_better_family_of_plans_is_left_out(tmp_path, limit_gib):
    """The list for six layers on eight devices is that of all plans without needless recomputation, within 1 %."""
    few = tmp_path / "config.json"
    few.write_text(
        '{"model_type": "llama", "num_hidden_layers": 6, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000, '
        '"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192}'
    )
    searched = job(tmp_path, "tp = 1", model="config.json", cluster="1xhgx-h100", global_batch=32, sequence=2048)
    searched.memory_limit_bytes = limit_gib * GIB
    prices, limit = prepared(searched).prices, limit_bytes(searched, prepared(searched))
    best_us: dict[Any, float] = {}
    for strategy in searched.space.candidates:
        kept = replace(strategy, recompute=Recompute.NONE, recompute_layers=0)
        needless = strategy != kept and prices.memory(kept).total_bytes <= limit
        if not needless and prices.memory(strategy).total_bytes <= limit:
            step_us = prices.step_us(strategy)
            best_us[family(strategy)] = min(step_us, best_us.get(family(strategy), step_us))
    result = run_search(searched.objective(), trials=500, out=tmp_path / "run", trace_digest="x")
    listed_us = [ranked.prediction.iteration_us for ranked in result.plans]
    assert result.stopped == "complete"
    assert listed_us == pytest.approx(sorted(best_us.values())[:10], rel=0.011)


def test_memory_of_a_device_is_not_filled_to_the_brim(folder, result):
    has, limit = result["memory"]["device_bytes"], result["memory"]["limit_bytes"]
    assert limit == pytest.approx(has * (1 - MEMORY_HEADROOM), abs=1)
    assert all(row["peak_memory_bytes"] <= limit for row in result["plans"])
    assert "are left free" in " ".join(result["reasons"])


def test_a_memory_limit_has_a_unit_and_takes_the_place_of_the_headroom(folder, tmp_path):
    limited = verb("run", folder / "job.toml", "--memory-limit", "30GiB", "--out", tmp_path / "run")
    assert limited["memory"] == {"device_bytes": limited["memory"]["device_bytes"], "limit_bytes": 30 * GIB, "headroom_pct": None}
    assert all(row["peak_memory_bytes"] <= 30 * GIB for row in limited["plans"])
    assert "30 parsecs" in refusal("run", folder / "job.toml", "--memory-limit", "30 parsecs", "--out", tmp_path / "other")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        # NVIDIA's submissions to MLPerf 5.0 on H100 run Llama 3.1 405B with tp 8, pp 8 and cp 2, without recomputation.
        (
            {"model": "llama3-405b", "cluster": "2048xhgx-h100", "global_batch": 2048, "sequence": 8192},
            ("tp 8", "pp 8", "cp 2", "ZeRO-1", "no recomputation"),
        ),
        ({"model": "llama3-8b", "cluster": "4xhgx-h100", "global_batch": 512, "sequence": 8192}, ("tp 2", "dp 16", "ZeRO-1")),
        ({"model": "gpt2-medium", "sequence": 1024, "framework": "pytorch-2"}, ("dp 16", "no ZeRO", "micro-batch 4")),
        ({"model": "llama3-70b", "cluster": "32xhgx-h100", "global_batch": 256, "framework": "pytorch-2"}, ("dp 256", "ZeRO-3")),
        (  # a batch of fewer sequences than devices
            {"model": "llama3-70b", "cluster": "32xhgx-h100", "global_batch": 128, "framework": "fsdp"},
            ("tp 2", "dp 128", "ZeRO-3"),
        ),
    ],
)
def test_without_runs_a_usual_plan_of_the_framework_is_compared_with(tmp_path, values, words):
    facts = job(tmp_path, None, **values).objective().facts().baseline
    parts = facts.name.split(", ")
    assert all(word in parts for word in words), facts.name
    assert facts.usual_plan
    assert facts.source


def test_the_usual_plan_is_said_with_its_source(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(text(None, model="gpt2-medium", sequence=1024))
    shown = " ".join(printed("run", path, "--out", tmp_path / "run").split())
    assert "Compared with a usual plan of megatron-core:" in shown
    assert "Narayanan et al. 2021" in shown


def test_precision_and_sequence_are_changed_like_the_batch(folder):
    base = verb("replay", folder / "job.toml")
    fp8 = verb("replay", folder / "job.toml", "--set", "precision=fp8")
    longer = verb("replay", folder / "job.toml", "--set", "sequence=8192")
    assert fp8["predicted_iteration_us"] < base["predicted_iteration_us"]
    assert longer["predicted_iteration_us"] > 2 * base["predicted_iteration_us"]
    assert verb("diagnose", folder / "job.toml", "--set", "precision=fp8")["iteration_us"] == fp8["predicted_iteration_us"]


def test_a_search_takes_another_precision(folder, tmp_path):
    searched = verb("run", folder / "job.toml", "--set", "precision=fp8", "--trials", 5, "--out", tmp_path / "run")
    assert searched["baseline_us"] == verb("replay", folder / "job.toml", "--set", "precision=fp8")["predicted_iteration_us"]


@pytest.mark.parametrize(
    ("change", "words"),
    [("precision=fp7", "none of bf16"), ("sequence=0", "from 1 to"), ("sequence=many", "not a whole number")],
)
def test_an_impossible_precision_or_sequence_is_one_line(folder, change, words):
    assert words in refusal("replay", folder / "job.toml", "--set", change)


def test_a_precision_that_the_device_lacks_is_refused(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(text("tp = 2", cluster="2xdgx-a100-80"))
    assert "fp8" in refusal("replay", path, "--set", "precision=fp8")


@every_case(
    ("settings", "name"),
    [
        ({"zero_stage": 0, "recompute_layers": 37}, "no ZeRO, recompute the first 37 layers of each stage"),
        (
            {"tp": 8, "zero_stage": 0, "recompute": "full", "recompute_layers": 15},
            "tp 8, no ZeRO, recompute the first 15 layers of each stage",
        ),
        ({"cp": 2, "recompute_layers": 1}, "cp 2, recompute the first layer of each stage"),
        ({"recompute": "selective", "recompute_layers": 3}, "selective recomputation of the first 3 layers of each stage"),
        ({"recompute_layers": 0}, "recompute all layers"),
        ({"dp_replicate": 8}, "HSDP, 8 replicas"),
        ({"virtual_stages": 7, "schedule": "interleaved"}, "7 virtual stages"),
        ({"schedule": "1f1b"}, "1F1B"),
    ],
)
def test_changes_have_the_names_that_practitioners_use(settings, name):
    assert describe(Plan.of(**settings)) == name


def test_a_strategy_is_said_whole():
    strategy = Strategy(
        tp=4, pp=8, cp=2, dp=16, virtual_stages=5, schedule=Schedule.INTERLEAVED, zero_stage=1, sequence_parallel=True,
        global_batch=128,
    )  # fmt: skip
    said = "tp 4, pp 8, cp 2, dp 16, 5 virtual stages, ZeRO-1, no recomputation, micro-batch 1"
    assert strategy_text(strategy) == said
    hsdp = Strategy(dp=16, zero_stage=3, dp_replicate=2, recompute=Recompute.FULL, global_batch=128, micro_batch=4)
    assert strategy_text(hsdp) == "dp 16, ZeRO-3, HSDP, 2 replicas, full recomputation, micro-batch 4"
