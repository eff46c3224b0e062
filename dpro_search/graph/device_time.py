"""Where the time of each rank's devices goes in the recorded steps, and which rank the others wait for.

A step lasts from the last device end of the step before to its own (the first one, from its first event). Each instant is one of

* **compute**: a kernel or a copy runs;
* **exposed communication**: only collectives run, and all ranks have enqueued one of them;
* **waiting for ranks**: only collectives run, and each still waits for a rank;
* **idle**, of which **host-bound**: the next op had not been launched when the device fell idle.

Where only one rank was recorded, it is unknown when the others enqueued: waiting is then inside exposed communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import DependencyKind, EventKind, Floats, Ints, Trace

_COMPUTE = (EventKind.KERNEL, EventKind.COPY)
_COMMUNICATION = (EventKind.COLLECTIVE,)


class RankTime(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank, in us, mean over the steps: parts of the step that add up to it."""

    rank: int
    step_us: float
    compute_us: float
    exposed_communication_us: float
    waiting_for_ranks_us: float
    idle_us: float
    host_bound_us: float  # Part of `idle_us`.
    # Share of the transfers' time during which the rank also computed; None where nothing was transferred.
    overlapped_pct: float | None


class Lateness(msgspec.Struct, frozen=True, kw_only=True):
    """One rank over the collectives that all their ranks were seen to enqueue."""

    rank: int
    last_pct: float  # Collectives for which this rank came last.
    cost_us: float  # Time that the others lost by it in a step: from the last but one enqueue to this rank's, where it was last.
    waited_us: float  # Time that this rank waited for others, per step.


@dataclass(frozen=True)
class _Window:
    """A rank's step, and its device events."""

    begin_us: float
    end_us: float
    events: Ints


def rank_times(trace: Trace) -> tuple[RankTime, ...]:
    """Every rank's time; empty where no device was recorded."""
    launched_us = _launched_us(trace)
    moved_us = _moved_us(trace)
    found = []
    for rank in range(trace.meta.ranks):
        windows = _windows(trace, rank)
        if windows:
            parts = np.array([_parts(trace, window, launched_us, moved_us) for window in windows]).mean(axis=0)
            step, compute, exposed, waiting, idle, host_bound, transfer = parts.tolist()
            found.append(
                RankTime(
                    rank=rank,
                    step_us=step,
                    compute_us=compute,
                    exposed_communication_us=exposed,
                    waiting_for_ranks_us=waiting,
                    idle_us=idle,
                    host_bound_us=host_bound,
                    overlapped_pct=max(1 - exposed / transfer, 0.0) * 100 if transfer > 0 else None,
                )
            )
    return tuple(found)


def lateness(trace: Trace) -> tuple[Lateness, ...]:
    """Every rank's punctuality; empty where no collective was matched across ranks."""
    events, ranks = trace.events, trace.meta.ranks
    parts = np.flatnonzero((events.kind == EventKind.COLLECTIVE) & (events.collective >= 0) & (events.step >= 0))
    if not len(parts):
        return ()
    _, row = np.unique(events.collective[parts], return_inverse=True)
    post_us = np.full((row.max() + 1, ranks), -np.inf)
    post_us[row, events.rank[parts]] = events.start_us[parts]
    present = np.isfinite(post_us)
    post_us, present = post_us[present.sum(axis=1) > 1], present[present.sum(axis=1) > 1]
    if not len(post_us):
        return ()
    steps = max(len(np.unique(events.step[parts])), 1)
    last = post_us.argmax(axis=1)
    two = np.partition(post_us, -2, axis=1)[:, -2:]
    cost_us = two[:, 1] - two[:, 0]
    waited_us = np.where(present, two[:, 1:] - np.where(present, post_us, 0.0), 0.0)
    return tuple(
        Lateness(
            rank=rank,
            last_pct=float((last == rank).sum() / max(present[:, rank].sum(), 1)) * 100,
            cost_us=float(cost_us[last == rank].sum()) / steps,
            waited_us=float(waited_us[:, rank].sum()) / steps,
        )
        for rank in range(ranks)
    )


