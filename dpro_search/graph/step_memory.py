"""The buffers that a training step takes on a rank, who writes and reads them, and when; made by `graph/buffers.py`."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Ints
from dpro_search.errors import InputError


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Buffers of one rank's step. An instant is a place in the order in which ops began and ended."""

    # op_name, begin, end, backward: Ops of the rank, the instants at which they began and ended (-1: did not run), and whether they
    # wait for gradients, [ops].
    op_name: tuple[str, ...]
    begin: Ints
    end: Ints
    backward: npt.NDArray[np.bool_]
    # workspace_bytes, workspace_scales: What an op takes only while it runs, and whether that grows with the batch, [ops].
    workspace_bytes: Floats
    workspace_scales: npt.NDArray[np.bool_]
    # size_bytes, scales, is_float32, persistent: Buffers: size, whether it grows with the batch, element type, whether it stays
    # from step to step, [buffers].
    size_bytes: Floats
    scales: npt.NDArray[np.bool_]
    is_float32: npt.NDArray[np.bool_]
    persistent: npt.NDArray[np.bool_]
    # writer_ptr, writer_op: Ops that write a buffer, the one that allocates it first; none if it is persistent. CSR.
    writer_ptr: Ints
    writer_op: Ints
    # use_buffer, use_op: (buffer, op that reads it), [uses].
    use_buffer: Ints
    use_op: Ints
    # Rows of (buffer, variable's buffer): the first takes the place of the second once its last use has ended, [assignments, 2].
    assigned: Ints
    # gradient_bytes, first_post: Sizes of the communicated gradients, [tensors], and the instant at which the first of them is
    # enqueued.
    gradient_bytes: Floats
    first_post: int
    instants: int  # How many there are.
    batch: int  # Samples of a step, by the shapes of its inputs; 0: not known, and nothing grows.

    def mask(self, names: Collection[str], what: str) -> npt.NDArray[np.bool_]:
        """Which ops are named; raises `InputError`, naming the field `what`, if a name is not an op's."""
        selected = np.zeros(len(self.op_name), dtype=np.bool_)
        for name in names:
            if name not in self._number:
                raise InputError(f"{what}: op '{name}' is not in the recorded graph")
            selected[self._number[name]] = True
        return selected

    def lifetimes(self) -> tuple[Ints, Ints]:
        """The instants from which and before which each buffer is alive, [buffers] each: arrays of the caller's own."""
        from_, to = self._lifetimes
        return from_.copy(), to.copy()

    def taken_bytes(self) -> float:
        """The most that is alive at a time, workspaces left out."""
        from_, to = self._lifetimes
        change = np.bincount(from_, self.size_bytes, self.instants + 1) - np.bincount(to, self.size_bytes, self.instants + 1)
        return float(np.cumsum(change).max())

    def all_writers(self, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Buffers that are written, and by chosen ops only, [buffers]."""
        others = np.bincount(self._writer_buffer, ~chosen[self.writer_op], len(self.size_bytes))
        return np.asarray((others == 0) & (np.diff(self.writer_ptr) > 0))

    def writers(self, buffer: int) -> Ints:
        """Ops that write a buffer."""
        return self.writer_op[self.writer_ptr[buffer] : self.writer_ptr[buffer + 1]]

    def last_written(self) -> Ints:
        """The instant at which the last op that writes a buffer began; 0 if there is none, [buffers]."""
        written_us = np.zeros(len(self.size_bytes), dtype=np.int64)
        np.maximum.at(written_us, self._writer_buffer, self.begin[self.writer_op])
        return written_us

    def last_end(self, buffer: Ints, op: Ints) -> Ints:
        """The instant at which the last of some uses and of the writers of each buffer ends, [buffers]."""
        end_us = np.zeros(len(self.size_bytes), dtype=np.int64)
        np.maximum.at(end_us, self._writer_buffer, self.end[self.writer_op])
        np.maximum.at(end_us, buffer, self.end[op])
        return end_us

    @functools.cached_property
    def buffers_read(self) -> list[list[int]]:
        """Buffers that each op reads."""
        buffers_of_op: list[list[int]] = [[] for _ in self.op_name]
        for buffer, op in zip(self.use_buffer.tolist(), self.use_op.tolist(), strict=True):
            buffers_of_op[op].append(buffer)
        return buffers_of_op

    @functools.cached_property
    def _number(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.op_name)}

    @functools.cached_property
    def _writer_buffer(self) -> Ints:
        return np.repeat(np.arange(len(self.size_bytes)), np.diff(self.writer_ptr))

    @functools.cached_property
    def _lifetimes(self) -> tuple[Ints, Ints]:
        from_ = np.zeros(len(self.size_bytes), dtype=np.int64)
        written = np.diff(self.writer_ptr) > 0
        from_[written] = self.begin[self.writer_op[self.writer_ptr[:-1][written]]]
        to = np.where(self.persistent, self.instants, self.last_end(self.use_buffer, self.use_op))
        return from_, to
