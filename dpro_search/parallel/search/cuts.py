"""`balanced_cut`: as many layers on each pipeline stage as leave no rank with more work than needed."""

from __future__ import annotations

import heapq

from dpro_search.parallel.model import blocks_of
from dpro_search.parallel.schedule import Schedule, stages_on
from dpro_search.parallel.steps.step_prices import StepPrices
from dpro_search.parallel.strategy import Strategy

_WORTH = 1e-3  # of a rank's work


def balanced_cut(steps: StepPrices, strategy: Strategy) -> tuple[int, ...]:
    """Layers of each stage with which the busiest rank has least to do; empty: the framework's own are as good."""
    took = {name: each.forward_us + each.backward_us for name, each in steps.passes(strategy).items()}
    embedding, *layers, head = blocks_of(steps.workload.model)
    count = sum(block.count for block in layers)
    layer_us = sum(block.count * took[block.name] for block in layers) / count
    ranks, per_rank = strategy.pp, strategy.virtual_stages
    balanced = balanced_layers(
        *(count, layer_us, took[embedding.name], took[head.name]), ranks=ranks, per_rank=per_rank, schedule=strategy.schedule
    )
    usual = steps.stages(strategy)
    stages_of_rank = [stages_on(strategy.schedule, rank, ranks, per_rank) for rank in range(ranks)]
    ends_us = {0: took[embedding.name], len(usual) - 1: took[head.name]}
    now_us = max(sum(took[block.name] for stage in on_rank for block in usual[stage]) for on_rank in stages_of_rank)
    then_us = max(sum(balanced[stage] * layer_us + ends_us.get(stage, 0.0) for stage in on_rank) for on_rank in stages_of_rank)
    return balanced if then_us < now_us * (1 - _WORTH) else ()


def balanced_layers(
    layers: int, layer_us: float, first_us: float, last_us: float, *, ranks: int, per_rank: int, schedule: Schedule
) -> tuple[int, ...]:
    """Layers of each stage, in the order of the forward pass, with which the busiest rank has least to do.

    Layers go one by one to the rank that has least to do (of several the last one, which holds fewer micro-batches in flight),
    which is optimal for layers that take equally long; those of a rank go to its stages in the same way. Only the first and the
    last stage may be left without layers.

    Parameters
    ----------
    layers, layer_us
        Their number, and what one takes of a micro-batch, forward and backward; the mean where they differ.
    first_us, last_us
        What the embedding takes on the first stage, and the head on the last one.
    """
    stages = ranks * per_rank
    counts = [0 if number in (0, stages - 1) else 1 for number in range(stages)]
    work_us = [0.0] * stages
    work_us[0] += first_us
    work_us[-1] += last_us
    stages_of_rank = [stages_on(schedule, rank, ranks, per_rank) for rank in range(ranks)]
    loads = [
        (sum(work_us[stage] + counts[stage] * layer_us for stage in on_rank), -rank) for rank, on_rank in enumerate(stages_of_rank)
    ]
    heapq.heapify(loads)
    for _ in range(layers - sum(counts)):
        load_us, place = loads[0]
        stage = min(stages_of_rank[-place], key=lambda each: (work_us[each] + counts[each] * layer_us, -each))
        counts[stage] += 1
        heapq.heapreplace(loads, (load_us + layer_us, place))
    return tuple(counts)
