"""What traces of jobs with parameter servers (KVStore, BytePS) say in the same way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import trim_mean

from dpro_search.collect.trace import SETTLING_STEPS, Floats, Trace

_TRIMMED = 0.2


def untraced_us(trace: Trace, rank: int, column: Floats) -> float:
    """Mean of a column over a rank's steps without the profiler, over all its steps if it always ran; 0 if it has none.

    The lowest and highest fifth of the steps do not count: a step may hold work of the job's start, or have lent some to the next.
    """
    mine = trace.steps.select(trace.steps.rank == rank)
    used_us = column[trace.steps.rank == rank]
    if not len(mine):
        return 0.0
    settled = mine.index >= SETTLING_STEPS
    # The engine runs behind the script: two steps after the profiler's have what is left of its work, or lack what is not yet done.
    after = np.convolve(mine.traced, np.ones(3))[: len(mine)] > 0
    chosen = next((mask for mask in (settled & ~after, ~mine.traced) if mask.any()), np.ones(len(mine), np.bool_))
    return float(trim_mean(used_us[chosen], _TRIMMED))


def consumers(trace: Trace) -> dict[str, list[int]]:
    """Tensors that each node of the model's graph reads."""
    if not trace.graphs:
        return {}
    graph = trace.graphs[0]
    tensor_of = {tensor.name: number for number, tensor in enumerate(trace.tensors)}
    reads = {
        name: [tensor_of[graph.name[j]] for j in inputs if graph.name[j] in tensor_of]
        for name, inputs in zip(graph.name, np.split(graph.input_idx, graph.input_ptr[1:-1]), strict=True)
    }
    return {name: tensors for name, tensors in reads.items() if tensors}


def first_users(trace: Trace, names: Sequence[str]) -> list[tuple[int, ...]]:
    """Tensors that each op is the first to need; those that no op is known to need are needed by the first."""
    reads, left = consumers(trace), set(range(len(trace.tensors)))
    uses: list[tuple[int, ...]] = []
    for name in names:
        mine = [tensor for tensor in reads.get(name, []) if tensor in left]
        left -= set(mine)
        uses.append(tuple(mine))
    uses[0] = (*uses[0], *sorted(left))
    return uses
