"""`ParallelSteps`: predicted steps of a model under one strategy after another (`space.mesh`)."""

from __future__ import annotations

from dataclasses import replace

from dpro_search.replay.engine import ends_us
from dpro_search.space.mesh import (
    Known,
    PeakMemory,
    Schedule,
    StepCosts,
    Strategy,
    Workload,
    peak_memory,
    pipeline_orders,
    step_costs,
    step_graph,
)
from dpro_search.space.mesh.scales import Scales
from dpro_search.space.replay_graph import ReplayGraph

_FILLED = 2  # micro-batches for each rank of a pipeline, with which it is full


class ParallelSteps:
    """Predictions of one workload; what strategies have in common is found once.

    Parameters
    ----------
    workload
        Its own strategy does not matter, its scales hold for all predictions.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload, self._known = workload, Known()
        self._scaled: dict[Scales, ParallelSteps] = {}

    def under(self, strategy: Strategy) -> Workload:
        """The workload under a strategy."""
        return replace(self.workload, strategy=strategy)

    def scaled(self, scales: Scales) -> ParallelSteps:
        """The same with parts that take another time."""
        if scales not in self._scaled:
            self._scaled[scales] = ParallelSteps(replace(self.workload, scales=scales))
        return self._scaled[scales]

    def costs(self, strategy: Strategy) -> StepCosts:
        """What the parts of a step take."""
        return step_costs(self.under(strategy), self._known)

    def graph(self, strategy: Strategy) -> ReplayGraph:
        """One step, a rank for each stage of the pipeline."""
        orders = pipeline_orders(strategy.schedule, strategy.pp, strategy.virtual_stages, strategy.micro_batches)
        return step_graph(self.costs(strategy), orders)

    def step_us(self, strategy: Strategy) -> float:
        """The time of a step: from its first forward pass to the last optimizer update."""
        return float(ends_us(self.graph(strategy), 1)[0])

    def memory(self, strategy: Strategy) -> PeakMemory:
        """What the rank holds that holds most.

        A pipeline holds no more micro-batches at a time than while it fills, so that twice its ranks stand for any number; only
        with GPipe all are held.
        """
        most = _FILLED * strategy.pp
        if strategy.schedule is not Schedule.GPIPE and strategy.micro_batches > most:
            strategy = replace(strategy, global_batch=most * strategy.dp * strategy.micro_batch)
        return peak_memory(self.under(strategy), self._known)


def step_us(workload: Workload) -> float:
    """The time of one workload's step; raises `InputError` where the strategy is impossible."""
    workload.strategy.check(workload.model, workload.sequence)
    return ParallelSteps(workload).step_us(workload.strategy)
