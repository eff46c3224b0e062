"""From wall-clock intervals of ops to the core time each of them used, and how much of each core the communication took.

Several executor threads of a rank share one core, with each other and with the communication's threads, so an op's interval is
longer than the work in it. Here every instant of a step is divided: first the communication's share, then equal parts for the
ops that run (processor sharing). What remains when no op runs although one is ready is the executor's overhead and is charged to
the op that starts next. All times are microseconds.

Copies into and out of the fusion buffer, and the scaling beside them, keep the communication's thread on the core. Each cycle uses
its own small part, each all-reduce some for its wake-ups; the bytes use what is left of the measured CPU time of the
communication's threads. Both are spread evenly over the transfer.

MPI does not sleep while it waits, be it for a message or for another rank: it polls, and takes as much of the core as the scheduler
gives it beside the ops, all of it where none exists. How much that is follows from the measured CPU time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import EventKind, Events, Floats, Ints, Trace
from dpro_search.machine import machine_constants

_SLEEPS_WITHIN = 1.3  # a cycle of up to so many cycle times had little to wait for, and slept
LEAST_FOR_BYTES = 0.3  # share of the CPU time that is the bytes' in any case


@dataclass(frozen=True, kw_only=True)
class ShareProfile:
    """The communication's share of a core over time, piecewise constant: `share[i]` in ``[edge_us[i], edge_us[i + 1])``, else 0."""

    edge_us: Floats
    share: Floats

    def integral_us(self, time_us: Floats) -> Floats:
        """Core time that the communication used up to each instant."""
        if len(self.share) == 0:
            return np.zeros_like(time_us)
        total = np.concatenate(([0.0], np.cumsum(self.share * np.diff(self.edge_us))))
        return np.interp(time_us, self.edge_us, total)


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Core time within one step of one rank."""

    work_us: Floats  # Of every op, [ops].
    # edge_us, main_us: Core time that the ops marked as main used up to each instant: a piecewise linear function.
    edge_us: Floats
    main_us: Floats
    main_end_us: float  # End of the last main op.
    concurrency: float  # Executor threads that were busy while main ops ran, mean over core time.

    def main_until_us(self, time_us: Floats) -> Floats:
        """Main core time used up to each instant."""
        return np.interp(time_us, self.edge_us, self.main_us)


def divide_step(
    start_us: Floats,
    end_us: Floats,
    ready_us: Floats,
    is_main: npt.NDArray[np.bool_],
    communication: ShareProfile,
    step_start_us: float,
) -> StepWork:
    """Divide one step's time among its ops.

    Parameters
    ----------
    start_us, end_us, ready_us
        Of every op, [ops]; ready: when the last of its inputs was there (-inf where unknown).
    is_main
        Ops that wait for no communication, [ops].
    communication
        What its threads took of this core.
    step_start_us
        When the step was called; the time until the first op counts as overhead of that op.
    """
    edges = np.unique(np.concatenate(([step_start_us], start_us, end_us)))
    active = active_count(edges, start_us, end_us)
    active_main = active_count(edges, start_us[is_main], end_us[is_main])
    available = np.diff(edges) - np.diff(communication.integral_us(edges))
    each = np.divide(available, active, out=np.zeros_like(available), where=active > 0)
    used = np.concatenate(([0.0], np.cumsum(each)))
    work = np.interp(end_us, edges, used) - np.interp(start_us, edges, used)

    main_end = float(end_us[is_main].max())
    overhead_main = np.zeros_like(available)
    first_op = _first_started_at(edges, start_us)
    gap = np.flatnonzero((active == 0) & (first_op[1:] >= 0))
    op, begin, end = first_op[gap + 1], edges[gap], edges[gap + 1]
    since = np.where(end <= main_end, begin, np.maximum(begin, ready_us[op]))
    overhead = available[gap] * (end - np.minimum(since, end)) / (end - begin)
    work[op] += overhead  # each op starts at one edge, after one gap
    overhead_main[gap] = np.where(is_main[op], overhead, 0.0)
    main = np.concatenate(([0.0], np.cumsum(each * active_main + overhead_main)))
    busy_main = each * active_main
    threads = float((busy_main * active).sum() / busy_main.sum()) if busy_main.sum() > 0 else 1.0
    return StepWork(work_us=work, edge_us=edges, main_us=main, main_end_us=main_end, concurrency=threads)


def without_overhead(work: StepWork, end_us: Floats, is_main: npt.NDArray[np.bool_], each_us: float) -> StepWork:
    """The same without what the profiler added to every op; no op falls below 0, and the compute thread keeps its shape."""
    removed = np.minimum(work.work_us, each_us)
    main_removed = np.zeros(len(work.edge_us))
    np.add.at(main_removed, np.searchsorted(work.edge_us, end_us[is_main]), removed[is_main])
    main = np.maximum.accumulate(np.maximum(work.main_us - np.cumsum(main_removed), 0.0))
    return replace(work, work_us=work.work_us - removed, main_us=main)


def scaled(work: StepWork, factor: float) -> StepWork:
    """All core times by one factor."""
    return replace(work, work_us=work.work_us * factor, main_us=work.main_us * factor)


def active_count(edges: Floats, start_us: Floats, end_us: Floats) -> Ints:
    """How many intervals cover each stretch between two edges."""
    change = np.zeros(len(edges), dtype=np.int64)
    np.add.at(change, np.searchsorted(edges, start_us), 1)
    np.add.at(change, np.searchsorted(edges, end_us), -1)
    return np.cumsum(change)[:-1]


def _first_started_at(edges: Floats, start_us: Floats) -> Ints:
    """An op that starts at each edge, -1 where none does."""
    first = np.full(len(edges), -1, dtype=np.int64)
    first[np.searchsorted(edges, start_us)] = np.arange(len(start_us))
    return first


def collective_spans(events: Events) -> dict[str, Floats]:
    """One row per collective of the recording rank, sorted by start of the transfer.

    Returns
    -------
    dict
        ``number, step, count, size_bytes``; ``copy_in_us, start_us, end_us, done_us``: begin of the copies in (or of the transfer),
        begin and end of the transfer, end of the copies out (or of the transfer).
    """
    transfer = events.select((events.kind == EventKind.ALLREDUCE) & (events.collective >= 0))
    number, first, row = np.unique(transfer.collective, return_index=True, return_inverse=True)
    size, count = np.zeros(len(number)), np.zeros(len(number))
    np.add.at(size, row, transfer.size_bytes)
    np.add.at(count, row, 1)
    start, end = np.full(len(number), np.inf), np.full(len(number), -np.inf)
    np.minimum.at(start, row, transfer.start_us)
    np.maximum.at(end, row, transfer.end_us)
    copy_in, done = start.copy(), end.copy()
    for kind, column, keep in ((EventKind.MEMCPY_IN, copy_in, np.minimum), (EventKind.MEMCPY_OUT, done, np.maximum)):
        copies = events.select((events.kind == kind) & np.isin(events.collective, number))
        times = copies.start_us if kind == EventKind.MEMCPY_IN else copies.end_us
        keep.at(column, np.searchsorted(number, copies.collective), times)
    order = np.argsort(start, kind="stable")
    rows = {
        "number": number, "step": transfer.step[first], "count": count, "size_bytes": size,
        "copy_in_us": copy_in, "start_us": start, "end_us": end, "done_us": done,
    }  # fmt: skip
    return {key: column[order].astype(np.float64) for key, column in rows.items()}


def communication_shares(trace: Trace, steps: tuple[int, ...]) -> dict[tuple[int, int], ShareProfile]:
    """The share on every rank in every step, by (rank, step)."""
    spans = collective_spans(trace.events)
    cycle_cpu = trace.meta.idle_cycle_cpu_us or machine_constants().horovod.cycle_cpu_us
    cycles = trace.events.start_us[trace.events.kind == EventKind.CYCLE]
    shares = {}
    for rank in range(trace.meta.ranks):
        for step in steps:
            row = np.flatnonzero((trace.steps.rank == rank) & (trace.steps.index == step))[0]
            begin = float(trace.steps.start_us[row])
            following = np.flatnonzero((trace.steps.rank == rank) & (trace.steps.index == step + 1))
            end = float(trace.steps.start_us[following[0]]) if len(following) else float(trace.steps.end_us[row])
            inside = (spans["start_us"] >= begin) & (spans["start_us"] < end)
            part = {key: column[inside] for key, column in spans.items()}
            if polls(trace):
                shares[rank, step] = _Polling(trace, part, rank, step, begin, end).profile(_comm_cpu_us(trace, rank, row))[0]
                continue
            cycle_count = int(((cycles >= begin) & (cycles < end)).sum())
            shares[rank, step] = _profile(part, begin, end, cycle_count * cycle_cpu, _comm_cpu_us(trace, rank, row))
    return shares


def polls(trace: Trace) -> bool:
    """Whether the communication's thread keeps the core while it waits."""
    return trace.meta.knobs.get("HOROVOD_CONTROLLER") == "mpi"


