"""What TensorFlow's best-fit allocator (BFC, `tsl/framework/bfc_allocator.cc`) has in use for a sequence of wants.

It hands out the smallest free piece that is large enough, of the lowest address if several are, and cuts it only if the rest is
as large as what is wanted, or 128 MiB: so pieces are up to twice as large as wanted. What is given back is joined with free
neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, insort

_GRAIN = 256
_FIRST_REGION = 2 << 20
_LARGEST_REST = 128 << 20
_FAR = 1 << 45  # regions are no neighbours


class BestFit:
    """The allocator, with the sizes of its pieces only.

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
        wanted = max(-(-int(wanted_bytes) // _GRAIN) * _GRAIN, _GRAIN)
        place = bisect_left(self._free, (wanted, -1))
        if place == len(self._free):
            self._extend(wanted)
            place = bisect_left(self._free, (wanted, -1))
        size, address = self._free.pop(place)
        self._free_at.discard(address)
        if size >= 2 * wanted or size - wanted >= _LARGEST_REST:
            after = address + size
            self._size[address] = wanted
            self._add(address + wanted, size - wanted, address)
            if after in self._before:
                self._before[after] = address + wanted
            size = wanted
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

    def _extend(self, wanted: int) -> None:
        grown = self._region
        while grown < wanted:
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
