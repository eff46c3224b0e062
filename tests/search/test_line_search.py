"""Line searches along the grids of outer knobs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from bus_objective import KnobObjective, prediction_of, tensors_of

from dpro_search.search.samplers import sampler_for
from dpro_search.search.samplers._line_search import LineSearchSampler
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.schemes import KvstoreSettings
from dpro_search.space.transformations import Credit, KeySlicing, PlanningFacts, PlanSpace, ServerCount, TensorPartition


class Store:
    """A job with two knobs: the best slices depend on how many servers there are, and slices with priority are better."""

    recorded = None

    def __init__(self) -> None:
        self.tensors = tensors_of([400_000_000, 8_000_000, 100_000])
        values = {"servers": 1, "bigarray_bound": 1_000_000, "p3": False, "slice_threshold": 40_000}
        facts = PlanningFacts(name="a store", tensors=self.tensors, values=values)
        elements = tuple(tensor.size_bytes // 4 for tensor in self.tensors)
        self.space = PlanSpace(facts, (ServerCount(facts), KeySlicing(facts, elements)))

    def predict(self, plan: Plan) -> Prediction:
        self.space.check(plan)
        servers, settings = plan.servers or 1, KvstoreSettings.of(plan)
        size, best = (
            (settings.slice_threshold or 40_000, 300_000) if settings.p3 else (settings.bigarray_bound or 1_000_000, 9_000_000)
        )
        off = abs(math.log(size / (best / servers)))
        return prediction_of(1000.0 + 50 * (servers - 3) ** 2 + 30 * off + (0 if settings.p3 else 40), plan, 0.01)

    def all_us(self) -> list[float]:
        grids = [
            [(choice, grid, index) for grid in choice.grids for index in range(len(choice.grids[grid]))]
            for choice in self.space.choices
        ]
        plans = []
        for parts in itertools.product(*grids):
            plan = Plan()
            for choice, grid, index in parts:
                plan = choice.put(plan, grid, index)
            plans.append(self.space.simplest(plan))
        return [self.predict(plan).iteration_us for plan in plans]


def searched(sampler: LineSearchSampler, job: Store | KnobObjective, asks: int) -> list[tuple[Plan, float]]:
    """Plans in the order in which they were asked for, until one comes again."""
    sampler.observe(Plan(), job.predict(Plan()))
    collected: list[tuple[Plan, float]] = []
    for _ in range(asks):
        proposal = sampler.ask()
        prediction = job.predict(proposal.plan)
        sampler.tell(proposal, prediction)
        if proposal.plan in {Plan(), *(plan for plan, _ in collected)}:
            break
        collected.append((proposal.plan, prediction.iteration_us))
    return collected


def test_two_knobs_are_set_in_a_fraction_of_their_combinations() -> None:
    job = Store()
    trials = searched(LineSearchSampler(job.space, np.random.default_rng(0)), job, 200)
    assert min(us for _, us in trials) == min(job.all_us())
    assert len(trials) < len(job.all_us()) / 3


def test_coarse_points_of_every_grid_come_first() -> None:
    job = Store()
    first = [plan for plan, _ in searched(LineSearchSampler(job.space, np.random.default_rng(0)), job, 11)]
    assert [plan.servers for plan in first[:3]] == [2, 3, 4]
    assert len({plan.get("bigarray_bound") for plan in first[3:]} - {None}) >= 3
    assert {plan.servers for plan in first[3:]} == {3}, "the best so far"


def test_the_choice_with_fewest_points_is_searched_first_whatever_the_order_of_the_choices() -> None:
    job = Ridge()
    few, many = ServerCount(job.space.job), TensorPartition(job.space.job)
    for transformations in ((few, many), (many, few)):
        job.space = PlanSpace(job.space.job, transformations)
        first = [plan for plan, _ in searched(LineSearchSampler(job.space, np.random.default_rng(0)), job, 5)]
        assert [plan.servers for plan in first[:3]] == [1, 3, 4]
        assert all(plan.get("partition_bytes") is not None for plan in first[3:])


def test_a_single_good_value_far_from_other_good_ones_is_found_before_steps_in_two_knobs() -> None:
    job = SingleGoodSize()
    proposed = [plan for plan, _ in searched(LineSearchSampler(job.space, np.random.default_rng(0)), job, 200)]
    before = proposed[: proposed.index(job.best)]
    assert Plan.of(partition_bytes=16_384) in before, "the best of all but the single good size"
    assert not {Plan.of(partition_bytes=24_576, servers=servers) for servers in (1, 3)} & set(before)


def test_a_complete_grid_is_searched_from_the_largest_parts_down() -> None:
    job = SingleGoodSize()
    proposed = [
        plan.get("partition_bytes") for plan, _ in searched(LineSearchSampler(job.space, np.random.default_rng(0)), job, 200)
    ]
    large = [size for size in proposed if size is not None and size > 1_100_000 and size != 5_931_008]  # which is a first point
    assert large[:5] == [8_388_608, 4_194_304, 2_965_504, 2_097_152, 1_482_752]


def test_one_knob_is_set_as_well() -> None:
    job = KnobObjective()
    trials = searched(LineSearchSampler(job.space, np.random.default_rng(0)), job, 30)
    assert min(us for _, us in trials[:12]) == min(us for _, us in trials) < 104_000


def test_a_better_plan_from_elsewhere_is_searched_around() -> None:
    job = Store()
    sampler = LineSearchSampler(job.space, np.random.default_rng(0))
    searched(sampler, job, 200)
    better = Plan.of(servers=2, bigarray_bound=7_000_000)
    sampler.observe(better, prediction_of(1.0, better, 0.01))
    proposal = sampler.ask()
    assert proposal.plan.get("bigarray_bound") == 7_000_000
    assert proposal.plan != better


def test_while_a_line_is_being_evaluated_distinct_neighbours_are_proposed() -> None:
    job = Store()
    sampler = LineSearchSampler(job.space, np.random.default_rng(0))
    sampler.observe(Plan(), job.predict(Plan()))
    proposed = [sampler.ask() for _ in range(12)]
    assert len({proposal.plan for proposal in proposed}) == 12
    for proposal in proposed:
        sampler.tell(proposal, job.predict(proposal.plan))
    assert sampler.ask().plan not in {proposal.plan for proposal in proposed}


@pytest.mark.parametrize("seed", range(3))
def test_without_a_guide_the_portfolio_begins_with_line_searches(seed: int) -> None:
    job = Store()
    sampler = sampler_for(job.space, "auto", seed)
    sampler.observe(Plan(), job.predict(Plan()))
    least_us, origins = math.inf, []
    for _ in range(60):
        proposal = sampler.ask()
        prediction = job.predict(proposal.plan)
        sampler.tell(proposal, prediction)
        origins.append(proposal.origin)
        if len(origins) == 30:
            assert min(least_us, prediction.iteration_us) <= 1.01 * min(job.all_us())
        least_us = min(least_us, prediction.iteration_us)
    assert set(origins[:12]) == {"ladders"}
    assert {"mcmc", "optuna"} < set(origins), "the other samplers get blocks too"


class Ridge:
    """Two knobs that must go together: partitions half as large need one server less; every other step makes it slower."""

    recorded = None
    best = Plan.of(partition_bytes=32_768)

    def __init__(self) -> None:
        self.tensors = tensors_of([8_000_000, 500_000])
        facts = PlanningFacts(
            name="a store", tensors=self.tensors, values={"servers": 2, "partition_bytes": 4_096_000, "credit": 0}
        )
        self.space = PlanSpace(facts, (TensorPartition(facts), ServerCount(facts)))

    def predict(self, plan: Plan) -> Prediction:
        self.space.check(plan)
        halvings = 2 * math.log2((plan.get("partition_bytes") or 4_096_000) / 32_768)
        servers = (plan.servers or 2) - 2
        return prediction_of(1000.0 + 100 * abs(halvings - servers) + 20 * (abs(halvings) + abs(servers)), plan, 0.01)


class SingleGoodSize(Ridge):
    """The same knobs: servers are best as recorded, small partitions are better, and one large size is best of all."""

    best = Plan.of(partition_bytes=2_965_504)

    def predict(self, plan: Plan) -> Prediction:
        self.space.check(plan)
        size_bytes = plan.get("partition_bytes") or 4_096_000
        us = 1000.0 + 20 * math.log2(size_bytes) + 100 * abs((plan.servers or 2) - 2)
        return prediction_of(us - 300 * (size_bytes == self.best.get("partition_bytes")), plan, 0.01)


@pytest.mark.parametrize("start", [Plan.of(partition_bytes=49_152, servers=3), Plan.of(partition_bytes=65_536, servers=4)])
def test_knobs_that_depend_on_each_other_are_stepped_in_together(start: Plan) -> None:
    job = Ridge()
    sampler = LineSearchSampler(job.space, np.random.default_rng(0))
    sampler.observe(start, job.predict(start))
    trials = searched(sampler, job, 100)
    assert min(trials, key=lambda each: each[1])[0] == job.best, "servers as recorded: a step from three, like any other"
    assert len(trials) < 50


def test_steps_in_two_knobs_wait_until_steps_in_one_do_not_help() -> None:
    job = Ridge()
    sampler = LineSearchSampler(job.space, np.random.default_rng(0))
    sampler.observe(job.best, job.predict(job.best))
    proposed = [(plan.get("partition_bytes"), plan.servers) for plan, _ in searched(sampler, job, 100)]
    beside = [proposed.index(plan) for plan in ((24_576, None), (45_056, None), (32_768, 1), (32_768, 3))]
    both = [proposed.index(plan) for plan in ((24_576, 1), (24_576, 3), (45_056, 1), (45_056, 3))]
    assert max(beside) < min(both)


def test_the_grids_through_the_best_plan_are_searched_completely_before_proposals_repeat() -> None:
    job = Ridge()
    sampler = LineSearchSampler(job.space, np.random.default_rng(0))
    proposed = {plan for plan, _ in searched(sampler, job, 100)}
    partitions = {Plan.of(partition_bytes=point["partition_bytes"]) for point in job.space.choices[0].grids["set"]}
    servers = {Plan.of(partition_bytes=32_768, servers=count) for count in (1, 3, 4)}
    assert partitions | servers <= proposed


def test_grids_that_the_best_plan_does_not_use_come_last() -> None:
    job = Store()
    plans = [plan for plan, _ in searched(LineSearchSampler(job.space, np.random.default_rng(0)), job, 200)]
    points = {grid: len(values) for choice in job.space.choices for grid, values in choice.grids.items()}
    bounds = [number for number, plan in enumerate(plans) if plan.get("bigarray_bound") is not None]
    slices = [number for number, plan in enumerate(plans) if plan.get("slice_threshold") is not None]
    assert len({plans[number].get("slice_threshold") for number in slices}) == points["priority"], "none is left out"
    assert len({plans[number].get("bigarray_bound") for number in bounds}) == points["bound"]
    left = plans[max(slices) + 1 :]
    assert left
    assert all(plan.get("bigarray_bound") is not None for plan in left), "slices have priority in the best plan"


def test_a_knob_with_little_effect_gets_no_steps_before_complete_lines() -> None:
    job = Ridge()
    job.space = PlanSpace(job.space.job, (*job.space.transformations, Credit(job.space.job)))
    proposed = [plan for plan, _ in searched(LineSearchSampler(job.space, np.random.default_rng(0)), job, 200)]
    stepped = proposed.index(Plan.of(partition_bytes=45_056, servers=3))
    assert len({plan.get("credit") for plan in proposed[:stepped]} - {None}) == 3, "its first points"
    assert {plan.get("credit") for plan in proposed} == {None, 1, 2, 4, 8, 16, 32}, "in the end all"
