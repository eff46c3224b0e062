"""`StepPrices`: the prices of a model's steps under one strategy after another: passes, whole steps, memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TypeVar

from dpro_search.parallel.costs.domain import Domain, domain_of
from dpro_search.parallel.costs.pricer import OpTime, Pricer, passes_key
from dpro_search.parallel.costs.recorded import RankWork
from dpro_search.parallel.costs.scales import Scales
from dpro_search.parallel.costs.step_end import StepEnd
from dpro_search.parallel.legality import check_strategy
from dpro_search.parallel.memory.peak import PeakMemory, fits, mean_state_bytes, peak_memory
from dpro_search.parallel.model import Block
from dpro_search.parallel.schedule import Schedule, stages_on
from dpro_search.parallel.steps.pipeline import pipeline_orders
from dpro_search.parallel.steps.step_costs import LayerCosts, StepCosts
from dpro_search.parallel.steps.step_graph import step_graph
from dpro_search.parallel.steps.step_graph import step_us as graph_step_us
from dpro_search.parallel.strategy import Strategy
from dpro_search.parallel.workload import SharedResults, Workload, ranks_of, stages_of
from dpro_search.space.replay_graph import ReplayGraph

_FOLDED = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED)
_FEW = 12  # micro-batches for each rank of a pipeline, from which on a few are replayed for all
_SAME = 1e-9  # times that differ by less, relatively, are equal
_SHORT = 1e-3  # of the time of a micro-batch
_FILLED = 2  # micro-batches for each rank of a pipeline, with which it is full


Price = TypeVar("Price")


class StepPrices:
    """Prices of one workload's steps; those that strategies have in common are computed once.

    Parameters
    ----------
    workload
        Its own strategy does not matter, its scales hold for all predictions.
    known
        Of the same workload.
    """

    def __init__(self, workload: Workload, known: SharedResults | None = None) -> None:
        self.workload, self._known = workload, known or SharedResults()
        self._scaled: dict[Scales, StepPrices] = {}
        self._passes: dict[Hashable, dict[str, LayerCosts]] = {}
        self._step_us: dict[Strategy, float] = {}

    def workload_of(self, strategy: Strategy) -> Workload:
        """The workload under a strategy."""
        return replace(self.workload, strategy=strategy)

    def scaled(self, scales: Scales) -> StepPrices:
        """The same with parts that take another time."""
        if scales not in self._scaled:
            self._scaled[scales] = StepPrices(replace(self.workload, scales=scales), replace(self._known, passes={}))
        return self._scaled[scales]

    def costs(self, strategy: Strategy) -> StepCosts:
        """Costs of the parts of a step."""
        return step_costs(self.workload_of(strategy), self._known)

    def stages(self, strategy: Strategy) -> tuple[tuple[Block, ...], ...]:
        """Blocks of each stage."""
        return stages_of(self.workload_of(strategy), self._known)

    def passes(self, strategy: Strategy) -> dict[str, LayerCosts]:
        """Costs of the passes of each kind of block, by its name, without the exchanges between replicas.

        They are computed once for all strategies that have the same.
        """
        key = passes_key(self.workload_of(strategy), strategy.recompute)
        if key not in self._passes:
            self._passes[key] = dict(sorted(self._of_blocks(strategy, Pricer.passes).items()))
        return self._passes[key]

    def rank_work(self, strategy: Strategy) -> dict[str, RankWork]:
        """Time of a rank's own work for each kind of block, by its name."""
        return self._of_blocks(strategy, Pricer.rank_work)

    def op_times(self, strategy: Strategy) -> dict[str, tuple[OpTime, ...]]:
        """Modelled times of the ops of each kind of block, by its name, without communication."""
        return self._of_blocks(strategy, Pricer.op_times)

    def _of_blocks(self, strategy: Strategy, price: Callable[[Pricer, Block], Price]) -> dict[str, Price]:
        """A price of each kind of block, by its name."""
        pricer = Pricer(self.workload_of(strategy), self._known)
        distinct = {block.name: block for stage in self.stages(strategy) for block in stage}
        return {name: price(pricer, block) for name, block in distinct.items()}

    def stages_on(self, strategy: Strategy, rank: int) -> tuple[int, ...]:
        """Stages of a pipeline rank."""
        return stages_on(strategy.schedule, rank, strategy.pp, strategy.virtual_stages)

    def graph(self, strategy: Strategy) -> ReplayGraph:
        """One step, a rank for each stage of the pipeline."""
        orders = pipeline_orders(strategy.schedule, strategy.pp, strategy.virtual_stages, strategy.micro_batches)
        return step_graph(self.costs(strategy), orders)

    def step_us(self, strategy: Strategy) -> float:
        """The time of a step: from its first forward pass to the last optimizer update.

        Of many micro-batches a few are replayed (`_continued_us`).
        """
        if strategy not in self._step_us:
            count, costs, continued_us = strategy.micro_batches, self.costs(strategy), None
            if strategy.schedule in _FOLDED and count > _FEW * strategy.pp:
                continued_us = self._continued_us(costs, strategy, count)
            self._step_us[strategy] = self._replayed_us(costs, strategy, count) if continued_us is None else continued_us
        return self._step_us[strategy]

    def replayed_us(self, strategy: Strategy) -> float:
        """The same with all micro-batches."""
        return self._replayed_us(self.costs(strategy), strategy, strategy.micro_batches)

    def _continued_us(self, costs: StepCosts, strategy: Strategy, count: int) -> float | None:
        """The time of a step with many micro-batches, from that of few; None: they do not tell.

        A full pipeline takes longer for each further micro-batch, by the work of some rank or of a circle through several, and the
        longer it runs the more by the busiest: the time is a maximum of lines in the number of micro-batches, so it is convex. It
        is continued as a straight line where that changes it by at most `_SHORT`.
        """
        start = more = max(strategy.pp, 2)
        first, second = (self._replayed_us(costs, strategy, start + times * more) for times in (0, 1))
        before_us, busiest_us = (second - first) / more, _busiest_us(costs, strategy.pp)
        if abs(busiest_us - before_us) <= _SAME * busiest_us and strategy.pp > 1:
            return second + (count - start - more) * before_us
        third = self._replayed_us(costs, strategy, start + 2 * more)
        each_us = (third - second) / more
        steady = abs(each_us - before_us) <= _SHORT * each_us and busiest_us - each_us <= _SHORT * each_us
        return third + (count - start - 2 * more) * each_us if steady else None

    @staticmethod
    def _replayed_us(costs: StepCosts, strategy: Strategy, micro_batches: int) -> float:
        return graph_step_us(costs, strategy.schedule, strategy.pp, strategy.virtual_stages, micro_batches)

    def domain(self, strategy: Strategy) -> Domain:
        """The facts that the error of the prediction depends on."""
        return domain_of(self.workload_of(strategy), self._known)

    def memory(self, strategy: Strategy) -> PeakMemory:
        """Memory of the rank that holds most."""
        return peak_memory(self.workload_of(_while_it_fills(strategy)), self._known)

    def fits(self, strategy: Strategy, limit_bytes: float) -> bool:
        """Whether no rank holds more than a limit."""
        return fits(self.workload_of(_while_it_fills(strategy)), limit_bytes, self._known)

    def least_memory_bytes(self, strategy: Strategy) -> float:
        """A bound on that, of what does not depend on the schedule, the layers of each stage and recomputation."""
        return mean_state_bytes(self.workload_of(strategy), self._known)


