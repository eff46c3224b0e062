"""``sharded_units_of(trace)``: the units of a profiled ``fully_shard`` job, from what FSDP2 marks on host threads.

Each unit gathers its parameters (``FSDP::all_gather``) and copies them to their places (``all_gather_copy_out``), in the forward
pass and, where it gave them up, in the backward pass again; after its backward pass it reduces its gradients
(``post_backward_reduce``), in HSDP in a second process group as well. What it computes lies between ``pre_forward`` and
``post_forward``, and behind ``pre_backward``. FSDP1 does not mark its units.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.readers.parameters import GRADIENT
from dpro_search.collect.trace import CollectiveKind, EventKind, TensorInfo, Trace
from dpro_search.graph.marked_spans import MarkedSpans, ThreadSpan

_MARK = re.compile(
    r"^FSDP::(?P<what>all_gather|all_gather_copy_out|post_backward_reduce|pre_backward|pre_forward|post_forward)"
    r"(?: \((?P<unit>.*)\))?$"
)
ROOT = "the root"  # the unit that the model itself is


@dataclass(frozen=True)
class Gather:
    """A unit gathers its parameters: the enqueue, the copy to their places, and the rank's part of the all-gather."""

    unit: str
    post: ThreadSpan
    copy_out: ThreadSpan
    part: int


@dataclass(frozen=True)
class Reduction:
    """A unit's gradients are reduced: the enqueue, and the rank's parts of the reduce-scatter and, in HSDP, of the all-reduce.

    `sizes_bytes` are those of the parts, -1 where they are not known.
    """

    unit: str
    post: ThreadSpan
    parts: tuple[int, ...]
    sizes_bytes: tuple[int, ...]


@dataclass(frozen=True)
class UnitPasses:
    """A unit's forward pass, and where its backward pass begins."""

    unit: str
    forward: ThreadSpan
    backward_us: float
    backward_thread: int


@dataclass(frozen=True)
class StepUnits:
    """A rank's step, each in the order of the enqueues, passes in that of the forward pass."""

    rank: int
    step: int
    forward: tuple[Gather, ...]
    backward: tuple[Gather, ...]
    reductions: tuple[Reduction, ...]
    passes: tuple[UnitPasses, ...] = ()

    @property
    def program(self) -> tuple[tuple[str, ...], ...]:
        """The order of units in each pass, which must be the same for all ranks and steps."""
        return tuple(tuple(each.unit for each in row) for row in (self.forward, self.backward, self.reductions))


@dataclass(frozen=True, kw_only=True)
class ShardedUnits:
    """The units of a job.

    Attributes
    ----------
    tensors
        A tensor for each unit, all its parameters, in the order of the forward pass; of unknown size: 0 bytes.
    steps
        By rank and step.
    hybrid
        Whether gradients are reduced in a second process group as well.
    why
        What is taken for granted, or why the units are not known.
    shared_by, numbers
        Ranks that share the parameters of a unit (None: not known), and the recorded ranks' numbers in the job.
    """

    tensors: tuple[TensorInfo, ...]
    steps: dict[tuple[int, int], StepUnits]
    hybrid: bool
    why: str
    shared_by: int | None = None
    numbers: tuple[int, ...] = ()

    @property
    def first(self) -> StepUnits:
        """Any step: they all do the same."""
        return next(iter(self.steps.values()))

    @property
    def sized(self) -> bool:
        """Whether the sizes of all units are known."""
        return bool(self.tensors) and all(tensor.size_bytes > 0 for tensor in self.tensors)


def sharded_units_of(trace: Trace) -> ShardedUnits:
    """The units of a job; none, with the reason, where they are not marked, or differ between ranks or steps."""
    spans = _UnitSpans(trace)
    units_of_step = {(rank, step): spans.of(rank, step) for rank in range(trace.meta.ranks) for step in spans.steps_of(rank)}
    unknown = ShardedUnits(tensors=(), steps={}, hybrid=False, why="")
    if not any(value.forward for value in units_of_step.values()):
        return _because(unknown, "the profile does not mark FSDP's units, as fully_shard (FSDP2) does: no gather can be moved")
    first = next(iter(units_of_step.values()))
    if any(value.program != first.program for value in units_of_step.values()):
        return _because(unknown, "the units gather in an order that changes between ranks or steps: their gathers cannot be moved")
    given = _given(trace, [each.unit for each in first.forward])
    sizes = {each.unit: max(int(trace.events.size_bytes[each.part]), given.get(each.unit, 0), 0) for each in first.forward}
    tensors = tuple(TensorInfo(name=unit, node="", dtype="float32", shape=(), size_bytes=size) for unit, size in sizes.items())
    hybrid = any(len(each.parts) > 1 for each in first.reductions)
    why = f"{len(tensors)} units as FSDP marks them" + (", reduced over a second process group as well" if hybrid else "")
    return ShardedUnits(
        tensors=tensors,
        steps=units_of_step,
        hybrid=hybrid,
        why=why,
        shared_by=_shared_by(trace, first, hybrid=hybrid),
        numbers=tuple(trace.meta.numbers),
    )


