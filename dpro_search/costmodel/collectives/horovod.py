"""Cost of Horovod's communication on CPU ranks: terms of a fused all-reduce, fitted on one trace, and how they scale.

A ring all-reduce of n bytes on p ranks takes ``alpha + n beta`` (Thakur et al. 2005: alpha covers 2 (p - 1) messages, and
2 (p - 1) / p n bytes cross each link). Both terms depend on what the ranks do meanwhile. While a compute thread runs (forward and
backward), the communication's threads wait for the core at each of their wake-ups, for up to a tick of the scheduler; a few bytes
need few wake-ups, and once the ring's segments no longer fit into the sockets' buffers there are more: ``alpha = a + b (1 -
exp(-n / n0))``. In the tail of a step, executor threads only wake for what comes back, and one such wait is left.

A shaped link is a token bucket (`collect.launch.host_limits`): it accumulates a burst while it is idle, between two transfers and
during a transfer's latency, and then is ahead of its rate by that time, at most by its burst. So pauses shorter than the burst cost
nothing. A transfer of n bytes that begins when the link is ahead of its rate by r takes ``l + n w - min(r + l, b)``: its latency l,
in which the link rests too, the wire's time, and the time that it is spared, at most the burst b. So a latency that ends before the
link has saved a burst takes no time at all, and cannot be seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares, lsq_linear

from dpro_search.collect.launch.host_limits import burst_us
from dpro_search.collect.trace import EventKind, Floats, Trace
from dpro_search.errors import GraphError
from dpro_search.graph.core_time import active_count, collective_spans, comm_cpu_us_per_byte, polling_share, polls
from dpro_search.graph.dataflow import DataflowGraph
from dpro_search.machine import machine_constants

_ENOUGH_COPIED_BYTES = 1e6  # so much must have been copied to know the time per byte
_FEW = 5  # fewer samples than this do not count
_LEAST_SEEN = 0.02  # share of the bytes that must have moved in a state to know its time per byte


@dataclass(frozen=True, kw_only=True)
class CommCosts:
    """Terms for one cluster. "busy": a rank's compute thread runs meanwhile; "tail": all compute threads have ended."""

    # alpha_busy_us, alpha_more_us, alpha_tail_us: Fixed time of an all-reduce: of a few bytes on busy ranks; what a large one takes
    # more there; of any size in the tail.
    alpha_busy_us: float
    alpha_more_us: float
    alpha_tail_us: float
    dispatch_us: float  # Between two collectives of one cycle, beside the copies: callbacks, and the next one's preparation.
    # beta_busy_us, beta_tail_us: Time per byte of the tensor.
    beta_busy_us: float
    beta_tail_us: float
    # negotiate_busy_us, negotiate_idle_us: From a cycle's start to the end of its negotiation, while a rank computes anything and
    # while none does: a sample per recorded cycle.
    negotiate_busy_us: Floats
    negotiate_idle_us: Floats
    # copy_in_us, copy_out_us: Copies around a transfer, per byte; a collective of one tensor has a plain copy as well.
    copy_in_us: float
    copy_out_us: float
    cpu_us: float  # Core time of a transfer, per byte, on each rank.
    # cycle_cpu_us, collective_cpu_us: Core time of a cycle, and of an all-reduce beside its bytes, on each rank.
    cycle_cpu_us: float
    collective_cpu_us: float
    residual_pct: float  # Standard deviation of measured over fitted duration of a step's transfers.
    # Share of a computing rank's core that waiting for messages and for other ranks takes; 0 where waiting sleeps.
    poll_share: float = 0.0
    # Time by which a link that has rested for as long, or longer, is ahead of its rate; 0 where the recording's links were not
    # shaped, for only token buckets have a burst (and for MPI, whose pauses are in the wire times).
    burst_us: float = 0.0
    # wire_times_busy, wire_times_tail: Wire times that a transfer of MPI takes on a limited link: 1 if full-duplex, 2 if
    # half-duplex.
    wire_times_busy: float = 1.0
    wire_times_tail: float = 1.0