def polling_share(trace: Trace, steps: Ints) -> float:
    """Share of a core that waiting takes beside the ops, median over ranks and the given steps; 0 where waiting sleeps."""
    if not polls(trace):
        return 0.0
    spans = collective_spans(trace.events)
    shares = []
    for rank in range(trace.meta.ranks):
        starts = {int(index): row for row, index in enumerate(trace.steps.index) if trace.steps.rank[row] == rank}
        for step in steps.tolist():
            row, following = starts[step], starts.get(step + 1)
            begin = float(trace.steps.start_us[row])
            end = float(trace.steps.end_us[row] if following is None else trace.steps.start_us[following])
            part = {key: column[spans["step"] == step] for key, column in spans.items()}
            shares.append(_Polling(trace, part, rank, step, begin, end).profile(_comm_cpu_us(trace, rank, row))[1])
    return float(np.median(shares))


class _Polling:
    """One step of a rank whose communication polls: stretches of time, and whether it copies, waits or sleeps in each."""

    def __init__(self, trace: Trace, spans: dict[str, Floats], rank: int, step: int, begin: float, end: float) -> None:
        events = trace.events
        marks = np.unique(np.clip(events.start_us[events.kind == EventKind.CYCLE], begin, end))
        in_step = (events.rank == rank) & (events.step == step)
        ops = events.select(in_step & (events.kind == EventKind.OP))
        enqueues = events.start_us[in_step & (events.kind == EventKind.COMM)]
        times = [spans[key] for key in ("copy_in_us", "start_us", "end_us", "done_us")]
        self._edges = np.unique(np.clip(np.concatenate(([begin, end], marks, ops.start_us, ops.end_us, *times)), begin, end))
        middle = (self._edges[1:] + self._edges[:-1]) / 2
        cycle = np.searchsorted(marks, middle)
        distance = np.diff(np.concatenate(([begin], marks, [end])))
        copies = _inside(middle, times[0], times[1]) | _inside(middle, times[2], times[3])
        self._copies = copies
        self._waits = ~copies & (
            (distance[cycle] > _SLEEPS_WITHIN * trace.horovod_settings.cycle_time_us) | _inside(middle, times[1], times[2])
        )
        # Until the last enqueue, a stretch without an op is the executor's own work.
        computes = active_count(self._edges, np.clip(ops.start_us, begin, end), np.clip(ops.end_us, begin, end)) > 0
        self._computes = computes | (middle < enqueues.max(initial=-np.inf))

    def profile(self, cpu_us: float) -> tuple[ShareProfile, float]:
        """The communication's share over time, and what waiting takes beside the ops, given its CPU time in the step."""
        length = np.diff(self._edges)
        alone, beside = (float(length[self._waits & which].sum()) for which in (~self._computes, self._computes))
        least, most = machine_constants().mpi.polling_bounds
        left = cpu_us - float(length[self._copies].sum()) - alone
        share = min(max(left / beside, least), most) if beside > 0 else least
        shares = np.where(self._copies, 1.0, np.where(self._waits, np.where(self._computes, share, 1.0), 0.0))
        return ShareProfile(edge_us=self._edges, share=shares), share


