"""Predictions of described parallel jobs: parts that add up, memory with a remedy, a search that misses nothing."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from dpro_search.errors import InputError
from dpro_search.parallel import FRAMEWORKS, ParallelSettings
from dpro_search.parallel.answers.accuracy import accuracy
from dpro_search.parallel.answers.diagnosis import doubt
from dpro_search.parallel.costs.domain import Domain
from dpro_search.parallel.job import limit_bytes
from dpro_search.parallel.memory.peak import peak_memory
from dpro_search.parallel.model import parameters_of, published
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.search.bounds import least_us
from dpro_search.parallel.search.cuts import balanced_cut, balanced_layers
from dpro_search.parallel.search.ranking import ranked
from dpro_search.parallel.settings import settings_of
from dpro_search.parallel.steps.step_prices import StepPrices
from dpro_search.parallel.strategy import Recompute, Strategy
from dpro_search.search import run_search
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario
from tests.every_case import every_case
from tests.parallel.jobs import job, prepared

SMALL = {"model": "gpt2-medium", "cluster": "1xhgx-h100", "global_batch": 64, "sequence": 1024}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return job(tmp_path_factory.mktemp("small"), "tp = 1", **SMALL)


@pytest.fixture(scope="module")
def few_layers(tmp_path_factory):
    """The config.json of a decoder of six layers."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    sizes = {"hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 16, "intermediate_size": 5504, "vocab_size": 32000}
    path.write_text(json.dumps({"model_type": "llama", **sizes}))
    return str(path)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return job(tmp_path_factory.mktemp("split"), "tp = 2\npp = 2")


def asked(found, *changes):
    scenario = found.job.scenario(changes)
    changed_job, plan = found.under(scenario)
    return changed_job.predict(plan)


def test_the_parts_of_a_step_add_up_to_it(split):
    facts = split.replayed(Plan())
    assert sum(facts.breakdown_us.values()) == pytest.approx(facts.iteration_us)
    assert {"compute", "exposed_tensor_parallel", "bubble", "optimizer"} <= facts.breakdown_us.keys()


def test_parts_that_a_strategy_does_not_have_are_not_there(small):
    parts = small.replayed(Plan()).breakdown_us
    assert not {"bubble", "exposed_tensor_parallel", "exposed_context_parallel", "exposed_pipeline_sends"} & parts.keys()


@pytest.mark.parametrize("runs", ["tp = 1", "tp = 2\npp = 4", "tp = 4\npp = 2\nvirtual_stages = 4", "zero_stage = 3"])
def test_no_interval_means_more_than_the_peak_of_the_device(tmp_path, runs):
    planned = job(tmp_path, runs, model="llama3-8b", cluster="8xdgx-a100-80", global_batch=256, sequence=4096)
    work = planned.work
    least_us = work.flops / work.peak_flops_per_s * 1e6
    prediction = planned.predict(Plan())
    assert least_us <= prediction.interval_us[0] <= prediction.iteration_us
    faster = planned.under(planned.job.scenario(["compute=0.5"]))[0]
    assert least_us / 2 <= faster.predict(Plan()).interval_us[0] <= least_us * 1.5


def test_the_prediction_lies_in_its_interval(split):
    prediction = split.predict(Plan())
    low, high = prediction.interval_us
    assert 0 < low <= prediction.iteration_us <= high
    assert "published runs" in split.calibration.text


def test_mfu_and_tokens_follow_from_the_step(split):
    work = split.work
    assert work.tokens == 64 * 4096
    six_n = 6 * parameters_of(published("llama3-8b")) * work.tokens / 16
    assert work.flops == pytest.approx(six_n, rel=0.1)


@pytest.mark.parametrize(
    ("change", "faster"),
    [("compute=0.5", True), ("communication=0", True), ("bandwidth=2", True), ("compute=2", False), ("rate=10gbit", False)],
)
def test_speeds_change_the_step(split, change, faster):
    assert (asked(split, change).iteration_us < split.predict(Plan()).iteration_us) == faster


def test_fewer_ranks_take_longer(split):
    assert asked(split, "ranks=8").iteration_us > 1.8 * split.predict(Plan()).iteration_us


