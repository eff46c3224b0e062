"""Which of a node's gradients is which: the engine sends those of one node in an order of each process's own.

Both functions return what is to be corrected: communication, and the parameter whose gradient it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from dpro_search.collect.readers.mxnet.servers import Comm

_SAME_SIZE = 4  # sizes that differ by less are not distinguished by how long they are under way


def identified_by_size(of_rank: Sequence[Comm], least_size: Callable[[int], int]) -> Iterator[tuple[Comm, int]]:
    """Identify gradients of one worker by how long they are under way on average: the larger one longer."""
    groups: dict[int, dict[int, list[Comm]]] = defaultdict(lambda: defaultdict(list))
    for comm in of_rank:
        if comm.node >= 0:
            groups[comm.node][comm.step].append(comm)
    for by_step in groups.values():
        rows = [sorted(row, key=lambda comm: comm.start_us) for row in by_step.values()]
        sent = [comm.parameter for comm in rows[0]]
        if len(sent) < 2 or any(sorted(comm.parameter for comm in row) != sorted(sent) for row in rows):
            continue
        ordered = sorted(sent, key=least_size)
        if not _far_apart([least_size(parameter) for parameter in ordered]):
            continue
        took_us = [sum(row[place].end_us - row[place].start_us for row in rows) for place in range(len(sent))]
        places = sorted(range(len(sent)), key=lambda place: took_us[place])
        for row in rows:
            for parameter, place in zip(ordered, places, strict=True):
                yield row[place], parameter


def identified_by_order(workers: Sequence[Sequence[Comm]], least_size: Callable[[int], int]) -> Iterator[tuple[Comm, int]]:
    """Identify gradients of about one size by the order in which they come back, which is the same on all workers."""
    groups: dict[tuple[int, int], list[list[Comm]]] = defaultdict(lambda: [[] for _ in workers])
    for rank, of_rank in enumerate(workers):
        for comm in of_rank:
            if comm.node >= 0:
                groups[comm.step, comm.node][rank].append(comm)
    for first, *others in groups.values():
        if len(first) > 1 and _far_apart(sorted(least_size(comm.parameter) for comm in first)):
            continue
        order = [comm.parameter for comm in sorted(first, key=lambda comm: comm.end_us)]
        for other in others:
            if len(other) == len(order):
                yield from zip(sorted(other, key=lambda comm: comm.end_us), order, strict=True)


def _far_apart(sizes: Sequence[int]) -> bool:
    return all(b >= a * _SAME_SIZE for a, b in pairwise(sizes))
