"""Core time of the main threads of a PyTorch job on CPU ranks: what the core gave them in each profiled step.

A rank's main thread runs forward, backward, copies of gradients and parameters and the optimizer, one after the other; it waits
only for collectives. Gloo's threads run on the same core. So every instant of a profiled step is one of: the main thread waits; or
it has the core, but for the share of Gloo's threads. What the core gave the main thread is its core time; it is scaled by how much
less CPU time the kernel counted in the steps without the profiler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import SETTLING_STEPS, EventKind, Events, Floats, Ints, TensorInfo, Trace
from dpro_search.errors import GraphError
from dpro_search.graph.measured import sampled_steps
from dpro_search.machine import machine_constants

_LARGEST_SHARE = 0.9  # of a core that Gloo's threads can have taken while the main thread ran
_LEAST_OF_OP = 0.3  # part of an op's time that is its own in any case, not the profiler's
_PLAUSIBLE = (0.6, 1.3)  # counted over passed core time of a step


@dataclass(frozen=True, kw_only=True)
class MainThreadGraph:
    """The part that the graphs of all PyTorch jobs on CPU ranks share. Times are core time of a rank's main thread, in us."""

    tensors: tuple[TensorInfo, ...]  # Gradients, in an order that the kind of graph states.
    after_us: Floats  # Core time of the end of the step, up to the next one: optimizer and script, [samples, ranks].
    steps: Ints  # Index in the trace of each sample's step, [samples].
    ops: int  # Recorded ops of a step that the graph is made of.

    @property
    def ranks(self) -> int:
        """Number of recorded ranks."""
        return int(self.after_us.shape[1])

    def __len__(self) -> int:
        return self.ops


@dataclass(frozen=True)
class CoreTime:
    """Core time of the main thread over one step of one rank: a piecewise linear function of the time of day.

    `cpu_us` is what the kernel counted for the main thread in this step.
    """

    edge_us: Floats
    core_us: Floats
    ops: Events
    cpu_us: float

    def used_us(self, time_us: Floats) -> Floats:
        """Core time used up at instants."""
        return np.interp(time_us, self.edge_us, self.core_us)


def core_times(trace: Trace, *, with_profiler: bool = False) -> dict[tuple[int, int], CoreTime]:
    """Core time by (step, rank) of all profiled steps; `with_profiler`: with what profiling added, to compare with such steps."""
    ranks = range(trace.meta.ranks)
    times = {(step, rank): _passed(trace, rank, step) for step in sampled_steps(trace, None) for rank in ranks}
    if not with_profiler:
        for rank in ranks:
            times |= _without_profiler({key: time for key, time in times.items() if key[1] == rank}, _usual_cpu_us(trace, rank))
    return times