def test_dp_follows_where_another_degree_changes(split):
    assert asked(split, "tp=4") == split.predict(Plan.of(tp=4))
    assert split.space.strategy(Plan.of(tp=4)).dp == 2


def test_an_impossible_plan_is_refused_with_the_nearest_legal_value(split):
    with pytest.raises(InputError, match="tp 3 x pp 2 x cp 1 = 6 do not divide 16 devices: use tp 2"):
        split.predict(Plan.of(tp=3))


def test_a_load_of_experts_below_balance_is_refused(split):
    with pytest.raises(InputError, match="expert_load must be at least 1"):
        split.predict(Plan.of(expert_load=0.0))


def test_a_plan_leaves_out_what_follows_from_another_zero_stage(tmp_path):
    kept = job(tmp_path, "tp = 1\nzero_stage = 3\nreshard = false\nprefetch_layers = 2")
    changed = kept.space.strategy(Plan.of(zero_stage=1))
    assert (changed.reshard, changed.prefetch_layers) == (True, 1)
    assert kept.space.plan(changed) == Plan.of(zero_stage=1)


def test_a_plan_that_repeats_today_is_the_empty_one(split):
    today = settings_of(split.space.today).settings
    assert split.space.simplest(Plan.of(**today)) == Plan()


def test_what_does_not_fit_says_so_with_the_fastest_change_that_does(tmp_path):
    opened_job = job(tmp_path, "tp = 1\nzero_stage = 0", cluster="1xhgx-h100")
    facts = opened_job.job.plan_facts(opened_job, Plan())
    assert facts.infeasible.startswith("needs ")
    for row in facts.remedies:
        plan = Plan.of(**{name: _value(value) for name, _, value in (part.partition("=") for part in row.change.split(","))})
        assert opened_job.predict(plan).infeasible is None
    times = [row.predicted_iteration_us for row in facts.remedies]
    assert times == sorted(times)
    assert "does not fit" in facts.notes[0]


def _value(text):
    return int(text) if text.isdigit() else text


def test_where_no_small_change_fits_nothing_is_promised(tmp_path):
    here = job(tmp_path, "tp = 1", model="llama3-405b", cluster="1xhgx-h100", global_batch=8)
    facts = here.job.plan_facts(here, Plan())
    assert facts.remedies == ()
    assert "no change of one or two settings is enough" in facts.notes[0]