def _inside(time_us: Floats, start_us: Floats, end_us: Floats) -> npt.NDArray[np.bool_]:
    """Whether each instant is in one of the spans, which do not overlap and are sorted."""
    if not len(start_us):
        return np.zeros(len(time_us), dtype=np.bool_)
    span = np.searchsorted(start_us, time_us, side="right") - 1
    within: npt.NDArray[np.bool_] = (span >= 0) & (time_us < end_us[np.maximum(span, 0)])
    return within


def comm_cpu_us_per_byte(trace: Trace, steps: Ints) -> float:
    """Core time of the transfers alone per byte, median over ranks and steps; a usual value where waiting is in it too."""
    if polls(trace):
        return machine_constants().horovod.cpu_us_per_byte
    spans = collective_spans(trace.events)
    cycle_cpu = trace.meta.idle_cycle_cpu_us or machine_constants().horovod.cycle_cpu_us
    cycle_step = trace.events.step[trace.events.kind == EventKind.CYCLE]
    rates = []
    for rank in range(trace.meta.ranks):
        for step in steps:
            row = int(np.flatnonzero((trace.steps.rank == rank) & (trace.steps.index == step))[0])
            inside = spans["step"] == step
            part = {key: column[inside] for key, column in spans.items()}
            cycles_cpu = int((cycle_step == step).sum()) * cycle_cpu
            rates.append(_cpu_us_per_byte(part, cycles_cpu, _comm_cpu_us(trace, rank, row)))
    return float(np.median(rates))