def _windows(trace: Trace, rank: int) -> list[_Window]:
    """Steps of a rank; the first, whose beginning is not a device end, only where there is no other."""
    events, steps = trace.events, trace.steps.select(trace.steps.rank == rank)
    device = np.isin(events.kind, (*_COMPUTE, *_COMMUNICATION)) & (events.rank == rank)
    windows = [
        _Window(begin_us, end_us, np.flatnonzero(device & (events.step == step)))
        for step, begin_us, end_us in zip(steps.index.tolist(), steps.start_us.tolist(), steps.end_us.tolist(), strict=True)
    ]
    windows = [window for window in windows if len(window.events)]
    return windows[1:] or windows


def _parts(trace: Trace, window: _Window, launched_us: Floats, moved_us: Floats) -> tuple[float, ...]:
    events, mine = trace.events, window.events
    start_us, end_us = np.maximum(events.start_us[mine], window.begin_us), events.end_us[mine]
    computes = np.isin(events.kind[mine], _COMPUTE)
    moves = ~computes
    begins_us = np.minimum(np.maximum(moved_us[mine], start_us), end_us)
    compute_us, exposed_us, waiting_us = exclusive_parts(start_us, begins_us, end_us, moves)
    busy_us = compute_us + exposed_us + waiting_us
    step_us = window.end_us - window.begin_us
    transfer_us = covered(begins_us[moves], end_us[moves])
    host_us = _host_bound_us(start_us, end_us, launched_us[mine], window.begin_us)
    idle_us = max(step_us - busy_us, 0.0)
    return (
        step_us,
        compute_us,
        exposed_us,
        waiting_us,
        idle_us,
        min(host_us, idle_us),
        transfer_us,
    )


def _host_bound_us(start_us: Floats, end_us: Floats, launched_us: Floats, begin_us: float) -> float:
    """Idle time that ends with an op that was launched only after the device had fallen idle."""
    order = np.argsort(start_us, kind="stable")
    busy_until_us = np.maximum(np.concatenate(([begin_us], np.maximum.accumulate(end_us[order])[:-1])), begin_us)
    gap_us = start_us[order] - busy_until_us
    late = (gap_us > 0) & (launched_us[order] > busy_until_us)
    return float(gap_us[late].sum())


def exclusive_parts(start_us: Floats, moved_us: Floats, end_us: Floats, moves: npt.NDArray[np.bool_]) -> tuple[float, float, float]:
    """Time in which some ops of a device compute, else only communicate, else only wait for the last rank.

    Parameters
    ----------
    moved_us
        When data began to move; of no meaning for an op that computes.
    moves
        Which ops communicate; the others compute.
    """
    compute_us = covered(start_us[~moves], end_us[~moves])
    with_transfer_us = covered(np.where(moves, moved_us, start_us), end_us)
    return compute_us, with_transfer_us - compute_us, covered(start_us, end_us) - with_transfer_us


def covered(start_us: Floats, end_us: Floats) -> float:
    """Time that is inside at least one of some spans."""
    if not len(start_us):
        return 0.0
    order = np.argsort(start_us, kind="stable")
    start_us, reach_us = start_us[order], np.maximum.accumulate(end_us[order])
    before_us = np.concatenate(([-np.inf], reach_us[:-1]))
    return float(np.maximum(reach_us - np.maximum(start_us, before_us), 0.0).sum())


def _launched_us(trace: Trace) -> Floats:
    """When each event was launched, [n]; -inf where that is unknown."""
    launched_us = np.full(len(trace.events), -np.inf)
    needs = trace.dependencies
    launches = needs.kind == DependencyKind.LAUNCH
    launched_us[needs.target[launches]] = trace.events.start_us[needs.source[launches]]
    return launched_us


def _moved_us(trace: Trace) -> Floats:
    """When the last rank had enqueued an event's collective, [n]; its own start where it was not matched."""
    events = trace.events
    moved_us = events.start_us.copy()
    parts = np.flatnonzero((events.kind == EventKind.COLLECTIVE) & (events.collective >= 0))
    if len(parts):
        _, group = np.unique(events.collective[parts], return_inverse=True)
        last_us = np.full(group.max() + 1, -np.inf)
        np.maximum.at(last_us, group, events.start_us[parts])
        moved_us[parts] = last_us[group]
    return moved_us
