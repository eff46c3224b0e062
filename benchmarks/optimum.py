"""The optimal plan, for jobs that are small or simple enough: the reference for samplers.

========================  =================================================================================================== all
plans                 evaluated one by one: any grouping up to about 8 tensors (Bell's number), neighbours up to about 12
(2^(n-1)) `serial_optimum`          neighbours, any number of tensors: dynamic programming where collectives run one after the
other ========================
===================================================================================================
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import NamedTuple

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError
from dpro_search.search.evaluation import Losses
from dpro_search.search.objective import Objective
from dpro_search.search.workers import ProcessEvaluator
from dpro_search.space.data_parallel import DataParallelJob, RankStep
from dpro_search.space.data_parallel_graph import rank_classes
from dpro_search.space.plan import Plan
from dpro_search.space.replay_graph import OrderPolicy
from dpro_search.space.tensorflow.fusion_moves import Grouping
from dpro_search.space.transformations.horovod import CYCLE_RANGE_US, rounded_cycle_us


def contiguous_groupings(names: tuple[str, ...]) -> Iterator[Grouping]:
    """All ways to cut a sequence, 2^(n - 1)."""
    for cuts in itertools.product((False, True), repeat=len(names) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(names)]
        yield tuple(names[a:b] for a, b in itertools.pairwise(edges))


def all_groupings(names: tuple[str, ...]) -> Iterator[Grouping]:
    """All set partitions: Bell's number of them."""
    if not names:
        yield ()
        return
    for rest in all_groupings(names[1:]):
        yield ((names[0],), *rest)
        for i, group in enumerate(rest):
            yield (*rest[:i], (names[0], *group), *rest[i + 1 :])


def horovod_plans(groupings: Iterable[Grouping]) -> Iterator[Plan]:
    """All settings of Horovod's fusion: groupings or a threshold, and a cycle time, rounded as samplers do."""
    cycles_us = {None} | {rounded_cycle_us(us) for us in np.arange(CYCLE_RANGE_US[0], CYCLE_RANGE_US[1] + 1, 10.0).tolist()}
    thresholds = [None, 0, *(round(2**power) for power in np.arange(16.0, 28.25, 0.5).tolist())]
    known = tuple(groupings)
    for cycle_us in cycles_us:
        for grouping in known:
            yield Plan.of(tensor_groups=grouping, cycle_time_us=cycle_us)
        for threshold in thresholds:
            yield Plan.of(fusion_threshold_bytes=threshold, cycle_time_us=cycle_us)


def costs_us(objective: Objective, plans: Iterable[Plan], workers: int = 1) -> dict[Plan, float]:
    """Predicted iteration time of each distinct plan, evaluated by `workers` processes."""
    distinct = set(plans)
    if workers == 1:
        return {plan: objective.predict(plan).iteration_us for plan in distinct}
    with closing(ProcessEvaluator(objective, workers, Losses())) as evaluator:
        for plan in distinct:
            evaluator.submit(plan)
        evaluated = (evaluator.done() for _ in range(len(distinct)))
        return {plan: prediction.iteration_us for plan, prediction in evaluated}


class SerialOptimum(NamedTuple):
    """The groups of neighbours that end first, in order, and when the iteration ends under them."""

    groups: tuple[tuple[int, ...], ...]
    iteration_us: float


class _State(NamedTuple):
    """Some first tensors in groups: when the last collective ends, when the iteration can end at the earliest, and the last cut."""

    free_us: float
    end_us: float
    cut: int
    before: _State | None


def serial_optimum(job: DataParallelJob) -> SerialOptimum:
    """The best grouping of neighbours in a job whose collectives run one after the other.

    Both when the network is free and what the updates of the groups so far demand of the end of the iteration grow with what they
    were before, and groups that come later change neither. So of two ways to group the first tensors one that is no better in both
    can be dropped (a Pareto front of few states for each number of tensors), and the best of the last front is the optimum.

    Raises
    ------
    InputError
        The job is not of that kind: the line says why.
    """
    step = _serial_step(job)
    (cost,) = job.costs
    ready_us, tail_us, compute_us = _times(step, float(job.compute_factor[0]))
    sizes = job.tensor_bytes
    fronts: list[list[_State]] = [[_State(0.0, compute_us, 0, None)]]
    for last in range(len(sizes)):
        found: list[_State] = []
        size, tail = 0.0, 0.0
        for first in range(last, -1, -1):
            size += float(sizes[first])
            tail = max(tail, float(tail_us[first]))
            work_us = cost.latency_us + size * cost.us_per_byte
            for state in fronts[first]:
                free_us = max(state.free_us, float(ready_us[last])) + work_us
                found.append(_State(free_us, max(state.end_us, free_us + tail), first, state))
        fronts.append(_front(found))
    best: _State | None = min(fronts[-1], key=lambda state: state.end_us)
    assert best is not None
    end_us, stop, groups = best.end_us, len(sizes), list[tuple[int, ...]]()
    while best is not None and stop > 0:
        groups.append(tuple(range(best.cut, stop)))
        stop, best = best.cut, best.before
    return SerialOptimum(tuple(reversed(groups)), end_us)


def _front(states: list[_State]) -> list[_State]:
    """Those that no other is at least as good as in both times."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: state[:2]):
        if not kept or state.end_us < kept[-1].end_us:
            kept.append(state)
    return kept


def _serial_step(job: DataParallelJob) -> RankStep:
    """What all ranks do, if collectives run one after the other, and updates in one order after the backward pass."""
    step = job.steps[0]
    if len(job.costs) > 1:
        raise InputError("dynamic programming needs collectives of one cost")
    if len(job.steps) > 1 or rank_classes(job).max() > 0:
        raise InputError("dynamic programming needs ranks that are alike")
    if len(step.policy) != 1 or step.policy[0] != OrderPolicy.PROGRAM:
        raise InputError("dynamic programming needs one stream in program order: updates that overtake depend on all groups")
    if not len(step.maker_op) or (len(step.user_op) and step.maker_op.max() >= step.user_op.min()):
        raise InputError("dynamic programming needs updates that come after all gradients")
    return step


def _times(step: RankStep, factor: float) -> tuple[Floats, Floats, float]:
    """When each tensor is made, and the time from its first user to the end, [tensors]; the time of the step without waiting."""
    duration_us = step.duration_us * factor
    end_us = np.cumsum(duration_us)
    ready_us = np.zeros(len(step.tensor_bytes))
    np.maximum.at(ready_us, step.maker_tensor, end_us[step.maker_op])
    if (np.diff(ready_us) < 0).any():
        raise InputError("dynamic programming needs tensors in the order in which they become ready")
    tail_us = np.zeros(len(step.tensor_bytes))
    np.maximum.at(tail_us, step.user_tensor, (end_us[-1] - end_us + duration_us)[step.user_op])
    return ready_us, tail_us, float(end_us[-1])