def wire_us_per_byte(rate_bps: float | None, ranks: int) -> float:
    """Time per byte of the tensor that a ring of `ranks` needs on a link of the given rate; 0 where it is not limited."""
    if rate_bps is None or ranks < 2:
        return 0.0
    return 2 * (ranks - 1) / ranks * 8e6 / (rate_bps * machine_constants().host.tcp_goodput)


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
    known = machine_constants()
    busy = _BusyTime(trace, graph)
    size, duration = spans["size_bytes"], spans["end_us"] - spans["start_us"]
    cpu = comm_cpu_us_per_byte(trace, graph.steps)
    concurrency = float(np.mean([profile.concurrency for profile in graph.profiles]))
    main_left_us = _main_ends_us(trace, spans["step"]) - spans["start_us"]
    begun_busy = (main_left_us > 0).astype(np.float64)
    share = np.clip(main_left_us / duration, 0.0, 1.0)
    wire = wire_us_per_byte(trace.meta.rate_bps, trace.meta.ranks)
    ahead = 0.0 if polls(trace) else burst_us(trace.meta.rate_bps)
    usual_us = usual_alpha_us(None if polls(trace) else trace.meta.rate_bps)
    most_us = np.minimum(ahead, size * max(wire - cpu, 0.0))
    rested = rested_us(spans["start_us"], spans["end_us"], size * wire, ahead)
    unspared = duration + spared_us(size * wire, duration, rested, most_us)
    alpha_busy, alpha_more, alpha_tail, beta_busy, beta_tail = fit_transfer(
        size,
        unspared,
        begun_busy,
        share,
        wire,
        cpu,
        concurrency,
        usual_us,
        known.mpi.wire_times_spread if polls(trace) else known.horovod.transfer_spread,
    )
    wire_times = (1.0, 1.0)
    if polls(trace):
        beta_busy, beta_tail = _mean_betas(
            size, duration - np.where(begun_busy > 0, alpha_busy + alpha_more * saturation(size), alpha_tail), share, max(wire, cpu)
        )
        wire_times = _wire_times(beta_busy, beta_tail, wire, saturation(size), share)
    latency = np.where(begun_busy > 0, alpha_busy + alpha_more * saturation(size), alpha_tail)
    fitted = latency + size * (share * beta_busy + (1 - share) * beta_tail) - np.minimum(rested + latency, most_us)
    by_step = [duration[spans["step"] == step].sum() / fitted[spans["step"] == step].sum() for step in np.unique(spans["step"])]
    negotiate_busy, negotiate_idle = _negotiations(trace, spans, busy)
    return CommCosts(
        alpha_busy_us=alpha_busy,
        alpha_more_us=alpha_more,
        alpha_tail_us=alpha_tail,
        dispatch_us=_dispatch_us(trace, spans),
        beta_busy_us=beta_busy,
        beta_tail_us=beta_tail,
        negotiate_busy_us=negotiate_busy,
        negotiate_idle_us=negotiate_idle,
        copy_in_us=_copy_us(spans, spans["start_us"] - spans["copy_in_us"]),
        copy_out_us=_copy_us(spans, spans["done_us"] - spans["end_us"]),
        cpu_us=cpu,
        cycle_cpu_us=trace.meta.idle_cycle_cpu_us or known.horovod.cycle_cpu_us,
        collective_cpu_us=known.horovod.collective_cpu_us,
        residual_pct=float(np.std(by_step)) * 100,
        poll_share=polling_share(trace, graph.steps),
        burst_us=ahead,
        wire_times_busy=wire_times[0],
        wire_times_tail=wire_times[1],
    )


def at_cluster(
    costs: CommCosts, concurrency: float, recorded: tuple[float | None, int], target: tuple[float | None, int]
) -> CommCosts:
    """The terms at another link rate and number of ranks; both are given as (rate in bit/s, ranks).

    The wire's part of beta follows the formula; what busy ranks add to it, and the processors' part, stay per byte moved. Alpha
    changes with the rate as its usual values do, where the recording's links were shaped; it and negotiation grow with the number
    of messages in a row.
    """
    if recorded == target:
        return costs
    volume = _volume(target[1]) / _volume(recorded[1])
    messages = max(target[1] - 1, 1) / max(recorded[1] - 1, 1)
    cpu = costs.cpu_us * volume
    old_wire, new_wire = (wire_us_per_byte(*cluster) for cluster in (recorded, target))
    old_floor, new_floor = costs.cpu_us, max(cpu, machine_constants().host.least_us_per_byte)
    extra_tail, extra_busy = 0.0, 0.0
    if not (costs.poll_share and old_wire > 0):  # what polling adds to the wire's time is in the wire times
        extra_tail = costs.beta_tail_us - max(old_wire, old_floor)
        extra_busy = costs.beta_busy_us - max(old_wire, old_floor * (1 + concurrency))
    beta_tail = max(costs.wire_times_tail * new_wire, new_floor) + max(extra_tail, 0.0) * volume
    beta_busy = max(costs.wire_times_busy * new_wire, new_floor * (1 + concurrency)) + max(extra_busy, 0.0) * volume
    alpha = np.array([costs.alpha_busy_us, costs.alpha_more_us, costs.alpha_tail_us])
    if costs.burst_us:  # what is known of a rate was seen on shaped links
        alpha = np.maximum(alpha + usual_alpha_us(target[0]) - usual_alpha_us(recorded[0]), 0.0)
    alpha_busy, alpha_more, alpha_tail = (float(value) for value in alpha * messages)
    return replace(
        costs,
        alpha_busy_us=alpha_busy,
        alpha_more_us=alpha_more,
        alpha_tail_us=alpha_tail,
        beta_busy_us=max(beta_busy, beta_tail),
        beta_tail_us=beta_tail,
        negotiate_busy_us=costs.negotiate_busy_us * messages,
        negotiate_idle_us=costs.negotiate_idle_us * messages,
        cpu_us=cpu,
        burst_us=burst_us(target[0]) if costs.burst_us else 0.0,  # a link of the kind that was recorded
    )