def ops_per_step(trace: Trace) -> int:
    """Recorded ops of a step, a mean over the steps of the trace."""
    return int((trace.events.kind == EventKind.OP).sum() // max(len(np.unique(trace.events.step)), 1))


def communication_cpu_us(trace: Trace) -> Floats:
    """Core time of Gloo's threads per step, on each rank, [ranks]."""
    return np.array(
        [float(np.median(trace.steps.comm_cpu_us[_steady(trace, rank, traced=True)])) for rank in range(trace.meta.ranks)]
    )


def main_waits_us(trace: Trace, rank: int, step: int) -> Floats:
    """When the main thread of a rank waited for collectives in a step: (start, end) rows, [waits, 2].

    Where the trace does not have them, these are the gaps between its ops, up to the last collective that ended within each. A
    collective may be seen to end a little after the main thread has gone on: Gloo's thread wakes it first, and loses the core to
    it.
    """
    step_events = trace.events.select((trace.events.rank == rank) & (trace.events.step == step))
    noted = step_events.select(step_events.kind == EventKind.SYNC)
    if len(noted):
        return np.stack((noted.start_us, noted.end_us), axis=1)
    ops = step_events.select((step_events.kind == EventKind.OP) & (step_events.stream == 0))
    order = np.argsort(ops.start_us, kind="stable")
    ends = np.sort(step_events.end_us[step_events.kind == EventKind.COLLECTIVE])
    gap_start, gap_end = np.maximum.accumulate(ops.end_us[order])[:-1], ops.start_us[order][1:]
    late_us = machine_constants().host.late_end_us
    latest = gap_end + np.where(gap_end - gap_start > late_us, late_us, 0.0)
    until = np.searchsorted(ends, latest, side="right")
    waited = (until > np.searchsorted(ends, gap_start, side="left")) & (gap_end > gap_start)
    return np.stack((gap_start[waited], np.minimum(ends[until[waited] - 1], gap_end[waited])), axis=1)


def covered(time_us: Floats, spans_us: Floats) -> npt.NDArray[np.bool_]:
    """Which instants lie in any of the (start, end) rows, [instants]."""
    begun = np.searchsorted(np.sort(spans_us[:, 0]), time_us, side="right")
    ended = np.searchsorted(np.sort(spans_us[:, 1]), time_us, side="right")
    return np.asarray(begun > ended)


def _steady(trace: Trace, rank: int, *, traced: bool) -> npt.NDArray[np.bool_]:
    """Rows of a rank's steps of one kind, neither among the first nor beside a start or a stop of the profiler."""
    steps = trace.steps
    rows = np.flatnonzero(steps.rank == rank)
    kind = steps.traced[rows]
    alike = np.append(kind[:-1] == kind[1:], False) & (kind == traced) & (steps.index[rows] >= SETTLING_STEPS)
    steady = np.zeros(len(steps), dtype=np.bool_)
    steady[rows[alike if alike.any() else kind == traced]] = True
    return steady


def _usual_cpu_us(trace: Trace, rank: int) -> tuple[float, float] | None:
    """Median CPU time of the main thread in (unprofiled, profiled) steps; None where the recording lacks either."""
    plain, profiled = (trace.steps.compute_cpu_us[_steady(trace, rank, traced=traced)] for traced in (False, True))
    if len(plain) < 3 or len(profiled) < 1 or not profiled.min() > 0:
        return None
    return float(np.median(plain)), float(np.median(profiled))


def _passed(trace: Trace, rank: int, step: int) -> CoreTime:
    """As it passed, with what the profiler added."""
    row = np.flatnonzero((trace.steps.rank == rank) & (trace.steps.index == step))[0]
    following = np.flatnonzero((trace.steps.rank == rank) & (trace.steps.index == step + 1))
    begin = float(trace.steps.start_us[row])
    end = float(trace.steps.start_us[following[0]]) if len(following) else float(trace.steps.end_us[row])
    step_events = trace.events.select((trace.events.rank == rank) & (trace.events.step == step))
    ops = step_events.select((step_events.kind == EventKind.OP) & (step_events.stream == 0))
    if not len(ops):
        raise GraphError(f"rank {rank} ran no op in step {step}; its profile is damaged: record it again")
    ops = ops.select(np.argsort(ops.start_us, kind="stable"))
    transfers = step_events.select(step_events.kind == EventKind.ALLREDUCE)
    waits, moves = main_waits_us(trace, rank, step), np.stack((transfers.start_us, transfers.end_us), axis=1)
    edges = np.unique(np.clip(np.concatenate(([begin, end], ops.end_us, waits.ravel(), moves.ravel())), begin, end))
    middle, width = (edges[:-1] + edges[1:]) / 2, np.diff(edges)
    waiting, moving = covered(middle, waits), covered(middle, moves)
    comm_cpu_us = min(float(trace.steps.comm_cpu_us[row]), 1.5 * float(np.median(trace.steps.comm_cpu_us)))
    share = min(comm_cpu_us / max(float(width[moving].sum()), 1.0), _LARGEST_SHARE)
    core = np.where(waiting, 0.0, width * np.where(moving, 1 - share, 1.0))
    return CoreTime(edges, np.concatenate(([0.0], np.cumsum(core))), ops, float(trace.steps.compute_cpu_us[row]))


def _without_profiler(axes: dict[tuple[int, int], CoreTime], usual: tuple[float, float] | None) -> dict[tuple[int, int], CoreTime]:
    """The steps of one rank without what the profiler added to each op, scaled to the CPU time of unprofiled steps.

    Where the kernel counted less than passed, others took the core; what all steps have in common of this, stays.
    """
    if usual is None:
        return axes
    plain, profiled = usual
    counted = {key: min(max(axis.cpu_us, 0.7 * profiled), 1.3 * profiled) for key, axis in axes.items()}
    shares = [counted[key] / max(float(axis.core_us[-1]), 1e-9) for key, axis in axes.items()]
    share = min(max(float(np.median(shares)), _PLAUSIBLE[0]), _PLAUSIBLE[1])
    corrected = {}
    for key, axis in axes.items():
        added_us = max(profiled - plain, 0.0) / len(axis.ops)
        parts = np.diff(axis.core_us)
        ended = np.bincount(np.maximum(np.searchsorted(axis.edge_us, axis.ops.end_us) - 1, 0), minlength=len(parts))
        parts = np.maximum(parts - ended[: len(parts)] * added_us, _LEAST_OF_OP * parts)
        plain_us = counted[key] / share * plain / profiled
        parts *= plain_us / max(float(parts.sum()), 1e-9)
        corrected[key] = replace(axis, core_us=np.concatenate(([0.0], np.cumsum(parts))))
    return corrected
