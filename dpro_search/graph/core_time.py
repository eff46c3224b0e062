"""From wall-clock intervals of ops to the core time each of them used.

Several executor threads of a rank share one core, with each other and with the communication's threads, so an op's interval is
longer than the work in it. Here every instant of a step is divided: first the communication's share, then equal parts for the
ops that run (processor sharing). What remains when no op runs although one is ready is the executor's overhead and is charged to
the op that starts next. All times are microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Ints


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
