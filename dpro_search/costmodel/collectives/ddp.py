"""Cost of Gloo's collectives in a PyTorch job on CPU ranks (DistributedDataParallel, or fully sharded), fitted on one trace.

The terms are those of a ring all-reduce beside computing ranks (see `costmodel/collectives/horovod.py`): a latency, and a time per
byte, each for ranks that compute meanwhile and for ranks that wait. There is no negotiation and no fusion buffer: copies around
collectives are the main thread's own work. An all-gather counts as an all-reduce of half its size.
"""

from __future__ import annotations

import numpy as np

from dpro_search.collect.trace import EventKind, Events, Floats, Ints, Trace
from dpro_search.costmodel.collectives.horovod import CommCosts, robust_terms, transfer_terms, wire_us_per_byte
from dpro_search.errors import GraphError
from dpro_search.graph.core_time import LEAST_FOR_BYTES
from dpro_search.graph.ddp import DdpGraph
from dpro_search.graph.fsdp import FsdpGraph, moved_share
from dpro_search.graph.main_thread import communication_cpu_us, covered, main_waits_us
from dpro_search.machine import machine_constants

_GRID = 200  # instants at which a transfer's surroundings are looked at


def fit_ddp_costs(trace: Trace, graph: DdpGraph) -> CommCosts:
    """Fit the terms on the sampled steps of a trace, for the cluster on which it was recorded.

    Raises
    ------
    GraphError
        The sampled steps hold no collective.
    """
    moved = float(graph.gradient_bytes.sum() + graph.forward_bytes.sum())
    return _costs(trace, graph.steps, moved, int(graph.bucket_of.max()) + 1 + len(graph.forward_bytes))


def fit_fsdp_costs(trace: Trace, graph: FsdpGraph) -> CommCosts:
    """Fit the terms of a fully sharded job; sizes are those of all-reduces that move as many bytes."""
    return _costs(trace, graph.steps, float(graph.moved_bytes.sum()), len(graph.moved_bytes))


def _costs(trace: Trace, steps: Ints, moved_bytes: float, collectives: int) -> CommCosts:
    """`moved_bytes` and `collectives` are those of a step."""
    rows = [_periods(trace, int(step)) for step in steps]
    size, duration, begun_busy, busy = np.concatenate(rows).T if rows else np.zeros((4, 0))
    if not len(size):
        raise GraphError("the trace has no all-reduce in its profiled steps; record a distributed job")
    cpu = _cpu_us_per_byte(trace, moved_bytes, collectives)
    floor = max(wire_us_per_byte(trace.meta.rate_bps, trace.meta.ranks), cpu)
    design = transfer_terms(size, begun_busy, busy)
    fit = _fitted(design, duration, floor)
    alpha_busy, alpha_more, alpha_tail, beta_busy, beta_tail = fit.tolist()
    fitted = design @ fit
    none = np.zeros(1)
    return CommCosts(
        alpha_busy_us=alpha_busy,
        alpha_more_us=alpha_more,
        alpha_tail_us=alpha_tail,
        dispatch_us=0.0,
        beta_busy_us=max(beta_busy, beta_tail),
        beta_tail_us=beta_tail,
        negotiate_busy_us=none,
        negotiate_idle_us=none,
        copy_in_us=0.0,
        copy_out_us=0.0,
        cpu_us=cpu,
        cycle_cpu_us=0.0,
        collective_cpu_us=machine_constants().torch.collective_cpu_us,
        residual_pct=float(np.std(duration / fitted)) * 100,
    )


def _fitted(design: Floats, duration: Floats, floor: float) -> Floats:
    """(alpha busy, alpha more, alpha tail, beta busy, beta tail); no byte is faster than wire and processors allow."""
    known = machine_constants().torch
    weight = 1 / np.hypot(known.latency_spread_us, known.transfer_spread * duration)
    usual = np.array([*known.alpha_us, 1.2 * floor, 1.05 * floor])
    # A recording may hold nothing of a kind: latencies shrink towards their prior, and the times per byte, barely, to the floor.
    spread = np.array([known.latency_spread_us / np.sqrt(known.alpha_observations)] * 3 + [floor] * 2)
    rows = np.vstack([design * weight[:, None], np.diag(1 / spread)])
    target = np.concatenate((duration * weight, usual / spread))
    low = np.array([0.0, 0.0, 0.0, floor, floor])
    return robust_terms(rows, target, np.maximum(usual, low + 1e-9), low=low, scale=np.maximum(usual, 1e-9))


def _periods(trace: Trace, step: int) -> Floats:
    """Stretches of a step in which collectives moved, [n, 4]: bytes, duration, shares of its beginning and of all with a busy rank.

    Transfers that overlap share the link: together they are one period.
    """
    transfers = trace.events.select((trace.events.step == step) & (trace.events.kind == EventKind.ALLREDUCE))
    if not len(transfers):
        return np.zeros((0, 4))
    start, end, size = _over_ranks(trace, transfers)
    order = np.argsort(start, kind="stable")
    start, end, size = start[order], end[order], size[order]
    latest = np.concatenate(([-np.inf], np.maximum.accumulate(end)[:-1]))
    group = np.cumsum(start >= latest) - 1
    waits = [main_waits_us(trace, rank, step) for rank in range(trace.meta.ranks)]
    periods = []
    for number in range(group[-1] + 1):
        in_period = group == number
        begin, until = float(start[in_period].min()), float(end[in_period].max())
        instants = np.linspace(begin, until, _GRID)
        computing = ~np.all([covered(instants, rows) for rows in waits], axis=0)
        beginning = computing[instants <= begin + machine_constants().torch.beginning_us]
        periods.append((float(size[in_period].sum()), until - begin, float(beginning.mean()), float(computing.mean())))
    return np.array(periods)


def _over_ranks(trace: Trace, transfers: Events) -> tuple[Floats, Floats, Floats]:
    """Start, first end of all ranks (the others may have seen it late), and bytes of each collective."""
    _, first, row = np.unique(transfers.collective, return_index=True, return_inverse=True)
    end = np.full(len(first), np.inf)
    np.minimum.at(end, row, transfers.end_us)
    share = moved_share(transfers.collective_kind[first], transfers.role[first])
    return np.minimum(transfers.start_us[first], end), end, transfers.size_bytes[first] * share


def _cpu_us_per_byte(trace: Trace, moved_bytes: float, collectives: int) -> float:
    spent = float(communication_cpu_us(trace).mean())
    return max(spent - collectives * machine_constants().torch.collective_cpu_us, LEAST_FOR_BYTES * spent) / max(moved_bytes, 1.0)