def rested_us(start_us: Floats, end_us: Floats, wire_us: Floats, burst_us: float) -> Floats:
    """How far a shaped link was ahead of its rate when each transfer began, at most `burst_us`, [n].

    Parameters
    ----------
    start_us, end_us
        Begin and end of the transfers, latency included, [n], in order of time.
    wire_us
        Time that the link needs for the bytes of each, [n].
    """
    rested = np.zeros(len(start_us))
    sent_by = -np.inf
    for i, (start, end, wire) in enumerate(zip(start_us, end_us, wire_us, strict=True)):
        rested[i] = max(start - max(sent_by, start - burst_us), 0.0)
        sent_by = min(max(sent_by, end - burst_us) + wire, end)
    return rested


def spared_us(wire_us: Floats, duration_us: Floats, rested: Floats, most_us: Floats) -> Floats:
    """Time that each transfer was spared, [n]; where that hid its latency, this counts as half of the longest that could be hidden.

    Parameters
    ----------
    wire_us, duration_us
        Time that the link needs, and duration of the transfer, [n].
    rested
        How far the link was ahead (`rested_us`), [n].
    most_us
        The most that it may be spared, [n]: the burst, or less where processors need most of the time.
    """
    latency_us = np.maximum(duration_us + most_us - wire_us, 0.0)  # had it been spared that
    return np.where(rested + latency_us <= most_us, (rested + most_us) / 2, most_us)


def usual_alpha_us(rate_bps: float | None) -> Floats:
    """(alpha busy, alpha more, alpha tail) where none were recorded, [3]; between known rates by the rate's logarithm."""
    rows = np.array(machine_constants().horovod.alpha_us_by_rate)
    rates, known = np.log(rows[:, 0]), rows[:, 1:]
    at = np.inf if rate_bps is None else np.log(rate_bps)
    return np.array([np.interp(at, rates, column) for column in known.T])


def saturation(size_bytes: Floats) -> Floats:
    """How much of the large all-reduces' latency one of a size has: 0 for a few bytes, 1 for many."""
    return 1 - np.exp(-size_bytes / machine_constants().host.saturation_bytes)


def _volume(ranks: int) -> float:
    """Bytes that cross a rank's link per byte of the tensor."""
    return 2 * (ranks - 1) / ranks if ranks > 1 else 1.0