def _cpu_us_per_byte(spans: dict[str, Floats], cycles_cpu_us: float, cpu_us: float) -> float:
    moved = float(spans["size_bytes"].sum())
    if cpu_us <= 0 or moved <= 0:
        return machine_constants().horovod.cpu_us_per_byte
    transfers = max(cpu_us - _copying_us(spans) - cycles_cpu_us, 0.0)
    beside = len(spans["size_bytes"]) * machine_constants().horovod.collective_cpu_us
    return max(transfers - beside, LEAST_FOR_BYTES * transfers) / moved


def _copying_us(spans: dict[str, Floats]) -> float:
    return float((spans["start_us"] - spans["copy_in_us"] + spans["done_us"] - spans["end_us"]).sum())


def _comm_cpu_us(trace: Trace, rank: int, row: int) -> float:
    """The step's own, unless it is far from the median: the profiler starts and stops between two steps, for seconds."""
    typical = float(np.median(trace.steps.comm_cpu_us[trace.steps.rank == rank]))
    recorded_us = float(trace.steps.comm_cpu_us[row])
    return recorded_us if recorded_us < 1.5 * typical else typical


def _profile(spans: dict[str, Floats], begin: float, end: float, cycles_cpu_us: float, cpu_us: float) -> ShareProfile:
    copying = _copying_us(spans)
    per_byte = _cpu_us_per_byte(spans, cycles_cpu_us, cpu_us)
    transfer = spans["end_us"] - spans["start_us"]
    idle = max(end - begin - transfer.sum() - copying, 1.0)
    waking = min(cycles_cpu_us / idle, 0.9)
    collective_cpu_us = machine_constants().horovod.collective_cpu_us
    edges, share = [begin], []
    for i in range(len(transfer)):
        of_transfer = min((per_byte * spans["size_bytes"][i] + collective_cpu_us) / max(transfer[i], 1.0), 0.95)
        for edge, value in (
            (spans["copy_in_us"][i], waking),
            (spans["start_us"][i], 1.0),
            (spans["end_us"][i], of_transfer),
            (spans["done_us"][i], 1.0),
        ):
            edges.append(max(edge, edges[-1]))
            share.append(value)
    edges.append(max(end, edges[-1]))
    share.append(waking)
    return ShareProfile(edge_us=np.array(edges), share=np.array(share))