def _while_it_fills(strategy: Strategy) -> Strategy:
    """The strategy with as few micro-batches as show its peak of memory.

    A pipeline holds no more micro-batches at a time than while it fills, so that twice its ranks stand for any number; only with
    GPipe all are held.
    """
    most = _FILLED * strategy.pp
    if strategy.schedule is Schedule.GPIPE or strategy.micro_batches <= most:
        return strategy
    return replace(strategy, global_batch=most * strategy.dp * strategy.micro_batch)


def _busiest_us(costs: StepCosts, ranks: int) -> float:
    """Passes of a micro-batch on the rank that has most to do."""
    stages = [sum(layer.forward_us + layer.backward_us for layer in stage) for stage in costs.stages]
    return max(sum(stages[rank::ranks]) for rank in range(ranks))


def step_us(workload: Workload) -> float:
    """The time of one workload's step; raises `InputError` where the strategy is impossible."""
    check_strategy(workload.strategy, workload.model, workload.sequence)
    return StepPrices(workload).step_us(workload.strategy)


def step_costs(workload: Workload, known: SharedResults | None = None) -> StepCosts:
    """Costs of the parts of a step."""
    known = known or SharedResults()
    strategy, pricer = workload.strategy, Pricer(workload, known)
    end = StepEnd(workload, known, pricer)
    stages = stages_of(workload, known)
    stream = strategy.micro_batch * workload.sequence * workload.model.hidden / strategy.cp
    sent_bytes = stream * workload.element_bytes / (strategy.tp if strategy.sequence_parallel else 1)
    return StepCosts(
        stages=tuple(pricer.stage(stage) for stage in stages),
        send_us=workload.scales.between * pricer.groups.send_us(sent_bytes),
        update_us=tuple(end.update_us(blocks) for blocks in ranks_of(workload, known)),
        tied_us=end.tied_us(),
        copies=strategy.copies,
        copies_us=end.copies_us(),
        shared_us=end.shared_us(),
        norm_us=end.norm_us(),
        gathers_every_pass=strategy.zero_stage == 3 and (strategy.reshard or not workload.reduces_once),
        regather=strategy.reshard,
        reduces_every_pass=strategy.zero_stage >= 2 and not workload.reduces_once,
        prefetch=strategy.prefetch_layers,
        overlap=_reduces_beside(workload),
        overlap_gathers=workload.runtime.overlap_gathers,
        slowed=pricer.slowed,
        overlap_send=workload.runtime.overlap_sends,
        blocking=workload.runtime.blocking,
        receives=workload.runtime.blocking and strategy.schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED),
        cores=_cores(workload),
    )


def _reduces_beside(workload: Workload) -> bool:
    """Whether gradients are reduced beside the last backward pass."""
    split = workload.strategy.zero_stage in (1, 2)
    return workload.runtime.overlap_gradients and (workload.runtime.overlap_split_gradients or not split)


def _cores(workload: Workload) -> tuple[tuple[int, int], ...]:
    """The core of the first rank of each pipeline stage, and how many ranks of the stage compute on that core."""
    ranks, stages = workload.strategy.devices, workload.strategy.pp
    if not 0 < workload.cores < ranks:
        return ()
    each, ranks_on_core = ranks // stages, []
    for first in range(0, ranks, each):
        core = first % workload.cores
        ranks_on_core.append((core, sum(rank % workload.cores == core for rank in range(first, first + each))))
    return tuple(ranks_on_core)