@pytest.mark.parametrize("framework", ["megatron-core", "megatron-deepspeed", "fsdp", "nanotron", "pytorch"])
def test_no_step_is_shorter_than_its_bounds(tmp_path, framework):
    opened_job = job(tmp_path, None, framework=framework, model="gpt2-medium", cluster="1xhgx-h100", sequence=2048, global_batch=32)
    steps = prepared(opened_job).prices
    order = list(ranked(opened_job.space.candidates, steps))
    assert [bound_us for _, bound_us in order] == sorted(bound_us for _, bound_us in order)
    assert {strategy.schedule for strategy, _ in order} == {*FRAMEWORKS[framework].schedules, Schedule.ONE_F_ONE_B}
    for strategy, bound_us in order[:: max(len(order) // 30, 1)]:
        assert steps.replayed_us(strategy) >= bound_us * (1 - 1e-9)


@pytest.mark.parametrize("framework", ["megatron-core", "pytorch-gloo"])
def test_zero_2_exchanges_the_gradients_of_every_micro_batch(tmp_path, framework):
    settings = {"model": "gpt2-medium", "cluster": "2xhgx-h100", "sequence": 1024, "global_batch": 64}
    opened_job = job(tmp_path, "zero_stage = 2\ntp = 1", framework=framework, **settings)
    steps = prepared(opened_job).prices
    for micro_batch in (1, 2, 4):
        once, every = (replace(opened_job.space.today, micro_batch=micro_batch, zero_stage=stage) for stage in (1, 2))
        assert steps.replayed_us(every) >= least_us(steps.costs(every), every) * (1 - 1e-9)
        one_micro_batch = every.micro_batches == 1
        reduce_us = sum(layer.reduce_us for layer in steps.costs(every).stages[0])
        more_us = steps.replayed_us(every) - steps.replayed_us(once)
        if framework == "pytorch-gloo":  # nothing hides there
            assert more_us == pytest.approx((every.micro_batches - 1) * reduce_us, abs=1e-6)
        else:
            assert abs(more_us) < 1e-6 if one_micro_batch else more_us > 0


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2-medium", "mixtral-8x7b"])
def test_what_strategies_share_changes_no_prediction(tmp_path, model):
    """Costs that were found for other strategies are those that each would find alone."""
    opened_job = job(tmp_path, None, model=model, sequence=1024)
    every = list(opened_job.space.candidates)
    for strategy in every[:: max(len(every) // 25, 1)]:
        alone = StepPrices(prepared(opened_job).prices.workload)
        assert prepared(opened_job).prices.costs(strategy) == alone.costs(strategy)
        assert prepared(opened_job).prices.memory(strategy) == peak_memory(alone.workload_of(strategy))


@every_case("runs", ["tp = 1", "tp = 2\npp = 4", "tp = 1\npp = 4\nvirtual_stages = 2", "tp = 8\npp = 2\nrecompute = 'full'"])
@every_case("framework", ["megatron-core", "megatron-deepspeed", "fsdp"])
def test_of_many_micro_batches_a_few_are_replayed(tmp_path, runs, framework):
    opened_job = job(tmp_path, runs, framework=framework, model="gpt2-medium", sequence=1024, global_batch=2048)
    strategy = opened_job.space.today
    assert prepared(opened_job).prices.step_us(strategy) == pytest.approx(
        prepared(opened_job).prices.replayed_us(strategy), rel=1e-3
    )


def test_every_candidate_is_legal_uses_all_devices_and_has_a_plan(split):
    for strategy in list(split.space.candidates)[::97]:
        assert strategy.devices == 16
        plan = split.space.plan(strategy)
        assert split.space.refusal(plan) is None
        assert split.space.strategy(plan) == strategy


@pytest.mark.parametrize("limit_gib", [80, 9])
def test_the_search_finds_the_best_of_all_plans(tmp_path, few_layers, limit_gib):
    """The model has six layers, on eight devices, with much memory, and with so little that some layers are recomputed."""
    opened_job = job(tmp_path, "tp = 1", model=few_layers, cluster="1xhgx-h100", global_batch=32, sequence=2048)
    opened_job.memory_limit_bytes = limit_gib * 2**30
    every = list(opened_job.space.candidates)
    fits = [
        strategy
        for strategy in every
        if prepared(opened_job).prices.memory(strategy).total_bytes <= limit_bytes(opened_job, prepared(opened_job))
    ]
    best_us = min(prepared(opened_job).prices.step_us(strategy) for strategy in fits)
    result = run_search(opened_job.objective(), trials=300, out=tmp_path / "run", trace_digest="x")
    assert result.stopped == "complete"
    assert result.plans[0].prediction.iteration_us <= best_us * 1.01
    assert result.trials < len(fits) / 5


def test_a_search_under_a_memory_limit_keeps_it(small, tmp_path):
    limited = small.limited_to(small.predict(Plan()).peak_memory_bytes * 2 // 3)
    result = run_search(limited.objective(), trials=50, out=tmp_path / "run", trace_digest="x")
    assert all(ranked.prediction.peak_memory_bytes <= limited.memory_limit_bytes for ranked in result.plans)


def test_another_cluster_has_its_own_memory(tmp_path):
    """A plan that fits on devices of 80 GB may not on those of 40."""
    opened_job = job(tmp_path, "tp = 1", model="llama3-8b", cluster="2xdgx-a100-80")
    assert opened_job.predict(Plan()).infeasible is None
    job_on_smaller, plan = opened_job.under(Scenario().on("2xdgx-a100-40"))
    assert job_on_smaller.predict(plan).infeasible is not None


def test_a_job_can_begin_with_a_plan(split):
    changed_job, _ = split.under(Scenario(begins_with=Plan.of(tp=4)))
    assert changed_job.predict(Plan()) == split.predict(Plan.of(tp=4))
    assert changed_job.space.today == split.space.strategy(Plan.of(tp=4))


def test_the_best_plan_is_explained(split):
    said = split.objective().reasons([Plan.of(tp=1, pp=1), Plan(), Plan.of(tp=8, pp=1)])
    assert any("longer than plan 1: it loses" in sentence for sentence in said)


def test_moves_of_samplers_are_legal(split):
    rng = np.random.default_rng(0)
    plan, moved = Plan(), set()
    for _ in range(30):
        plan = split.space.propose(plan, rng)
        assert split.space.refusal(plan) is None
        moved.add(plan)
    assert len(moved) > 5


def test_every_setting_is_described_in_words():
    for name in ParallelSettings.__struct_fields__:
        assert name in ParallelSettings.words


def test_a_diagnosis_ranks_changes_that_can_be_asked(split):
    facts = msgspec.to_builtins(split.diagnose())
    asked_for = {row["what_if"]: row["predicted_iteration_us"] for row in facts["gains"]}
    assert {"compute=0.9", "communication=0", "bandwidth=2"} <= asked_for.keys()
    assert all(row["gain_us"] > 0 for row in facts["gains"])
    for text, us in list(asked_for.items())[:5]:
        assert asked(split, text).iteration_us == pytest.approx(us)


def test_gpt2_of_proteus(tmp_path):
    """GPT-2 on 32 GPUs, tp 4 x dp 8 (Duan et al. 2024, table 5): a plan like any other."""
    opened_job = job(tmp_path, "tp = 4", model="gpt2-medium", cluster="4xhgx-h100", sequence=1024, global_batch=256)
    assert opened_job.space.today == Strategy(dp=8, tp=4, zero_stage=1, sequence_parallel=True, global_batch=256, micro_batch=1)
    assert opened_job.predict(Plan()).iteration_us > 0


ALL_SETTINGS = {
    "dp_replicate": 2,
    "stage_layers": (7, 9, 9, 7),
    "cp_ring": True,
    "cp_balanced": False,
    "recompute": "full",
    "recompute_layers": 3,
    "gradient_dtype": "bf16",
}


def test_a_plan_can_say_all_that_a_strategy_can(tmp_path):
    opened_job = job(tmp_path, "tp = 1\npp = 4\ncp = 2")
    strategy = opened_job.space.strategy(Plan.of(**ALL_SETTINGS))
    assert (strategy.dp_replicate, strategy.stage_layers, strategy.cp_ring) == (2, (7, 9, 9, 7), True)
    assert (strategy.cp_balanced, strategy.recompute_layers, strategy.gradient_dtype) == (False, 3, "bf16")
    plan = opened_job.space.plan(strategy)
    assert plan == Plan.of(**ALL_SETTINGS)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("runs", "change", "parts"),
    [
        ("tp = 1\nzero_stage = 3", "reshard=0", {"gathered": 1}),
        ("tp = 1\nzero_stage = 3", "prefetch_layers=3", {"gathered": 1}),
        ("tp = 1", "dp_replicate=4", {"optimizer": 1}),
        ("tp = 1", "gradient_dtype=bf16", {"gradients": -1}),
        ("tp = 1", "recompute=full,recompute_layers=8", {"activations": -1}),
        ("tp = 1\nrecompute = 'full'", "recompute_layers=8", {"activations": 1}),
    ],
)
def test_what_a_setting_does_to_memory(tmp_path, runs, change, parts):
    opened_job = job(tmp_path, runs)
    changed_job, plan = opened_job.under(opened_job.job.scenario([change]))
    before, after = (
        opened_job.job.plan_facts(opened_job, Plan()).memory_bytes,
        changed_job.job.plan_facts(changed_job, plan).memory_bytes,
    )
    for part, sign in parts.items():
        assert (after[part] - before[part]) * sign > 0


def test_some_layers_are_recomputed_between_none_and_all(tmp_path):
    opened_job = job(tmp_path, "tp = 1")
    times = [
        opened_job.predict(plan).iteration_us
        for plan in (Plan(), *(Plan.of(recompute="full", recompute_layers=k) for k in (8, 24, 0)))
    ]
    assert times == sorted(set(times))
    eighth, all_of_it = times[1] - times[0], times[3] - times[0]
    assert eighth == pytest.approx(all_of_it / 4, rel=0.05)


def test_the_load_of_experts_is_kept_by_a_search(tmp_path):
    opened_job = job(tmp_path, "ep = 8\nexpert_load = 1.5", model="mixtral-8x7b", cluster="4xhgx-h100")
    even = job(tmp_path, "ep = 8", model="mixtral-8x7b", cluster="4xhgx-h100")
    assert opened_job.predict(Plan()).iteration_us > 1.05 * even.predict(Plan()).iteration_us
    assert {strategy.expert_load for strategy in opened_job.space.candidates.shapes()} == {1.5}


@pytest.mark.parametrize("framework", ["nanotron", "tensorflow"])
def test_a_search_proposes_only_what_the_framework_has(tmp_path, framework):
    opened_job = job(tmp_path, None, framework=framework, model="gpt2-medium", sequence=4096, global_batch=64)
    every = list(opened_job.space.candidates)
    assert {strategy.schedule for strategy in every} == {Schedule.ONE_F_ONE_B}
    assert not any(each.cp_ring or each.stage_layers or each.dp_replicate > 1 or each.recompute_layers for each in every)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-v"])
def test_balanced_stages_are_the_best_of_all(schedule):
    """Of all ways to cut nine layers into four stages, beside an embedding and a head."""
    schedule, ranks = Schedule(schedule), 2 if schedule == "zero-bubble-v" else 4
    pairs = [(0, 3), (1, 2)] if ranks == 2 else [(0,), (1,), (2,), (3,)]

    def busiest(counts):
        work = [count * 10.0 + {0: 4.0, 3: 23.0}.get(stage, 0.0) for stage, count in enumerate(counts)]
        return max(sum(work[stage] for stage in rank_stages) for rank_stages in pairs)

    every = [c for c in itertools.product(range(10), repeat=4) if sum(c) == 9 and min(c[1:3]) > 0]
    layers = balanced_layers(9, 10.0, 4.0, 23.0, ranks=ranks, per_rank=4 // ranks, schedule=schedule)
    assert sum(layers) == 9
    assert busiest(layers) == min(map(busiest, every))


def test_a_balanced_pipeline_is_faster_than_an_even_one(tmp_path):
    opened_job = job(tmp_path, "tp = 1\npp = 4")
    even = opened_job.space.today
    cut = replace(even, stage_layers=balanced_cut(prepared(opened_job).prices, even))
    assert cut.stage_layers[-1] < 8
    assert prepared(opened_job).prices.step_us(cut) < 0.97 * prepared(opened_job).prices.step_us(even)


def test_a_search_recomputes_no_more_than_memory_asks_for(tmp_path):
    opened_job = job(tmp_path, "tp = 1", cluster="2xhgx-h100")
    opened_job.memory_limit_bytes = 50 * 2**30
    plan, _ = next(
        each
        for each in ranked(opened_job.space.candidates, prepared(opened_job).prices, limit_bytes(opened_job, prepared(opened_job)))
        if each[0].recompute_layers
    )
    assert plan.recompute is Recompute.FULL
    fewer = replace(
        plan, recompute_layers=plan.recompute_layers - 1, recompute=Recompute.FULL if plan.recompute_layers > 1 else Recompute.NONE
    )
    assert (
        prepared(opened_job).prices.memory(plan).total_bytes
        <= limit_bytes(opened_job, prepared(opened_job))
        < prepared(opened_job).prices.memory(fewer).total_bytes
    )


def test_an_order_is_certain_or_not_by_what_bounds_the_plans():
    """Published pairs with a gap of 25 % that the device bounds were nearly all in order, those between hosts less often."""
    assert doubt(1.0, 1.25, Domain.DEVICE) == ""
    assert "not certain" in doubt(1.0, 1.15, Domain.TENSOR_BETWEEN_HOSTS)
    device, between = (accuracy().order_is_right(1.0, 1.25, each) for each in (Domain.DEVICE, Domain.TENSOR_BETWEEN_HOSTS))
    assert between < device
    for domain in Domain:
        shares = [accuracy().order_is_right(1.0, 1 + gap, domain) for gap in accuracy().gaps]
        assert shares == sorted(shares)
        assert shares[0] >= 0.5