def fit_transfer(
    size: Floats,
    duration: Floats,
    begun_busy: Floats,
    busy: Floats,
    wire: float,
    cpu: float,
    concurrency: float,
    usual_us: Floats,
    spread: float | None = None,
) -> tuple[float, float, float, float, float]:
    """(alpha busy, alpha more, alpha tail, beta busy, beta tail); beta cannot be below what wire and processors need.

    Parameters
    ----------
    size, duration
        Bytes and time of each transfer, [n].
    begun_busy
        1 where a compute thread ran when the transfer began, else 0, [n].
    busy
        Part of the transfer during which one ran, [n].
    wire, cpu
        Time per byte of the link and of the processors.
    concurrency
        Executor threads that compete with the communication's on a busy rank.
    usual_us
        Prior of the latencies (`usual_alpha_us`), [3].
    spread
        Standard deviation of a transfer, of what `wire` or `cpu` need; None: `HorovodConstants.transfer_spread`.
    """
    usual, least = machine_constants().horovod, machine_constants().host.least_us_per_byte
    spread = usual.transfer_spread if spread is None else spread
    floor = max(wire, cpu, least)
    # Waiting for the core varies (about as much as its mean), and the transfer does (a few per cent).
    weight = 1 / np.hypot(usual.latency_spread_us, spread * floor * size)
    design = transfer_terms(size, begun_busy, busy) * weight[:, None]
    target = duration * weight
    # A trace of fused transfers holds few small ones, so that the latencies shrink towards their prior.
    prior = np.eye(5)[:3] * np.sqrt(usual.alpha_observations) / usual.latency_spread_us
    design, target = np.vstack([design, prior]), np.append(target, prior @ np.append(usual_us, (0.0, 0.0)))
    low = np.array([0.0, 0.0, 0.0, floor, floor])
    start = np.array([2e3, 3e3, 200.0, floor * 1.2 + 1e-6, floor * 1.05 + 1e-6])
    scale = np.array([1e3, 1e3, 1e3, 1e-3, 1e-3])
    alpha_busy, alpha_more, alpha_tail, beta_busy, beta_tail = robust_terms(design, target, start, low=low, scale=scale).tolist()
    large = saturation(size)  # a few bytes do not show the time per byte
    if ((1 - busy) * large).sum() < _FEW / 2:  # hardly seen in the tail: only the wire is known, if there is a limit
        beta_tail = floor if floor > least else beta_busy
    if (busy * large).sum() < _FEW / 2:
        beta_busy = max(beta_tail, wire, cpu * (1 + concurrency))
    return alpha_busy, alpha_more, alpha_tail, max(beta_busy, beta_tail), beta_tail


def transfer_terms(size: Floats, begun_busy: Floats, busy: Floats) -> Floats:
    """Quantities that the time of transfers is linear in, [n, 5]: alpha busy, alpha more, alpha tail, beta busy, beta tail."""
    columns = [begun_busy, begun_busy * saturation(size), 1 - begun_busy, busy * size, (1 - busy) * size]
    return np.stack(columns, axis=1)


def robust_terms(design: Floats, target: Floats, start: Floats, *, low: Floats, scale: Floats) -> Floats:
    """Terms by which `design`, [n, terms], comes near `target`, [n]; none is below `low`, [terms].

    A transfer that the machine disturbed counts linearly, not by its square. The search begins at `start`; `scale` is how
    large the terms usually are, [terms] each.
    """
    fit = least_squares(lambda p: design @ p - target, start, bounds=(low, np.inf), loss="soft_l1", f_scale=2.0, x_scale=scale)
    return np.asarray(fit.x, dtype=np.float64)


def _mean_betas(size: Floats, moving_us: Floats, busy: Floats, floor: float) -> tuple[float, float]:
    """(busy, tail) time per byte of transfers that take now once, now twice the wire's time: means, so that sums agree.

    Least squares of ``moving_us = size (busy beta_busy + (1 - busy) beta_tail)`` with weights 1 / size. Where nearly no byte moved
    in one of both states, the mean is all that is known.
    """
    seen = np.array([(size * busy).sum(), (size * (1 - busy)).sum()])
    if seen.min() < _LEAST_SEEN * seen.sum():
        mean = max(float(moving_us.sum() / size.sum()), floor)
        return mean, mean if seen[1] > seen[0] else floor
    root = np.sqrt(np.maximum(size, 1.0))
    design = np.stack([busy * root, (1 - busy) * root], axis=1)
    betas = lsq_linear(design, moving_us / root, bounds=(floor, np.inf)).x
    return max(float(betas[0]), float(betas[1])), float(betas[1])


def _wire_times(beta_busy: float, beta_tail: float, wire: float, large: Floats, busy: Floats) -> tuple[float, float]:
    """Wire times per transfer, (busy, tail): as observed, shrunk towards the prior where few large transfers were."""
    usual = machine_constants().mpi
    if wire <= 0:
        return usual.wire_times
    weight = usual.wire_times_observations
    counts = (float((large * busy).sum()), float((large * (1 - busy)).sum()))
    observed = zip((beta_busy, beta_tail), counts, usual.wire_times, strict=True)
    wire_times_busy, wire_times_tail = ((beta / wire * n + times * weight) / (n + weight) for beta, n, times in observed)
    return wire_times_busy, wire_times_tail


