"""``peak_bytes(memory, changes)``: the most that a plan's ranks allocate, from what was counted while the job was recorded.

What a plan keeps longer, gathers earlier or computes again adds to the counts, or takes from them, for a stretch of the recorded
time: `units_changes` for `fully_shard`, `buckets_changes` for DistributedDataParallel. Blocks that the allocator holds and no
tensor uses are not in these counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dpro_search.collect.trace import EventKind, MemorySamples, TensorType, Trace
from dpro_search.graph.gradient_events import Gradients
from dpro_search.graph.sharded_units import Gather, ShardedUnits, StepUnits, UnitPasses
from dpro_search.space.recorded.units import UnitPlan

_HOST = (EventKind.OP, EventKind.RUNTIME, EventKind.SYNC)


@dataclass(frozen=True)
class MemoryChange:
    """Bytes that a rank allocates more, or fewer (below 0), between two recorded instants."""

    rank: int
    begin_us: float
    end_us: float
    size_bytes: float


def peak_bytes(memory: MemorySamples, changes: Iterable[MemoryChange] = ()) -> int | None:
    """The most of all ranks; None where nothing was counted."""
    if not len(memory):
        return None
    by_rank: dict[int, list[MemoryChange]] = {}
    for change in changes:
        by_rank.setdefault(change.rank, []).append(change)
    most = 0.0
    for rank in np.unique(memory.rank).tolist():
        rows = np.flatnonzero(memory.rank == rank)
        rows = rows[np.argsort(memory.time_us[rows], kind="stable")]
        steps = np.zeros(len(rows) + 1)
        for change in by_rank.get(rank, ()):
            first, last = np.searchsorted(memory.time_us[rows], (change.begin_us, change.end_us)).tolist()
            steps[first] += change.size_bytes
            steps[max(last, first)] -= change.size_bytes
        most = max(most, float((memory.allocated_bytes[rows] + np.cumsum(steps)[:-1]).max()))
    return max(round(most), 0)


def units_changes(trace: Trace, units: ShardedUnits, plan: UnitPlan, *, shared_by: int | None) -> list[MemoryChange] | None:
    """Memory that a plan of a fully sharded job changes; None if the profile does not tell it.

    `shared_by` ranks share the parameters under the plan; None: as many as in the recording.
    """
    if not units.sized and plan != UnitPlan():
        return None
    sizes = {tensor.name: float(tensor.size_bytes) for tensor in units.tensors}
    changes: list[MemoryChange] = []
    states: dict[int, MemoryChange] = {}
    counts = _Counts(trace)
    for (rank, step), steps in units.steps.items():
        one = _RankMemory(rank, steps, sizes, counts.end_us(rank, step))
        changes += [*one.kept(plan), *one.ahead(plan), *one.together(plan)]
        for number, passes in enumerate(steps.passes):
            if passes.unit in plan.again:
                saved = counts.saved_bytes(rank, passes, steps.passes[number + 1 : number + 2])
                if saved is None:
                    return None
                changes.append(MemoryChange(rank, passes.forward.end_us, passes.backward_us, -saved))
        if shared_by is not None and units.shared_by is not None and shared_by != units.shared_by:
            more = 1 / shared_by - 1 / units.shared_by
            changes += one.shared_gradients(more)
            if rank not in states:
                states[rank] = one.shared_state(counts, more, units.shared_by)
    return [*changes, *states.values()]


def buckets_changes(
    trace: Trace, gradients: Gradients, *, as_views: bool, half: bool, hook_bytes: int = 0
) -> list[MemoryChange] | None:
    """Memory that a plan of a DistributedDataParallel job changes; None if the profile does not tell it.

    Gradients that are views of buckets take no memory of their own from when they are ready to the end of the step; a bucket of
    halves lives from its post to the end of its all-reduce. What a communication hook keeps from step to step (`hook_bytes` of each
    rank) is always there.
    """
    if not gradients.known and (as_views or half):
        return None
    sizes = [float(tensor.size_bytes) for tensor in gradients.tensors]
    kept = {rank for rank, _ in gradients.steps} if hook_bytes else set()
    changes, counts = [MemoryChange(rank, -np.inf, np.inf, hook_bytes) for rank in sorted(kept)], _Counts(trace)
    for (rank, step), one in gradients.steps.items():
        end_us = counts.end_us(rank, step)
        if as_views:
            changes += [MemoryChange(rank, ready.end_us, end_us, -size) for ready, size in zip(one.ready, sizes, strict=False)]
        if half:
            buckets = np.bincount(gradients.bucket_of, weights=sizes)
            for post, part, size in zip(one.posts, one.parts, buckets.tolist(), strict=False):
                changes.append(MemoryChange(rank, post.start_us, float(trace.events.end_us[part]), size / 2))
    return changes


class _Counts:
    """Allocated memory over time."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        order = np.lexsort((trace.memory.time_us, trace.memory.rank))
        self._rank, self._time_us = trace.memory.rank[order], trace.memory.time_us[order]
        self._bytes = trace.memory.allocated_bytes[order]

    def end_us(self, rank: int, step: int) -> float:
        """When a step of a rank ends, on its host and its device."""
        events, steps = self._trace.events, self._trace.steps
        host = (events.rank == rank) & (events.step == step) & np.isin(events.kind, _HOST)
        device = (steps.rank == rank) & (steps.index == step)
        return max(float(events.end_us[host].max(initial=-np.inf)), float(steps.end_us[device].max(initial=-np.inf)))

    def at(self, rank: int, time_us: float) -> float:
        """Bytes of a rank at an instant: the last count before it, else the first."""
        first, after = np.searchsorted(self._rank, (rank, rank + 1)).tolist()
        if first == after:
            return 0.0
        place = first + int(np.searchsorted(self._time_us[first:after], time_us, side="right")) - 1
        return float(self._bytes[max(place, first)])

    def saved_bytes(self, rank: int, passes: UnitPasses, following: Sequence[UnitPasses]) -> float | None:
        """Memory that a unit's forward pass leaves allocated, without its result, the next unit's input; None: not known."""
        left = self.at(rank, passes.forward.end_us) - self.at(rank, passes.forward.start_us)
        result = self._input_bytes(rank, following[0]) if following else 0.0
        return None if result is None else max(left - result, 0.0)

    def _input_bytes(self, rank: int, passes: UnitPasses) -> float | None:
        """Bytes of the first tensor of the first op of a unit."""
        events = self._trace.events
        inside = (events.rank == rank) & (events.stream == passes.forward.thread)
        inside &= (events.start_us >= passes.forward.start_us) & (events.end_us <= passes.forward.end_us) & (events.shapes >= 0)
        rows = np.flatnonzero(inside)
        for row in rows[np.argsort(events.start_us[rows], kind="stable")].tolist():
            shapes = self._trace.shapes[events.shapes[row]]
            if shapes and shapes[0]:
                dtype = self._trace.dtypes[events.dtype[row]] if events.dtype[row] >= 0 else "float32"
                return float(TensorType(dtype, tuple(shapes[0])).size_bytes)
        return None


