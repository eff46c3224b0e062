"""`Rows`: lists of labels, one for each op, that can be edited; compiled passes read them as ``idx[begin[op]:end[op]]``."""

from __future__ import annotations

import numpy as np

from dpro_search.space.replay_graph import Int32s, csr


class Rows:
    """Begins as CSR; a row that outgrows its place moves to the end of the pool.

    Attributes
    ----------
    begin, end
        Place of each row, [n].
    idx
        The pool.
    """

    def __init__(self, ptr: Int32s, idx: Int32s) -> None:
        self.begin, self.end, self.idx = ptr[:-1].copy(), ptr[1:].copy(), idx.copy()
        self._room = np.diff(ptr)
        self._used = len(idx)

    def row(self, op: int) -> Int32s:
        """An op's entries."""
        return self.idx[self.begin[op] : self.end[op]]

    def replace(self, op: int, values: Int32s) -> None:
        """Give an op other entries."""
        if len(values) > self._room[op]:
            room = len(values) + 4  # the next ones may stay
            if self._used + room > len(self.idx):
                self.idx = np.concatenate((self.idx, np.zeros(max(len(self.idx) // 2, room), np.int32)))
            self.begin[op], self._room[op] = self._used, room
            self._used += room
        self.idx[self.begin[op] : self.begin[op] + len(values)] = values
        self.end[op] = self.begin[op] + len(values)

    def add(self, op: int, value: int) -> None:
        """Add an entry to an op's row."""
        self.replace(op, np.append(self.row(op), np.int32(value)))

    def remove(self, op: int, value: int) -> None:
        """Take an entry, once, off an op's row."""
        row = self.row(op)
        self.replace(op, np.delete(row, np.flatnonzero(row == value)[0]))

    def compact(self) -> tuple[Int32s, Int32s]:
        """The rows as CSR."""
        lengths = self.end - self.begin
        owner = np.repeat(np.arange(len(lengths)), lengths)
        place = np.repeat(self.begin, lengths) + np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return csr(owner, self.idx[place], len(lengths))