def _main_ends_us(trace: Trace, step: Floats) -> Floats:
    """When the last rank enqueued its last gradient in each of the steps, which ends the compute threads."""
    comm = trace.events.select(trace.events.kind == EventKind.COMM)
    last: dict[int, float] = {}
    for number, start_us in zip(comm.step.tolist(), comm.start_us.tolist(), strict=True):
        last[number] = max(last.get(number, -np.inf), start_us)
    return np.array([last[int(number)] for number in step])


def _copy_us(spans: dict[str, Floats], duration: Floats) -> float:
    """Time per byte of the copies, from the collectives of several tensors; the others have none on the timeline."""
    fused = spans["count"] > 1
    moved = float(spans["size_bytes"][fused].sum())
    return float(duration[fused].sum()) / moved if moved >= _ENOUGH_COPIED_BYTES else machine_constants().horovod.copy_us_per_byte


def _dispatch_us(trace: Trace, spans: dict[str, Floats]) -> float:
    """Mean pause between two collectives of one cycle."""
    cycles = np.sort(trace.events.start_us[trace.events.kind == EventKind.CYCLE])
    done, begun = spans["done_us"][:-1], spans["copy_in_us"][1:]
    together = np.searchsorted(cycles, done) == np.searchsorted(cycles, begun)
    together &= spans["step"][:-1] == spans["step"][1:]
    pauses = (begun - done)[together]
    return float(np.mean(pauses)) if len(pauses) >= _FEW else machine_constants().horovod.dispatch_us


class _BusyTime:
    """How long each rank computed, as a function of time, in every sampled step."""

    def __init__(self, trace: Trace, graph: DataflowGraph) -> None:
        self._functions: dict[tuple[int, int], tuple[Floats, Floats]] = {}
        self._ranks = trace.meta.ranks
        ops = trace.events.select(trace.events.kind == EventKind.OP)
        for rank in range(self._ranks):
            for step in graph.steps:
                of_rank = (ops.rank == rank) & (ops.step == step)
                start, end = ops.start_us[of_rank], ops.end_us[of_rank]
                edges = np.unique(np.concatenate((start, end)))
                active = active_count(edges, start, end) > 0
                self._functions[rank, int(step)] = edges, np.concatenate(([0.0], np.cumsum(active * np.diff(edges))))

    def fraction(self, step: Floats, start_us: Floats, end_us: Floats) -> Floats:
        """Part of each span during which the busiest rank computed."""
        busiest = np.zeros(len(step))
        for i, (s, a, b) in enumerate(zip(step, start_us, end_us, strict=True)):
            for rank in range(self._ranks):
                edges, total = self._functions[rank, int(s)]
                used = np.interp(b, edges, total) - np.interp(a, edges, total)
                busiest[i] = max(busiest[i], used / max(b - a, 1e-9))
        return np.minimum(busiest, 1.0)


def _negotiations(trace: Trace, spans: dict[str, Floats], busy: _BusyTime) -> tuple[Floats, Floats]:
    """Durations of the negotiation of every cycle in the sampled steps: (while a rank computes, while none does).

    It ends with the first copy where something is sent. A cycle that sends nothing and outlasts the cycle time was as long as its
    distance to the next; one that does not is taken as quiet, for its end cannot be seen.
    """
    known = machine_constants().horovod
    cycle_us = trace.horovod_settings.cycle_time_us
    marks = trace.events.select(trace.events.kind == EventKind.CYCLE)
    order = np.argsort(marks.start_us, kind="stable")
    start, step = marks.start_us[order], marks.step[order].astype(np.float64)
    if len(start) < 2:
        return np.array([known.negotiation_busy_us]), np.array([known.negotiation_idle_us])
    distance = np.diff(start)
    sends_at = np.searchsorted(spans["copy_in_us"], start[:-1])
    first_copy = np.append(spans["copy_in_us"], np.inf)[sends_at]
    quiet = max(float(np.percentile(distance, 5)) - cycle_us, known.negotiation_floor_us)
    duration = np.where(distance > 1.3 * cycle_us, distance, quiet)
    duration = np.where(first_copy < start[1:], first_copy - start[:-1], duration)
    sampled = np.isin(step[:-1], np.unique(spans["step"])) & (step[:-1] == step[1:])
    start, step, duration = start[:-1][sampled], step[:-1][sampled], duration[sampled]
    fraction = busy.fraction(step, start, start + np.maximum(duration, 1.0))
    while_busy, while_idle = duration[fraction > 0.5], duration[fraction < 0.1]
    if len(while_idle) < _FEW:
        while_idle = np.array([quiet])
    if len(while_busy) < _FEW:
        while_busy = while_idle
    return np.sort(while_busy), np.sort(while_idle)
