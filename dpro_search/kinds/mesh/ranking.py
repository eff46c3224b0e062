"""`ranked`: strategies that fit in memory in the order of bounds on their steps, most of them without a look at their details.

Each strategy has a coarse bound, of its passes alone, which many strategies share in parts. One whose turn comes gets the bound of
all its costs and waits again; one whose turn comes a second time must fit in memory.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError
from dpro_search.kinds.mesh.candidates import least_us
from dpro_search.replay.parallel_step import ParallelSteps
from dpro_search.space.mesh import Strategy


def ranked(
    strategies: Iterable[Strategy], steps: ParallelSteps, fits: Callable[[Strategy], bool]
) -> Iterator[tuple[Strategy, float]]:
    """Strategies, with a time that their step cannot be below, the least first; those that do not fit are left out."""
    coarse = _Coarse(steps)
    waiting: list[tuple[float, int, bool, Strategy]] = []
    for number, strategy in enumerate(strategies):
        try:
            waiting.append((coarse.passes_us(strategy), number, False, strategy))
        except InputError:  # a group does not fit on the cluster
            continue
    heapq.heapify(waiting)
    while waiting:
        bound_us, number, fine, strategy = heapq.heappop(waiting)
        if not fine:
            try:
                fine_us = least_us(steps.costs(strategy), strategy)
            except InputError:
                continue
            heapq.heappush(waiting, (max(fine_us, bound_us), number, True, strategy))
        elif fits(strategy):
            yield strategy, bound_us


class _Coarse:
    """Bounds from the passes of blocks, which depend on few settings."""

    def __init__(self, steps: ParallelSteps) -> None:
        self._steps = steps
        self._passes: dict[object, tuple[Floats, Floats]] = {}  # of each block, forward and backward
        self._stages: dict[int, Floats] = {}  # how many of each block each stage has, [stages, blocks]

    def passes_us(self, strategy: Strategy) -> float:
        """The rank that has most to do, from the first forward pass on, until the last gradient is back at the first stage."""
        forward_us, backward_us = (self._blocks(strategy) @ each for each in self._blocks_us(strategy))
        ranks = strategy.pp
        busy_us = strategy.micro_batches * (forward_us + backward_us).reshape(-1, ranks).sum(axis=0)
        around_us = np.cumsum((forward_us + backward_us)[:ranks]) - (forward_us + backward_us)[:ranks]
        return float((busy_us + around_us).max())

    def _blocks_us(self, strategy: Strategy) -> tuple[Floats, Floats]:
        plan = strategy
        pipeline = plan.pp if self._steps.workload.calibration.send_rank_us else plan.pp > 1  # which has a copy of a tied embedding
        key = plan.tp, plan.cp, plan.ep, plan.etp, plan.sequence_parallel, plan.micro_batch, plan.recompute, pipeline
        if key not in self._passes:
            layers = self._steps.layers(strategy).values()
            self._passes[key] = (
                np.array([layer.forward_us for layer in layers]),
                np.array([layer.backward_us for layer in layers]),
            )
        return self._passes[key]

    def _blocks(self, strategy: Strategy) -> Floats:
        count = strategy.pp * strategy.virtual_stages
        if count not in self._stages:
            names = list(self._steps.layers(strategy))
            found = [Counter(block.name for block in stage) for stage in self._steps.stages(strategy)]
            self._stages[count] = np.array([[stage[name] for name in names] for stage in found], np.float64)
        return self._stages[count]
