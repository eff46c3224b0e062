"""What Horovod's communication costs on CPU ranks: terms of a fused all-reduce, fitted on one trace, and how they scale.

A ring all-reduce of n bytes on p ranks takes ``alpha + n beta`` (Thakur et al. 2005: alpha covers 2 (p - 1) messages, and
2 (p - 1) / p n bytes cross each link). Both terms depend on whether a rank computes meanwhile: its communication threads then wait
for the core at each of their wake-ups, of which every segment of the ring needs some. So there are terms for busy and idle ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from dpro_search.collect.trace import EventKind, Floats, Trace
from dpro_search.errors import GraphError
from dpro_search.graph.dataflow import DataflowGraph
from dpro_search.graph.share import collective_spans, comm_cpu_us_per_byte

# Payload of TCP over Ethernet with timestamps: 1448 of 1538 bytes on the wire, but a token bucket counts only 1514 of them.
_GOODPUT = 1448 / 1514


@dataclass(frozen=True, kw_only=True)
class CommCosts:
    """Terms for one cluster. "busy": at least one rank computes meanwhile; "idle": none does.

    Attributes
    ----------
    alpha_busy_us, alpha_idle_us
        Fixed time of an all-reduce.
    beta_busy_us, beta_idle_us
        Time per byte of the tensor.
    negotiate_busy_us, negotiate_idle_us
        From a cycle's start to its agreement on what to send: a sample per recorded cycle.
    copy_in_us, copy_out_us
        Copies around a transfer, per byte; a collective of one tensor has a plain copy as well.
    cpu_us
        Core time of a transfer, per byte, on each rank.
    cycle_cpu_us
        Core time of a cycle, on each rank.
    residual_pct
        Standard deviation of measured over fitted duration of a step's transfers.
    """

    alpha_busy_us: float
    alpha_idle_us: float
    beta_busy_us: float
    beta_idle_us: float
    negotiate_busy_us: Floats
    negotiate_idle_us: Floats
    copy_in_us: float
    copy_out_us: float
    cpu_us: float
    cycle_cpu_us: float
    residual_pct: float


def wire_us_per_byte(rate_bps: float | None, ranks: int) -> float:
    """Time per byte of the tensor that a ring of `ranks` needs on a link of the given rate; 0 where it is not limited."""
    if rate_bps is None or ranks < 2:
        return 0.0
    return 2 * (ranks - 1) / ranks * 8e6 / (rate_bps * _GOODPUT)


def fit_comm_costs(trace: Trace, graph: DataflowGraph) -> CommCosts:
    """Fit the terms on the sampled steps of a trace, for the cluster on which it was recorded.

    Raises
    ------
    GraphError
        The sampled steps hold no collective.
    """
    spans = collective_spans(trace.events)
    keep = np.isin(spans["step"], graph.steps)
    spans = {key: column[keep] for key, column in spans.items()}
    if not len(spans["start_us"]):
        raise GraphError("the trace has no all-reduce in its profiled steps; record with a Horovod timeline")
    busy = _BusyTime(trace, graph)
    size, duration = spans["size_bytes"], spans["end_us"] - spans["start_us"]
    cpu = comm_cpu_us_per_byte(trace, graph.steps)
    concurrency = float(np.mean([profile.concurrency for profile in graph.profiles]))
    share = busy.fraction(spans["step"], spans["start_us"], spans["end_us"])
    alpha_busy, alpha_idle, beta_busy, beta_idle = _fit_transfer(
        size, duration, share, wire_us_per_byte(trace.meta.rate_bps, trace.meta.ranks), cpu, concurrency
    )
    fitted = share * (alpha_busy + beta_busy * size) + (1 - share) * (alpha_idle + beta_idle * size)
    by_step = [duration[spans["step"] == step].sum() / fitted[spans["step"] == step].sum() for step in np.unique(spans["step"])]
    fused = spans["count"] > 1
    moved = max(float(size[fused].sum()), 1.0)
    negotiate_busy, negotiate_idle = _negotiations(trace, spans, busy)
    idle_floor = float(np.median(negotiate_idle))
    return CommCosts(
        alpha_busy_us=max(alpha_busy, idle_floor),
        alpha_idle_us=max(alpha_idle, idle_floor),
        beta_busy_us=beta_busy,
        beta_idle_us=beta_idle,
        negotiate_busy_us=negotiate_busy,
        negotiate_idle_us=negotiate_idle,
        copy_in_us=float((spans["start_us"] - spans["copy_in_us"])[fused].sum()) / moved,
        copy_out_us=float((spans["done_us"] - spans["end_us"])[fused].sum()) / moved,
        cpu_us=cpu,
        cycle_cpu_us=trace.meta.idle_cycle_cpu_us or 100.0,
        residual_pct=float(np.std(by_step)) * 100,
    )


def at_cluster(costs: CommCosts, concurrency: float, recorded: tuple[float | None, int], wanted: tuple[float | None, int]) -> CommCosts:
    """The terms at another link rate and number of ranks; both are given as (rate in bit/s, ranks).

    The wire's part of beta follows the formula; what busy ranks add to it, and the processors' part, stay per byte moved. Alpha and
    negotiation grow with the number of messages in a row.
    """
    if recorded == wanted:
        return costs
    volume = _volume(wanted[1]) / _volume(recorded[1])
    messages = max(wanted[1] - 1, 1) / max(recorded[1] - 1, 1)
    cpu = costs.cpu_us * volume
    old_wire, new_wire = wire_us_per_byte(*recorded), wire_us_per_byte(*wanted)
    old_floor, new_floor = costs.cpu_us, cpu
    extra_idle = costs.beta_idle_us - max(old_wire, old_floor)
    extra_busy = costs.beta_busy_us - max(old_wire, old_floor * (1 + concurrency))
    beta_idle = max(new_wire, new_floor) + max(extra_idle, 0.0) * volume
    beta_busy = max(new_wire, new_floor * (1 + concurrency)) + max(extra_busy, 0.0) * volume
    return replace(
        costs,
        alpha_busy_us=costs.alpha_busy_us * messages,
        alpha_idle_us=costs.alpha_idle_us * messages,
        beta_busy_us=max(beta_busy, beta_idle),
        beta_idle_us=beta_idle,
        negotiate_busy_us=costs.negotiate_busy_us * messages,
        negotiate_idle_us=costs.negotiate_idle_us * messages,
        cpu_us=cpu,
    )


def _volume(ranks: int) -> float:
    """Bytes that cross a rank's link per byte of the tensor."""
    return 2 * (ranks - 1) / ranks if ranks > 1 else 1.0


