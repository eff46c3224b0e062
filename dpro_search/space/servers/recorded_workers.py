"""Workers of a trace with parameter servers (KVStore or BytePS): their number and their measured core times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpro_search.collect.trace import SETTLING_STEPS, EventKind, Floats, Trace

_TRIMMED = 0.2


def worker_count(trace: Trace) -> int:
    """Number of ranks that send gradients; the ranks after them are servers."""
    return len(np.unique(trace.events.rank[trace.events.kind == EventKind.COMM]))


def untraced_us(trace: Trace, rank: int, column: Floats) -> float:
    """Mean of a column over a rank's steps without the profiler, over all its steps if it always ran; 0 if it has none.

    The lowest and highest fifth of the steps do not count: a step may hold work of the job's start, or have lent some to the next.
    """
    used_us = _untraced(trace, rank, column)
    return _trimmed_mean(used_us) if len(used_us) else 0.0


def slowest_worker(trace: Trace, workers: int) -> float:
    """Core time of the slowest worker of a step over the workers' mean, a mean over steps without the profiler.

    Each worker's steps count as shares of its own median: not what one always needs more than others, but what it needs at times.
    Without two workers, or without steps of all, 1.
    """
    rows = [_untraced(trace, rank, trace.steps.compute_cpu_us + trace.steps.comm_cpu_us) for rank in range(workers)]
    steps = min(map(len, rows), default=0)
    if not steps or not all(row[:steps].all() for row in rows):
        return 1.0
    shares = np.array([row[:steps] / np.median(row[:steps]) for row in rows])
    return _trimmed_mean(shares.max(axis=0) / shares.mean(axis=0))


def _trimmed_mean(values: Floats) -> float:
    """As ``scipy.stats.trim_mean``, whose import takes longer than a search's start may."""
    cut = int(_TRIMMED * len(values))
    return float(np.partition(values, (cut, len(values) - cut - 1))[cut : len(values) - cut].mean())


def _untraced(trace: Trace, rank: int, column: Floats) -> Floats:
    """A column's values of a rank's steps without the profiler, else of all its steps, [steps]."""
    rank_steps = trace.steps.select(trace.steps.rank == rank)
    used_us: Floats = column[trace.steps.rank == rank]
    if not len(rank_steps):
        return used_us
    settled = rank_steps.index >= SETTLING_STEPS
    # The engine runs behind the script: two steps after the profiler's have what is left of its work, or lack what is not yet done.
    after = np.convolve(rank_steps.traced, np.ones(3))[: len(rank_steps)] > 0
    chosen = next((mask for mask in (settled & ~after, ~rank_steps.traced) if mask.any()), np.ones(len(rank_steps), np.bool_))
    untraced_us: Floats = used_us[chosen]
    return untraced_us


def server_hosts(trace: Trace, workers: int) -> tuple[int, ...]:
    """Host of each server, as `placement.py` numbers them: a worker's, if it has that worker's name.

    Where all ran on one machine as it is, names carry no information, and each server is taken to have a host of its own.
    """
    names = trace.meta.hosts
    place = {name: worker for worker, name in enumerate(names[:workers])}
    known = len(place) == workers and (len(set(names)) > 1 or trace.meta.rate_bps is not None)
    return tuple(place.get(names[rank], rank) if known else rank for rank in range(workers, trace.meta.ranks))


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
        first_used = [tensor for tensor in reads.get(name, []) if tensor in left]
        left -= set(first_used)
        uses.append(tuple(first_used))
    uses[0] = (*uses[0], *sorted(left))
    return uses
