"""Peak memory of a training step by liveness: what is alive at each instant, and what plans do to that.

    peak = peak_bytes(graph.memory, micro_batches=2)    # graph: DataflowGraph; its memory is None where shapes are not known
    plan_bytes = recorded_bytes + peak.bytes - peak_bytes(graph.memory).bytes

A buffer lives from the start of the op that allocates it to the end of the last op that reads it, in the recorded order of ops;
parameters, optimizer state and the batch live always. Buffers that depend on the batch grow and shrink with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Ints
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import StepMemory

_NEVER = np.iinfo(np.int64).max
_FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class MemoryPeak:
    """The most that a step's tensors take at a time, and what it consists of."""

    bytes: float  # The sum of the other numbers.
    persistent_bytes: float  # Parameters, optimizer state, the batch, the fusion buffer, sums of accumulated gradients.
    activation_bytes: float  # Buffers that grow with the batch.
    gradient_bytes: float  # Buffers that do not: gradients of parameters, temporaries of updates.
    workspace_bytes: float  # Workspace of ops while they run.
    op: str  # An op that runs then; "" if none does.


class Changes(TypedDict, total=False):
    """Changes that plans, and other jobs, make to a step's memory."""

    # Names of forward ops whose results are dropped after the last forward op that reads them, and computed again for the first
    # backward op that does. A buffer that another op writes as well, in place, is dropped if that one is named, too.
    recomputed: Collection[str]
    micro_batches: int  # The batch is computed in so many parts; gradients are summed up beside them.
    # Names of ops that compute in bfloat16: their results take half, and a tensor that crosses the border has a copy in the other
    # type from the first to the last op that reads it there. Parameters stay in float32.
    bfloat16: Collection[str]
    batch_factor: float  # Batch over the recorded one.
    fusion_buffer_bytes: float  # Taken by the communication library from the framework's allocator.


def peak_bytes(step: StepMemory, *, smallest_bytes: float = 0.0, **changes: Unpack[Changes]) -> MemoryPeak:
    """Peak memory of a rank's step under `Changes`.

    Parameters
    ----------
    smallest_bytes
        Buffers below this size do not count. (TensorFlow's own count on a CPU leaves out those below 256 KiB.)

    Raises
    ------
    InputError
        An op is not in the graph, or a number is not positive.
    """
    return lives_under(step, changes).peak(smallest_bytes)


def cast_elements(step: StepMemory, bfloat16: Collection[str]) -> dict[str, float]:
    """Elements that are cast when ops compute in bfloat16, by op: of what it is the first of them to read, and of what it writes.

    A tensor is cast once, however many ops need it in the other type. Raises `InputError` if an op is not in the graph.

    Parameters
    ----------
    bfloat16
        Names of the ops.
    """
    half, crossing = _border(step, step.mask(bfloat16, "bfloat16"))
    buffer, op = step.use_buffer[crossing], step.use_op[crossing]
    order = np.argsort(step.begin[op], kind="stable")
    cast, place = np.unique(buffer[order], return_index=True)
    elements: dict[str, float] = {}
    for number, reader in zip(cast.tolist(), op[order][place].tolist(), strict=True):
        name = step.op_name[step.writers(number)[-1] if half[number] else reader]
        elements[name] = elements.get(name, 0.0) + float(step.size_bytes[number]) / _FLOAT32_BYTES
    return elements


def lives_under(step: StepMemory, changes: Changes) -> Lives:
    """Pieces of a rank's memory in a step; raises as `peak_bytes`."""
    micro_batches, batch_factor = changes.get("micro_batches", 1), changes.get("batch_factor", 1.0)
    recomputed, bfloat16 = changes.get("recomputed", ()), changes.get("bfloat16", ())
    if micro_batches < 1 or batch_factor <= 0:
        raise InputError(f"micro_batches must be >= 1 and batch_factor > 0, not {micro_batches} and {batch_factor}")
    lives = Lives(step)
    factor = batch_factor / micro_batches  # the whole batch stays, whatever it is divided into
    size = step.size_bytes * np.where(step.scales, np.where(step.persistent, batch_factor, factor), 1.0)
    from_, to = step.lifetimes()
    if bfloat16:
        size = _in_bfloat16(step, lives, size, to, step.mask(bfloat16, "bfloat16"))
    workspace = step.workspace_bytes * np.where(step.workspace_scales, factor, 1.0)
    if recomputed:
        _drop(step, lives, (size, workspace), to, step.mask(recomputed, "recomputed"))
    lives.add(size, from_, to, np.where(step.persistent, _PERSISTENT, _category(step)), np.arange(len(size)))
    lives.add(workspace, step.begin, step.end, _WORKSPACE)
    sums = step.gradient_bytes if micro_batches > 1 else np.zeros(0)
    lives.add(sums, np.zeros(len(sums), np.int64), np.full(len(sums), step.instants), _PERSISTENT)
    lives.fusion_buffer_bytes = changes.get("fusion_buffer_bytes", 0.0)
    return lives


_PERSISTENT, _ACTIVATION, _GRADIENT, _WORKSPACE = range(4)


