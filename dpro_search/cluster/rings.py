"""How many rings fit on the wires that join only some pairs of devices, as in a hybrid cube mesh (DGX-1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count, islice

Wires = tuple[tuple[int, int, int], ...]
MOST_DEVICES = 8  # that wires join: the search below is exponential in them
_MOST_WAYS = 500  # that are tried; the meshes of real machines need fewer than 100


@lru_cache(maxsize=4096)
def disjoint_rings(wires: Wires, devices: tuple[int, ...]) -> int:
    """Rings through all the devices that use no wire twice in one direction.

    Each wire carries both directions at once, so that a closed way counts twice: once in each direction. Between two devices every
    wire is a ring. The number is the largest unless the search was stopped, which happens on irregular meshes with many wires only.
    """
    counts = Counter({frozenset((a, b)): number for a, b, number in wires if a in devices and b in devices})
    if len(devices) == 2:
        return counts[frozenset(devices)]
    return 2 * _most(counts, sorted(devices), count())


def _most(counts: Counter[frozenset[int]], devices: Sequence[int], tried: Iterator[int]) -> int:
    """The most closed ways through all devices that share no wire."""
    degree = min(sum(number for pair, number in counts.items() if device in pair) for device in devices)
    best = 0
    if degree < 2:
        return best
    for way in islice(_closed_ways(counts, (devices[0],), frozenset(devices[1:])), _MOST_WAYS):
        left = counts.copy()
        left.subtract(frozenset(edge) for edge in zip(way, (*way[1:], way[0]), strict=True))
        best = max(best, 1 + _most(left, devices, tried))
        if best == degree // 2 or next(tried) >= _MOST_WAYS:  # every closed way takes two wires of each device
            break
    return best


def _closed_ways(counts: Counter[frozenset[int]], way: tuple[int, ...], left: frozenset[int]) -> Iterator[tuple[int, ...]]:
    """Closed ways that begin with the given devices and pass all that are left, each in one direction only."""
    if not left:
        if counts[frozenset((way[-1], way[0]))] > 0 and way[1] < way[-1]:
            yield way
        return
    for device in sorted(left):
        if counts[frozenset((way[-1], device))] > 0:
            yield from _closed_ways(counts, (*way, device), left - {device})
