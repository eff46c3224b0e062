"""Facts that follow from the rest of a trace: element types of tensors, and the process groups that were seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dpro_search.collect.recorded_names import dtype_of
from dpro_search.collect.trace import CollectiveKind, EventKind, ProcessGroup, Trace

_AMONG_PEERS = [kind for kind in CollectiveKind if CollectiveKind.ALL_REDUCE <= kind <= CollectiveKind.ALL_TO_ALL]
_AMONG_PEERS += [CollectiveKind.BARRIER, CollectiveKind.GATHER, CollectiveKind.SCATTER]


def described(trace: Trace, ranks: Sequence[int] | None = None) -> Trace:
    """The trace with both, where they were not known.

    Parameters
    ----------
    ranks
        The number in the job of each recorded rank; None: all were recorded.
    """
    return _with_groups(_with_dtypes(trace), ranks)


def _with_dtypes(trace: Trace) -> Trace:
    """Set the element type of each communication event to that of its tensor."""
    number = {dtype: i for i, dtype in enumerate(trace.dtypes)}
    types = [dtype_of(tensor.dtype) for tensor in trace.tensors]
    # The last is for -1.
    of_tensor = np.array([*(number.setdefault(dtype, len(number)) if dtype else -1 for dtype in types), -1], np.int32)
    if not (of_tensor >= 0).any():
        return trace
    column = np.where(trace.events.dtype >= 0, trace.events.dtype, of_tensor[trace.events.tensor])
    return replace(trace, dtypes=tuple(number), events=replace(trace.events, dtype=column))


def _with_groups(trace: Trace, numbers: Sequence[int] | None) -> Trace:
    """Ranks that were seen in the same collective are a process group. The two ends of a message are none."""
    events = trace.events
    whole = np.isin(events.kind, (EventKind.COMM, EventKind.COLLECTIVE)) & np.isin(events.collective_kind, _AMONG_PEERS)
    whole &= (events.collective >= 0) & (events.group < 0)
    if not whole.any():
        return trace
    parts_of = np.flatnonzero(events.collective >= 0)
    collectives, place = np.unique(events.collective[parts_of], return_inverse=True)
    grouped = whole[parts_of]
    parts = np.unique(np.stack((place[grouped], events.rank[parts_of][grouped])), axis=1)
    seen, first = np.unique(parts[0], return_index=True)
    groups = {group: number for number, group in enumerate(trace.groups)}
    of_collective = np.full(len(collectives), -1, np.int32)
    for collective, members in zip(seen.tolist(), np.split(parts[1], first[1:]), strict=True):
        ranks = tuple(members.tolist()) if numbers is None else tuple(sorted(numbers[rank] for rank in members.tolist()))
        if len(ranks) > 1:
            of_collective[collective] = groups.setdefault(ProcessGroup(ranks=ranks, size=len(ranks)), len(groups))
    if not (of_collective >= 0).any():
        return trace
    column = events.group.copy()
    column[parts_of] = np.where(column[parts_of] >= 0, column[parts_of], of_collective[place])
    return replace(trace, groups=tuple(groups), events=replace(events, group=column))