class Lives:
    """Pieces of memory with the instants between which they are alive, and the fusion buffer."""

    def __init__(self, step: StepMemory) -> None:
        self.fusion_buffer_bytes = 0.0
        self.step = step
        self._parts: list[tuple[Floats, Ints, Ints, Ints, Ints]] = []

    def add(self, size: Floats, from_: Ints, to: Ints, category: Ints | int, buffer: Ints | int = -1) -> None:
        """Pieces [n] that are alive from an instant to before another; one without a lifetime takes nothing."""
        some = (to > from_) & (size > 0)
        category, buffer = (np.broadcast_to(column, size.shape)[some] for column in (category, buffer))
        self._parts.append((size[some], from_[some], to[some], category, buffer))

    @property
    def columns(self) -> tuple[Floats, Ints, Ints, Ints, Ints]:
        """Size, first instant, instant after the last, category and buffer (-1: none) of all pieces, [pieces] each."""
        size, from_, to, category, buffer = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        return size, from_, to, category, buffer

    def peak(self, smallest_bytes: float) -> MemoryPeak:
        """The first instant with the most alive."""
        size, from_, to, category, _ = self.columns
        size = np.where(size >= smallest_bytes, size, 0.0)
        change = np.bincount(from_, size, self.step.instants + 1) - np.bincount(to, size, self.step.instants + 1)
        instant = int(np.cumsum(change[:-1]).argmax())
        alive = (from_ <= instant) & (instant < to)
        parts = np.bincount(category[alive], size[alive], 4)
        parts[_PERSISTENT] += self.fusion_buffer_bytes
        running = np.flatnonzero((self.step.begin <= instant) & (instant < self.step.end))
        return MemoryPeak(
            bytes=float(parts.sum()),
            persistent_bytes=float(parts[_PERSISTENT]),
            activation_bytes=float(parts[_ACTIVATION]),
            gradient_bytes=float(parts[_GRADIENT]),
            workspace_bytes=float(parts[_WORKSPACE]),
            op=self.step.op_name[running[self.step.begin[running].argmax()]] if len(running) else "",
        )


def _category(step: StepMemory) -> Ints:
    """Category of each buffer, [buffers]; copies of buffers and second lives have the same."""
    return np.where(step.scales, _ACTIVATION, _GRADIENT)


def _in_bfloat16(step: StepMemory, lives: Lives, size: Floats, to: Ints, chosen: npt.NDArray[np.bool_]) -> Floats:
    """Sizes of the buffers; copies that cross the border are added to `lives`, and end the lives `to` of what they replace."""
    half, crossing = _border(step, chosen)
    size = np.where(half, size / 2, size)
    buffer, op = step.use_buffer[crossing], step.use_op[crossing]
    first, last = np.full(len(size), _NEVER), np.zeros(len(size), np.int64)
    np.minimum.at(first, buffer, step.begin[op])
    np.maximum.at(last, buffer, step.end[op])
    copied = np.flatnonzero(last > 0)
    lives.add(np.where(half, size * 2, size / 2)[copied], first[copied], last[copied], _category(step)[copied])
    replaced = copied[~step.persistent[copied]]
    kept = step.last_end(step.use_buffer[~crossing], step.use_op[~crossing])
    to[replaced] = np.maximum(kept[replaced], first[replaced] + 1)
    return size


def _border(step: StepMemory, chosen: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Buffers that are in bfloat16 when ops compute in it, [buffers], and uses that need the other type, [uses]."""
    half = step.is_float32 & ~step.persistent & step.all_writers(chosen)
    return half, step.is_float32[step.use_buffer] & (chosen[step.use_op] != half[step.use_buffer])


def _drop(step: StepMemory, lives: Lives, taken: tuple[Floats, Floats], to: Ints, chosen: npt.NDArray[np.bool_]) -> None:
    """End the lives `to` of recomputed buffers with the forward pass, in place; their second lives are added to `lives`.

    `taken` are the sizes of buffers and of the ops' workspaces.

    To be computed again, a buffer needs what its ops read: a kept buffer must last until then, and a dropped one must have been
    computed again by then as well.
    """
    size, workspace = taken
    backward = step.backward[step.use_op]
    needed = np.full(len(size), _NEVER)
    np.minimum.at(needed, step.use_buffer[backward], step.begin[step.use_op[backward]])
    dropped = ~step.persistent & step.all_writers(chosen & ~step.backward)
    forward_end = step.last_end(step.use_buffer[~backward], step.use_op[~backward])
    reads = step.buffers_read
    again: list[tuple[int, int, int]] = []
    candidates = np.flatnonzero(dropped)
    written = step.last_written()
    done: set[int] = set()
    for buffer in candidates[np.argsort(-written[candidates], kind="stable")].tolist():  # what is needed comes after what needs it
        done.add(buffer)
        last, since = int(to[buffer]), int(needed[buffer])
        to[buffer] = min(int(forward_end[buffer]), last)
        if since == _NEVER:
            continue
        again.append((buffer, since, max(last, since + 1)))
        writers = step.writers(buffer)
        for source in set(itertools.chain.from_iterable(reads[op] for op in writers)) - {buffer}:
            needed[source] = min(int(needed[source]), since)
            if source in done:  # it was written over since, and is wanted as it was before
                again.append((source, since, since + 1))
            elif not step.persistent[source]:
                to[source] = max(int(to[source]), since + 1)
        lives.add(workspace[writers], np.full(len(writers), since), np.full(len(writers), since + 1), _WORKSPACE)
    number, since_all, until_all = np.array(again, dtype=np.int64).reshape(-1, 3).T
    lives.add(size[number], since_all, until_all, _category(step)[number])
