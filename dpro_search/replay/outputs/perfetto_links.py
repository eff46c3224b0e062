"""Links between ranks in a file for ui.perfetto.dev: arrows between the parts of a collective, and the rate of collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.replay.outputs.perfetto_events import DECIMALS, ArrowEnd, Counter

LINK_USE = "collectives in flight"


def collective_arrows(
    collective: Ints, start: Floats, moved: Floats, pid: Sequence[int], tid: Sequence[int], first_id: int
) -> Iterator[ArrowEnd]:
    """From the part of each collective that was enqueued last to the beginning of the others' transfers.

    Parameters
    ----------
    collective
        Number of the collective of each slice, -1: none, [slices].
    start, moved
        When each was enqueued and when its data began to move, [slices].
    pid, tid
        Where it is shown, [slices].
    first_id
        Of the arrows.
    """
    parts = np.flatnonzero(collective >= 0)
    order = parts[np.lexsort((start[parts], collective[parts]))]
    arrow = first_id
    for of_one in np.split(order, np.flatnonzero(np.diff(collective[order])) + 1):
        if len(of_one) < 2 or len({pid[part] for part in of_one.tolist()}) < 2:
            continue
        last = int(of_one[-1])
        at = float(moved[of_one].max())
        for part in of_one[:-1].tolist():
            yield ArrowEnd("s", arrow, pid[last], tid[last], at, name="collective", cat="collective")
            yield ArrowEnd("f", arrow, pid[part], tid[part], at, name="collective", cat="collective")
            arrow += 1


def link_use(pid: Ints, start: Floats, end: Floats, size_bytes: Ints) -> Iterator[Counter]:
    """Gbit/s of each process's collectives of known size: each moves its bytes evenly from its start to its end."""
    chosen = np.flatnonzero((size_bytes > 0) & (end > start))
    rate = size_bytes[chosen] * 8e-3 / (end - start)[chosen]
    for process in np.unique(pid[chosen]).tolist():
        of_process = pid[chosen] == process
        times = np.concatenate((start[chosen][of_process], end[chosen][of_process]))
        change = np.concatenate((rate[of_process], -rate[of_process]))
        instants, place = np.unique(np.round(times, DECIMALS), return_inverse=True)
        level = np.cumsum(np.bincount(place, change, len(instants)))
        for time_us, gbps in zip(instants.tolist(), level.tolist(), strict=True):
            yield Counter(process, time_us, {"Gbit/s": round(max(gbps, 0.0), DECIMALS)}, name=LINK_USE)
