"""``pipelines_of(trace)``: the ranks that pass activations and gradients to each other, by who sends to whom."""

from __future__ import annotations

import numpy as np

from dpro_search.collect.trace import CollectiveKind, EventKind, Trace


def pipelines_of(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """Places of the ranks of each pipeline; empty where no messages between two recorded ranks were matched.

    Ranks belong together if a message joins them, directly or over others: one rank of each stage.
    """
    events = trace.events
    is_message = np.isin(events.collective_kind, (CollectiveKind.SEND, CollectiveKind.RECV))
    parts = np.flatnonzero((events.kind == EventKind.COLLECTIVE) & (events.collective >= 0) & is_message)
    ends = np.unique(np.stack((events.collective[parts], events.rank[parts])), axis=1)
    same = np.flatnonzero(ends[0][:-1] == ends[0][1:])
    pairs = np.unique(np.stack((ends[1][same], ends[1][same + 1])), axis=1)
    pipeline = np.arange(trace.meta.ranks)
    for first, second in pairs.T.tolist():
        pipeline[pipeline == pipeline[second]] = pipeline[first]
    members = [tuple(np.flatnonzero(pipeline == number).tolist()) for number in np.unique(pipeline)]
    return tuple(ranks for ranks in members if len(ranks) > 1)
