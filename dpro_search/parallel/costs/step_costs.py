"""`step_costs`: costs of the parts of a training step under a strategy on a cluster."""

from __future__ import annotations

from dpro_search.parallel.costs.pricer import Pricer
from dpro_search.parallel.schedule import Schedule
from dpro_search.parallel.steps.step_graph import StepCosts
from dpro_search.parallel.workload import SharedResults, Workload, ranks_of, stages_of


def step_costs(workload: Workload, known: SharedResults | None = None) -> StepCosts:
    """Costs of the parts of a step."""
    strategy, pricer = workload.strategy, Pricer(workload, known)
    stages = stages_of(workload, known)
    stream = strategy.micro_batch * workload.sequence * workload.model.hidden / strategy.cp
    sent_bytes = stream * workload.element_bytes / (strategy.tp if strategy.sequence_parallel else 1)
    return StepCosts(
        stages=tuple(pricer.stage(stage) for stage in stages),
        send_us=workload.scales.between * pricer.groups.send_us(sent_bytes),
        update_us=tuple(pricer.update_us(blocks) for blocks in ranks_of(workload, known)),
        tied_us=pricer.tied_us(),
        shared_us=pricer.shared_us(),
        norm_us=pricer.norm_us(),
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