def _shared_by(trace: Trace, step: StepUnits, *, hybrid: bool) -> int | None:
    """Ranks of the group that gathers the first unit; of a job with one group all ranks, where the profile does not say."""
    group = int(trace.events.group[step.forward[0].part])
    known = trace.groups[group] if group >= 0 else None
    size = 0 if known is None else len(known.ranks) or known.size
    if size > 0:
        return size
    return None if hybrid else max(trace.meta.world_size or 0, trace.meta.ranks)


def _given(trace: Trace, units: list[str]) -> dict[str, int]:
    """Bytes of the parameters that were given to `import`, by the unit whose path is the longest that leads to them."""
    size_bytes_of: dict[str, int] = {}
    for tensor in trace.tensors:
        if tensor.node == GRADIENT:
            owners = [unit for unit in units if tensor.name.startswith(f"{unit}.")]
            owner = max(owners, key=len, default=ROOT)
            size_bytes_of[owner] = size_bytes_of.get(owner, 0) + tensor.size_bytes
    return size_bytes_of


def _because(unknown: ShardedUnits, why: str) -> ShardedUnits:
    return ShardedUnits(tensors=unknown.tensors, steps=unknown.steps, hybrid=unknown.hybrid, why=why)


class _UnitSpans(MarkedSpans):
    """FSDP's marks."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace)
        self._marks = {name: match for name in trace.names if (match := _MARK.match(name))}

    def of(self, rank: int, step: int) -> StepUnits:
        gathers, copies = self._marked("all_gather", rank, step), self._marked("all_gather_copy_out", rank, step)
        backward_us = min((span.start_us for _, span in self._marked("pre_backward", rank, step)), default=np.inf)
        left = list(copies)
        forward: list[Gather] = []
        backward: list[Gather] = []
        for unit, post in gathers:
            copied = next((pair for pair in left if pair[0] == unit and pair[1].start_us >= post.start_us), None)
            part = self._parts(post, CollectiveKind.ALL_GATHER)
            if copied is None or not part:
                continue
            left.remove(copied)
            (forward if post.start_us < backward_us else backward).append(Gather(unit, post, copied[1], part[0]))
        reductions = []
        for unit, post in self._marked("post_backward_reduce", rank, step):
            parts = (*self._parts(post, CollectiveKind.REDUCE_SCATTER), *self._parts(post, CollectiveKind.ALL_REDUCE))
            if parts:
                sizes = self.trace.events.size_bytes[list(parts)].tolist()
                reductions.append(Reduction(unit, post, parts, tuple(sizes)))
        return StepUnits(rank, step, tuple(forward), tuple(backward), tuple(reductions), tuple(self._passes(rank, step)))

    def _passes(self, rank: int, step: int) -> Iterator[UnitPasses]:
        """The units that run once forward and once backward."""
        before, after, back = (dict(self._once(what, rank, step)) for what in ("pre_forward", "post_forward", "pre_backward"))
        for unit, begun in before.items():
            ended, backward = after.get(unit), back.get(unit)
            if ended is None or backward is None or ended.thread != begun.thread or not begun.end_us <= ended.start_us:
                continue
            forward = self.between(rank, begun.thread, begun.end_us, ended.start_us)
            yield UnitPasses(unit, forward, backward.end_us, backward.thread)

    def _once(self, what: str, rank: int, step: int) -> list[tuple[str, ThreadSpan]]:
        marked = self._marked(what, rank, step)
        count = Counter(unit for unit, _ in marked)
        return [(unit, span) for unit, span in marked if count[unit] == 1]

    def _marked(self, what: str, rank: int, step: int) -> list[tuple[str, ThreadSpan]]:
        names = {name: match["unit"] or ROOT for name, match in self._marks.items() if match["what"] == what}
        rows = self.rows(tuple(names), rank, step).tolist()
        return [(names[self.trace.names[self.trace.events.name[row]]], self.span(row)) for row in rows]

    def _parts(self, post: ThreadSpan, kind: CollectiveKind) -> tuple[int, ...]:
        events = self.trace.events
        return tuple(
            event for event in post.events if events.kind[event] == EventKind.COLLECTIVE and events.collective_kind[event] == kind
        )


def unit_groups(units: Sequence[str], together: int | None) -> tuple[tuple[str, ...], ...]:
    """Groups of units that are wrapped together: runs of `together` units in the order of the forward pass, the root alone.

    Empty if each unit is wrapped by itself.
    """
    if not together or together < 2:
        return ()
    inner = [unit for unit in units if unit != ROOT]
    root = [(ROOT,)] if ROOT in units else []
    return (*root, *(tuple(inner[i : i + together]) for i in range(0, len(inner), together)))