def _fit_transfer(
    size: Floats, duration: Floats, busy: Floats, wire: float, cpu: float, concurrency: float
) -> tuple[float, float, float, float]:
    """(alpha busy, alpha idle, beta busy, beta idle); beta cannot be below what wire and processors need."""
    floor_idle, floor_busy = max(wire, cpu), max(wire, cpu)
    design = np.stack([busy, 1 - busy, busy * size, (1 - busy) * size], axis=1)
    low = np.array([0.0, 0.0, floor_busy, floor_idle])
    start = np.array([2000.0, 200.0, floor_busy * 1.2, floor_idle * 1.05])
    scale = np.array([1e3, 1e3, 1e-3, 1e-3])
    # Robust: a transfer that the machine disturbed counts linearly, not by its square.
    fit = least_squares(lambda p: design @ p - duration, start, bounds=(low, np.inf), loss="soft_l1", f_scale=2000.0, x_scale=scale)
    alpha_busy, alpha_idle, beta_busy, beta_idle = (float(value) for value in fit.x)
    if busy.mean() > 0.95:  # never seen idle: the wire alone is known
        alpha_idle, beta_idle = 0.0, floor_idle
    if busy.mean() < 0.05:
        alpha_busy, beta_busy = alpha_idle, max(beta_idle, max(wire, cpu * (1 + concurrency)))
    return alpha_busy, alpha_idle, max(beta_busy, beta_idle), beta_idle


class _BusyTime:
    """How long each rank computed, as a function of time, in every sampled step."""

    def __init__(self, trace: Trace, graph: DataflowGraph) -> None:
        self._functions: dict[tuple[int, int], tuple[Floats, Floats]] = {}
        self._ranks = trace.meta.ranks
        ops = trace.events.select(trace.events.kind == EventKind.OP)
        for rank in range(self._ranks):
            for step in graph.steps:
                mine = (ops.rank == rank) & (ops.step == step)
                start, end = ops.start_us[mine], ops.end_us[mine]
                edges = np.unique(np.concatenate((start, end)))
                change = np.zeros(len(edges))
                np.add.at(change, np.searchsorted(edges, start), 1)
                np.add.at(change, np.searchsorted(edges, end), -1)
                active = np.cumsum(change)[:-1] > 0
                self._functions[rank, int(step)] = edges, np.concatenate(([0.0], np.cumsum(active * np.diff(edges))))

    def fraction(self, step: Floats, start_us: Floats, end_us: Floats) -> Floats:
        """Part of each span during which the busiest rank computed."""
        found = np.zeros(len(step))
        for i, (s, a, b) in enumerate(zip(step, start_us, end_us, strict=True)):
            for rank in range(self._ranks):
                edges, total = self._functions[rank, int(s)]
                used = np.interp(b, edges, total) - np.interp(a, edges, total)
                found[i] = max(found[i], used / max(b - a, 1e-9))
        return np.minimum(found, 1.0)


def _negotiations(trace: Trace, spans: dict[str, Floats], busy: _BusyTime) -> tuple[Floats, Floats]:
    """Durations from a cycle's start to the first copy of its first collective: (while a rank computes, while none does)."""
    events = trace.events
    cycles = np.sort(events.start_us[events.kind == EventKind.CYCLE])
    if not len(cycles):
        return np.array([1000.0]), np.array([100.0])
    last = cycles[np.maximum(np.searchsorted(cycles, spans["copy_in_us"], side="right") - 1, 0)]
    previous_done = np.concatenate(([-np.inf], spans["done_us"][:-1]))
    first = (last > previous_done) & (last <= spans["copy_in_us"])
    duration = spans["copy_in_us"][first] - last[first]
    fraction = busy.fraction(spans["step"][first], last[first], spans["copy_in_us"][first])
    gaps = np.diff(cycles)
    quiet = float(np.percentile(gaps, 5)) - trace.meta.settings.cycle_time_us  # a cycle with nothing to do and nobody busy
    while_busy, while_idle = duration[fraction > 0.5], duration[fraction <= 0.5]
    floor = max(quiet, 20.0)
    if len(while_busy) < 5:
        while_busy = np.append(while_busy, np.full(5, max(floor, float(np.median(duration)) if len(duration) else floor)))
    if len(while_idle) < 5:
        while_idle = np.full(5, floor)
    return np.sort(while_busy), np.sort(while_idle)
