"""The known optimum: all plans evaluated, and dynamic programming where that is exact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from bus_objective import BusObjective, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fusion_objective import FusionObjective
from benchmarks.optimum import all_groupings, contiguous_groupings, costs_us, horovod_plans, serial_optimum
from benchmarks.search_jobs import replicated
from dpro_search.errors import InputError
from dpro_search.space.data_parallel import DataParallelJob, layered_step
from dpro_search.space.plan import Plan
from dpro_search.space.replay_graph import OrderPolicy
from dpro_search.space.tensorflow.fusion_moves import canonical

BELL = (1, 1, 2, 5, 15, 52, 203)


@pytest.mark.parametrize("count", range(1, 7))
def test_groupings_are_all_there_once(count: int) -> None:
    names = tuple("abcdef"[:count])
    position = {name: i for i, name in enumerate(names)}
    partitions = {canonical(grouping, position) for grouping in all_groupings(names)}
    assert len(partitions) == len(list(all_groupings(names))) == BELL[count]
    contiguous = set(contiguous_groupings(names))
    assert len(contiguous) == 2 ** (count - 1)
    assert contiguous <= partitions


def test_cycle_times_are_those_that_samplers_propose() -> None:
    cycles_us = {plan.get("cycle_time_us") for plan in horovod_plans([])}
    assert {None, 500.0, 510.0, 9900.0, 10_000.0, 11_000.0, 50_000.0} <= cycles_us
    assert len(cycles_us) == 182


def test_several_processes_find_the_prices_of_one() -> None:
    objective = BusObjective(tensors_of([4000, 8000, 1000, 20_000]))
    plans = [Plan(tensor_groups=grouping) for grouping in all_groupings(("g0", "g1", "g2", "g3"))]
    assert costs_us(objective, plans, workers=2) == costs_us(objective, plans)


def serial_job(sizes: list[int], backward_us: list[int], *, latency_us: float) -> DataParallelJob:
    step = layered_step(sizes, forward_us=10.0, backward_us=backward_us, update_us=[3.0 + size / 500 for size in sizes])
    in_program = replace(step, policy=np.array([int(OrderPolicy.PROGRAM)]))
    return replicated(in_program, 3, latency_us=latency_us, us_per_byte=0.02)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 60)), min_size=1, max_size=7),
    st.sampled_from([0.0, 5.0, 40.0]),
)
def test_dynamic_programming_finds_the_best_of_all_groups_of_neighbours(tensors: list[tuple[int, int]], latency_us: float) -> None:
    job = serial_job([size for size, _ in tensors], [us for _, us in tensors], latency_us=latency_us)
    predictor = FusionObjective(job)
    names = tuple(tensor.name for tensor in predictor.tensors)
    all_us = costs_us(predictor, (Plan(tensor_groups=grouping) for grouping in contiguous_groupings(names)))
    optimum = serial_optimum(job)
    assert optimum.iteration_us == pytest.approx(min(all_us.values()), rel=1e-12)
    plan = Plan(tensor_groups=tuple(tuple(names[tensor] for tensor in group) for group in optimum.groups))
    assert all_us[plan] == pytest.approx(optimum.iteration_us, rel=1e-12)


def test_jobs_that_it_cannot_solve_are_refused() -> None:
    step = layered_step([100.0, 200.0], forward_us=10.0, backward_us=5.0, update_us=1.0)
    with pytest.raises(InputError, match="one stream in program order"):
        serial_optimum(replicated(step, 2, latency_us=0.0, us_per_byte=0.01))
    job = serial_job([100, 200], [5, 6], latency_us=1.0)
    with pytest.raises(InputError, match="ranks that are alike"):
        serial_optimum(replace(job, compute_factor=np.array([1.0, 1.0, 2.0])))