@dataclass(frozen=True)
class _RankMemory:
    """A rank's step."""

    rank: int
    steps: StepUnits
    sizes: dict[str, float]
    end_us: float

    def kept(self, plan: UnitPlan) -> Iterator[MemoryChange]:
        """Units that keep their parameters from the forward to the backward pass."""
        given_up = {each.unit: each.forward.end_us for each in self.steps.passes}
        first = {each.unit: each.copy_out.end_us for each in self.steps.forward}
        for each in self.steps.backward:
            if each.unit in plan.kept and each.unit in first:
                begin_us = given_up.get(each.unit, first[each.unit])
                yield MemoryChange(self.rank, begin_us, each.post.start_us, self.sizes[each.unit])

    def ahead(self, plan: UnitPlan) -> Iterator[MemoryChange]:
        """Parameters that are gathered earlier than recorded."""
        if plan.ahead:
            yield from self._earlier(self.steps.forward, plan.ahead)
        if plan.backward_ahead > 1:
            yield from self._earlier(self.steps.backward, plan.backward_ahead - 1)

    def _earlier(self, gathers: Sequence[Gather], ahead: int) -> Iterator[MemoryChange]:
        for number, each in enumerate(gathers[1:], start=1):
            begin_us = gathers[max(number - ahead, 0)].copy_out.end_us
            if begin_us < each.post.start_us:
                yield MemoryChange(self.rank, begin_us, each.post.start_us, self.sizes[each.unit])

    def together(self, plan: UnitPlan) -> Iterator[MemoryChange]:
        """Units that are gathered with the first of their group, given up with its last, and reduced with it."""
        for group in plan.groups:
            for gathers in (self.steps.forward, self.steps.backward):
                members = [each for each in gathers if each.unit in group]
                for each, following in pairwise(members):
                    yield MemoryChange(self.rank, members[0].post.start_us, following.post.start_us, self.sizes[following.unit])
                    yield MemoryChange(self.rank, following.post.start_us, members[-1].post.end_us, self.sizes[each.unit])
            reduced = [reduction for reduction in self.steps.reductions if reduction.unit in group]
            for reduction in reduced[:-1]:
                yield MemoryChange(self.rank, reduction.post.end_us, reduced[-1].post.end_us, self.sizes[reduction.unit])

    def shared_state(self, counts: _Counts, more: float, recorded: int) -> MemoryChange:
        """Other shards of the parameters and of what the optimizer keeps of each, which are always there.

        What it keeps is as many times the parameters as fit in what is allocated when the step begins.
        """
        total = sum(self.sizes.values())
        times = max(int(counts.at(self.rank, self.steps.forward[0].post.start_us) / (total / recorded)), 1)
        return MemoryChange(self.rank, -np.inf, np.inf, times * total * more)

    def shared_gradients(self, more: float) -> Iterator[MemoryChange]:
        """Other shards of the gradients, from their reduction to the end of the step."""
        for each in self.steps.reductions:
            yield MemoryChange(self.rank, each.post.end_us, self.end_us, self.sizes[each.unit] * more)
