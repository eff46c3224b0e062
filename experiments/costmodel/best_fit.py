"""The most that TensorFlow's best-fit allocator has in use in a step, from the lives of the step's tensors (`costmodel.memory`)."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple, Unpack

import numpy as np

from dpro_search.collect.trace import AllocatorReport
from dpro_search.costmodel.memory import Changes, Lives, lives_under
from dpro_search.graph.dataflow import StepMemory

_SETTLING_STEPS = 3
# Constants of the allocator.
_GRAIN = 256
_FIRST_REGION = 2 << 20
_LARGEST_REST = 128 << 20
_FAR = 1 << 45  # regions are no neighbours


def allocator_peak_bytes(
    step: StepMemory, *, counted: AllocatorReport | None = None, smallest_bytes: float = 0.0, **changes: Unpack[Changes]
) -> int:
    """The most that TensorFlow's best-fit allocator has in use in a settled step: its pieces are larger than what was wanted.

    Parameters
    ----------
    counted
        What it counted in the recording: pieces are then larger than wanted as they were there, and what stays from step to step
        beside the step's own buffers is as it was, above all the fusion buffer's piece. With another batch, or in parts, the first
        step is another, which takes that piece: it is played then. None: all pieces are.
    smallest_bytes
        As in `peak_bytes`.

    Raises
    ------
    InputError
        As `peak_bytes`.
    """
    lives = lives_under(step, changes)
    if counted is None:
        return _allocated(lives, smallest_bytes).most_bytes
    peak = lives.peak(smallest_bytes)
    first_step_is_as_recorded = changes.get("batch_factor", 1.0) == changes.get("micro_batches", 1) == 1
    stays_bytes = counted.least_bytes if first_step_is_as_recorded else _allocated(lives, smallest_bytes).least_bytes
    return round(stays_bytes + (peak.bytes - peak.persistent_bytes) * (1 + _spare_share(counted)))


def _spare_share(counted: AllocatorReport) -> float:
    """Share by which the pieces of what comes and goes in a step were larger than requested, at the peak."""
    spread_bytes = counted.requested_peak_bytes - counted.least_bytes
    return max(counted.peak_bytes - counted.requested_peak_bytes, 0) / spread_bytes if spread_bytes > 0 else 0.0


class _InUse(NamedTuple):
    """Pieces that an allocator has handed out, at the least and at the most."""

    least_bytes: int
    most_bytes: int


def _allocated(lives: Lives, smallest_bytes: float) -> _InUse:
    """Bytes that the allocator has in use in the last of some equal steps, the first of which takes the fusion buffer."""
    size, from_, to, _, buffer = lives.columns
    counted = np.flatnonzero(size >= smallest_bytes)
    piece_of = {int(buffer[i]): int(i) for i in counted if buffer[i] >= 0}
    replaces = {piece_of[v]: piece_of[p] for v, p in lives.step.assigned.tolist() if v in piece_of and p in piece_of}
    stays = (from_ == 0) & (to == lives.step.instants)
    allocator = BestFit()
    held = {int(i): allocator.take(float(size[i])) for i in counted if stays[i]}
    passing = [int(i) for i in counted if not stays[i]]
    # Buffers that end at an instant are given back before those that begin at it are taken.
    changes = sorted([(int(from_[i]), 1, i) for i in passing] + [(int(to[i]), 0, i) for i in passing])
    fusion_bytes = lives.fusion_buffer_bytes
    for _ in range(_SETTLING_STEPS):
        allocator.peak_bytes = least = allocator.in_use_bytes
        for instant, begins, number in changes:
            if fusion_bytes and instant >= lives.step.first_post:
                allocator.take(fusion_bytes)
                fusion_bytes = 0.0
            if begins:
                held[number] = allocator.take(float(size[number]))
                continue
            variable = replaces.get(number)
            if variable is not None:  # the piece stays, and the variable's old one goes
                held[number], held[variable] = held[variable], held[number]
            allocator.give_back(held.pop(number))
            least = min(least, allocator.in_use_bytes)
    return _InUse(least_bytes=least, most_bytes=allocator.peak_bytes)


class BestFit:
    """TensorFlow's best-fit allocator (BFC, `tsl/framework/bfc_allocator.cc`), with the sizes of its pieces only.

    It hands out the smallest free piece that is large enough, of the lowest address if several are, and cuts it only if the rest is
    as large as what is wanted, or 128 MiB: so pieces are up to twice as large as wanted. What is given back is joined with free
    neighbours.

    Attributes
    ----------
    in_use_bytes, peak_bytes
        Pieces handed out now, and the most so far.
    """

    def __init__(self) -> None:
        self.in_use_bytes = 0
        self.peak_bytes = 0
        self._region = _FIRST_REGION
        self._regions = 0
        self._free: list[tuple[int, int]] = []  # (size, address), sorted
        self._size: dict[int, int] = {}  # of every piece, by its address
        self._free_at: set[int] = set()
        self._before: dict[int, int] = {}  # address of the piece before

    def take(self, wanted_bytes: float) -> int:
        """Address of a piece of at least so many bytes."""
        size_needed = max(-(-int(wanted_bytes) // _GRAIN) * _GRAIN, _GRAIN)
        place = bisect_left(self._free, (size_needed, -1))
        if place == len(self._free):
            self._extend(size_needed)
            place = bisect_left(self._free, (size_needed, -1))
        size, address = self._free.pop(place)
        self._free_at.discard(address)
        if size >= 2 * size_needed or size - size_needed >= _LARGEST_REST:
            after = address + size
            self._size[address] = size_needed
            self._add(address + size_needed, size - size_needed, address)
            if after in self._before:
                self._before[after] = address + size_needed
            size = size_needed
        self.in_use_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        return address

    def give_back(self, address: int) -> None:
        """Free a piece."""
        size = self._size[address]
        self.in_use_bytes -= size
        after, before = address + size, self._before.get(address)
        if after in self._free_at:
            size += self._unlisted(after)
            del self._size[after], self._before[after]
        if before in self._free_at:
            size += self._unlisted(before)
            del self._size[address], self._before[address]
            address = before
        self._size[address] = size
        if address + size in self._before:
            self._before[address + size] = address
        self._free_at.add(address)
        insort(self._free, (size, address))

    def _unlisted(self, address: int) -> int:
        """Take a piece off the list of free ones; returns its size."""
        size = self._size[address]
        self._free.pop(bisect_left(self._free, (size, address)))
        self._free_at.discard(address)
        return size

    def _extend(self, least_bytes: int) -> None:
        grown = self._region
        while grown < least_bytes:
            grown *= 2
        self._regions += 1
        self._add(self._regions * _FAR, grown, None)
        # A region that had to grow for one want is the measure of the next; otherwise the next is twice as large.
        self._region = grown if grown > self._region else 2 * grown

    def _add(self, address: int, size: int, before: int | None) -> None:
        self._size[address] = size
        if before is not None:
            self._before[address] = before
        self._free_at.add(address)
        insort(self._free, (size, address))
