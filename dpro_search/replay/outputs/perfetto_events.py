"""The records of a file for ui.perfetto.dev, and how slices get threads on which they do not overlap."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Ints

DECIMALS = 3  # the viewer counts nanoseconds


class Slice(msgspec.Struct):
    """An op, or a wait."""

    name: str
    cat: str
    pid: int
    tid: int
    ts: float
    dur: float
    ph: str = "X"
    args: dict[str, str | float] = {}


class ArrowEnd(msgspec.Struct):
    """The beginning ("s") or the head ("f") of an arrow: each belongs to the slice of its thread around its time."""

    ph: str
    id: int
    pid: int
    tid: int
    ts: float
    bp: str = "e"
    name: str = "dependency"
    cat: str = "dependency"


class Counter(msgspec.Struct):
    """The value of a quantity from a time on."""

    pid: int
    ts: float
    args: dict[str, float]
    name: str = "memory"
    ph: str = "C"


class Metadata(msgspec.Struct, omit_defaults=True):
    """The name or the place of a process or thread."""

    ph: str
    name: str
    pid: int
    args: dict[str, str | int]
    tid: int = 0


def threads(
    on: npt.NDArray[np.integer], overlap: npt.NDArray[np.bool_], start: Floats, end: Floats
) -> tuple[Ints, list[tuple[int, int]]]:
    """Slices that overlap must be on several threads, for the viewer takes slices of one thread as nested calls.

    Returns the number of each slice's thread, and each thread's device or stream (`on`) and lane.
    """
    lane = np.zeros(len(on), np.int64)
    order = np.lexsort((end, start, on))
    order = order[overlap[order]]
    for rows in np.split(order, np.flatnonzero(np.diff(on[order])) + 1):
        lane[rows] = _lanes(start[rows].tolist(), end[rows].tolist())
    pairs, number = np.unique(np.stack((on, lane), axis=1), axis=0, return_inverse=True)
    return number.reshape(-1), [(on, lane) for on, lane in pairs.tolist()]


def _lanes(start: Sequence[float], end: Sequence[float]) -> list[int]:
    """The lowest free lane of each interval, in order of their starts."""
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    lanes = []
    for begins, ends in zip(start, end, strict=True):
        while busy and busy[0][0] <= begins:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (ends, lane))
        lanes.append(lane)
    return lanes


def process(pid: int, name: str) -> Iterator[Metadata]:
    """Name and place of a process."""
    yield Metadata("M", "process_name", pid, {"name": name})
    yield Metadata("M", "process_sort_index", pid, {"sort_index": pid})


def thread(pid: int, tid: int, name: str, lane: int) -> Iterator[Metadata]:
    """Name and place of a thread: of one of several lanes of a device or stream."""
    yield Metadata("M", "thread_name", pid, {"name": f"{name} ({lane + 1})" if lane else name}, tid)
    yield Metadata("M", "thread_sort_index", pid, {"sort_index": tid}, tid)


def number_of(numbers: Sequence[int], rank: int) -> int:
    """A rank's number in the job."""
    return numbers[rank] if 0 <= rank < len(numbers) else rank


def length(start: float, end: float) -> float:
    """Between two rounded times."""
    return round(end - start, DECIMALS)


def text_of(name: str) -> str:
    """A name that UTF-8 can hold: one from a damaged file may have lone surrogates."""
    return name.encode("utf-8", "backslashreplace").decode()
