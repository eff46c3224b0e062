"""One rank's part of a DistributedDataParallel or fully sharded job -> events on the job's clock; see `job` for what they are."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dpro_search.collect.assemble.common import event_columns
from dpro_search.collect.assemble.torch.files import FsdpUnit, RawRank
from dpro_search.collect.assemble.torch.spans import RankEvents, inside, labels
from dpro_search.collect.recorded_names import AUTOGRAD_FUNCTION, copies_of_gathers
from dpro_search.collect.trace import Codes, EventKind, Events, Ints, Role, TensorInfo
from dpro_search.errors import TraceFormatError

BUCKET = "bucket "
_READY = AUTOGRAD_FUNCTION + "torch::autograd::AccumulateGrad"
_COPY_OF_BUCKET = "ddp.reducer::copy_bucket_to_grad"
_USED_BYTES = 4  # of DDP's note for a parameter whether it was used
ROOT = "the root"  # the unit of the model itself
AGAIN = " for backward"  # ends the name of an all-gather of what was given up after the forward pass
_ANNOTATION = "FSDP::"
_UNIT = r"(?: \((?P<unit>[^()]*)\))?(?: \[.*\])?"
_COPY_OUT = re.compile(rf"FSDP::all_gather_copy_out{_UNIT}")
# Enqueues, by the innermost annotation around them.
_GATHER = re.compile(rf"FSDP::all_gather{_UNIT}/c10d::_allgather_base_")
_SCATTER = re.compile(rf"FSDP::post_backward_reduce{_UNIT}/c10d::_reduce_scatter_base_")


class DdpEvents(RankEvents):
    """Gradients, each with the all-reduce of its bucket; and the collectives of the forward pass."""

    @cached_property
    def _ready(self) -> npt.NDArray[np.bool_]:
        return self._outer & self._spans.named(_READY)

    @cached_property
    def _size_bytes(self) -> Ints:
        return np.array([tensor.size_bytes for tensor in self._tensors], dtype=np.int64)

    @cached_property
    def _bucket_of(self) -> Ints:
        return np.array([int(tensor.node.removeprefix(BUCKET)) for tensor in self._tensors], dtype=np.int64)

    def _shown(self) -> npt.NDArray[np.bool_]:
        return self._spans.outermost(self._spans.is_op)

    def _copies(self, ops: Ints, names: list[str]) -> dict[str, Codes | Ints]:
        return {"role": np.array([Role.COPY if name.endswith(_COPY_OF_BUCKET) else Role.UNKNOWN for name in names], dtype=np.int8)}

    def _communication(self, step: int) -> list[Events]:
        """Gradients and collectives of a step: DDP's buckets, what else it reduces at the end, and the forward pass's."""
        in_step = np.flatnonzero(self._step[self._enqueues] == step)
        in_backward = inside(self._spans, self._enqueues[in_step], self._ready)
        buckets, ddp = int(self._bucket_of.max()) + 1, self._rank.ddp
        # After the buckets, DDP may communicate which parameters were used.
        reduced, extra = np.split(in_step[in_backward], [buckets])
        others = in_step[~in_backward]
        if len(reduced) != buckets or len(extra) > ddp.find_unused_parameters:
            raise TraceFormatError(
                f"{self._rank.folder}: step {step} all-reduced {len(reduced) + len(extra)} buckets, DDP has {buckets}; "
                "is the model frozen or rebuilt while it trains, or has its communication hook more than one collective a bucket?"
            )
        which = np.concatenate((reduced, others, extra))
        executed = self._executed_bytes(in_step)
        sizes = (
            self._believed_bytes(step, len(others), len(extra)) if executed is None else executed[np.searchsorted(in_step, which)]
        )
        return [self._gradients(step, reduced), *self._collectives(step, which, self._enqueued_names(which), sizes, Role.UNKNOWN)]

    def _believed_bytes(self, step: int, others: int, extra: int) -> Ints:
        """Bytes of DDP's buckets, of its buffers and of its note of used parameters."""
        ddp = self._rank.ddp
        known = others == len(ddp.buffer_bytes)
        if not known:
            self._warn(f"{others} collectives beside DDP's own in step {step}: their sizes are not known")
        if ddp.comm_hook:
            self._warn(f"step {step} was reduced by {ddp.comm_hook}: the bytes that it moved are not known")
        buckets = np.bincount(self._bucket_of, weights=self._size_bytes).astype(np.int64)
        other_bytes = ddp.buffer_bytes if known else [0] * others
        return np.array([*buckets, *other_bytes, *[_USED_BYTES * len(ddp.parameters)] * extra], dtype=np.int64)

    def _gradients(self, step: int, reduced: Ints) -> Events:
        spans, tensors = self._spans, len(self._bucket_of)
        enqueued_us = (spans.start_us[self._enqueues[reduced]] + self._shift_us)[self._bucket_of]
        accumulated = np.flatnonzero(self._ready & (self._step == step))[-tensors:]
        ready_us = enqueued_us
        if len(accumulated) == tensors:
            ready_us = np.minimum(spans.end_us[accumulated] + self._shift_us, enqueued_us)
        else:
            self._warn("gradients could not be distinguished; each counts as ready when its bucket is")
        return event_columns(
            name=self._numbers(["ddp gradient"])[0],
            kind=EventKind.COMM,
            rank=self._number,
            step=step,
            tensor=np.arange(tensors),
            collective=self._bucket_of,
            collective_kind=self._enqueued_kinds(reduced)[self._bucket_of],
            size_bytes=self._size_bytes,
            start_us=ready_us,
            end_us=(spans.end_us[self._runs[reduced]] + self._shift_us)[self._bucket_of],
        )


class FsdpEvents(RankEvents):
    """Collectives of units, the main thread's waits for them, and gradients, each with the reduce-scatter of its unit."""

    @cached_property
    def _gathered(self) -> list[FsdpUnit | None]:
        return self._units(_GATHER)

    @cached_property
    def _scattered(self) -> list[FsdpUnit | None]:
        return self._units(_SCATTER)

    @cached_property
    def _again(self) -> npt.NDArray[np.bool_]:
        """Which collectives are enqueued for a backward pass."""
        again = np.zeros(len(self._enqueues), dtype=np.bool_)
        for annotation in ("FSDP::pre_backward", "FSDP::backward_prefetch"):
            held = ~self._spans.is_op & self._spans.named(annotation, prefix=True)
            again |= inside(self._spans, self._enqueues, held)
        return again

    def _units(self, pattern: re.Pattern[str]) -> list[FsdpUnit | None]:
        """Unit that each collective is of, where its label matches a pattern."""
        units = {unit.name: unit for unit in self._rank.fsdp.units}
        matches = [pattern.fullmatch(label) for label in labels(self._spans, self._enqueues)]
        return [None if match is None else units.get(match["unit"] or "") for match in matches]

    def _shown(self) -> npt.NDArray[np.bool_]:
        """Outermost ops but Gloo's own; of those around FSDP's own work, which hold waits, what they consist of."""
        spans = self._spans
        annotations = ~spans.is_op & spans.named(_ANNOTATION, prefix=True)
        around = np.zeros(len(spans), dtype=np.bool_)
        for thread in np.unique(spans.thread[annotations]):
            rows = np.flatnonzero(spans.is_op & (spans.thread == thread))
            begun = np.sort(spans.start_us[annotations & (spans.thread == thread)])
            around[rows] = np.searchsorted(begun, spans.end_us[rows]) > np.searchsorted(begun, spans.start_us[rows])
        moving = np.zeros(len(spans), dtype=np.bool_)
        moving[self._runs] = True
        rows = np.flatnonzero(spans.is_op)
        around[rows] |= inside(spans, rows, moving)  # copies of Gloo's own
        shown = spans.outermost(spans.is_op & ~around)
        shown[self._enqueues] = False  # the beginning of a collective, and mostly of the wait for it
        return shown

    def _copies(self, ops: Ints, names: list[str]) -> dict[str, Codes | Ints]:
        """Copies of what a unit gathers are parts of its gather."""
        spans, count = self._spans, len(ops)
        collective = np.full(count, -1, dtype=np.int64)
        kind, role = np.full((2, count), -1, dtype=np.int8)
        main = np.array([self._threads[int(thread)] == 0 for thread in spans.thread[ops]], dtype=np.bool_)
        for step in self._seen:
            enqueued = np.flatnonzero(self._step[self._enqueues] == step)
            units = [None if (unit := self._gathered[enqueue]) is None else unit.name for enqueue in enqueued]
            rows = np.flatnonzero(main & (self._step[ops] == step))
            rows = rows[np.argsort(spans.start_us[ops[rows]], kind="stable")]
            kinds = self._enqueued_kinds(enqueued)
            for number, row in copies_of_gathers(units, [names[row] for row in rows]):
                collective[rows[row]], kind[rows[row]], role[rows[row]] = number, kinds[number], Role.COPY
        return {"collective": collective, "collective_kind": kind, "role": role}

    def _communication(self, step: int) -> list[Events]:
        in_step = np.flatnonzero(self._step[self._enqueues] == step)
        names, believed, foreign = self._enqueued_names(in_step), np.zeros(len(in_step), dtype=np.int64), 0
        role = np.full(len(in_step), Role.UNKNOWN, dtype=np.int8)
        for place, enqueue in enumerate(in_step):
            gathered, scattered = self._gathered[enqueue], self._scattered[enqueue]
            unit = gathered or scattered
            if unit is None:
                foreign += 1
                continue
            what = "reduce_scatter" if gathered is None else "all_gather"
            names[place] = f"{what} of {unit.name or ROOT}{AGAIN if gathered is not None and self._again[enqueue] else ''}"
            believed[place] = unit.gathered_bytes
            role[place] = Role.FORWARD if gathered is not None and not self._again[enqueue] else Role.BACKWARD
        executed = self._executed_bytes(in_step)
        if executed is None and foreign:
            self._warn(f"{foreign} collectives beside those of units in step {step}: their sizes are not known")
        sizes = believed if executed is None else executed
        return [self._gradients(step, in_step), self._waits(step, in_step), *self._collectives(step, in_step, names, sizes, role)]

    def _gradients(self, step: int, in_step: Ints) -> Events:
        """From the enqueue of their unit's reduce-scatter to its end; none where the unit has none in the step."""
        unit_of = np.array([tensor.node for tensor in self._tensors])
        scatter = np.full(len(self._tensors), -1, dtype=np.int64)
        for place, enqueue in enumerate(in_step):
            unit = self._scattered[enqueue]
            if unit is not None:
                scatter[unit_of == (unit.name or ROOT)] = place
        reduced = np.flatnonzero(scatter >= 0)
        which = in_step[scatter[reduced]]
        return event_columns(
            name=self._numbers(["fsdp gradient"])[0],
            kind=EventKind.COMM,
            rank=self._number,
            step=step,
            tensor=reduced,
            collective=scatter[reduced],
            collective_kind=self._enqueued_kinds(which),
            size_bytes=np.array([self._tensors[i].size_bytes for i in reduced], dtype=np.int64),
            start_us=self._spans.start_us[self._enqueues[which]] + self._shift_us,
            end_us=self._spans.end_us[self._runs[which]] + self._shift_us,
        )

    def _waits(self, step: int, in_step: Ints) -> Events:
        """From when the main thread had nothing else to do to when it went on; of no length where the collective had ended."""
        spans, enqueues, runs = self._spans, self._enqueues[in_step], self._runs[in_step]
        begin = spans.start_us[enqueues].copy()
        copies = self._copies_out(step)
        for place, enqueue in enumerate(in_step):
            unit = self._gathered[enqueue]
            if unit is not None and copies[unit.name]:
                needed_us = copies[unit.name].pop(0)
                begin[place] = max(needed_us, begin[place]) if unit.asynchronous else begin[place]
        # Gloo's thread may be seen to end a collective after the main thread, which it woke, has gone on.
        goes_on = np.append(np.sort(spans.start_us[spans.thread == spans.thread[enqueues[0]]]), np.inf)
        next_us = goes_on[np.searchsorted(goes_on[:-1], np.maximum(begin, spans.end_us[enqueues]), side="right")]
        return event_columns(
            name=self._numbers(["wait for a collective"])[0],
            kind=EventKind.SYNC,
            rank=self._number,
            step=step,
            collective=np.arange(len(in_step)),
            collective_kind=self._enqueued_kinds(in_step),
            start_us=begin + self._shift_us,
            end_us=np.maximum(np.minimum(spans.end_us[runs], next_us), begin) + self._shift_us,
        )

    def _copies_out(self, step: int) -> defaultdict[str, list[float]]:
        """When the parameters of each unit were needed in a step, in order: then those that came are copied to their places."""
        spans = self._spans
        unit_of_name = {i: match["unit"] or "" for i, name in enumerate(spans.names) if (match := _COPY_OUT.fullmatch(name))}
        rows = np.flatnonzero(~spans.is_op & (self._step == step) & np.isin(spans.name, list(unit_of_name)))
        needed: defaultdict[str, list[float]] = defaultdict(list)
        for row in rows:
            needed[unit_of_name[int(spans.name[row])]].append(float(spans.start_us[row]))
        return needed


def fsdp_tensors(rank: RawRank) -> tuple[TensorInfo, ...]:
    """The parameters' gradients, unit by unit; their nodes are the units."""
    return tuple(
        TensorInfo(
            name=rank.fsdp.parameters[index].name,
            node=unit.name or ROOT,
            dtype=rank.fsdp.parameters[index].dtype,
            shape=rank.fsdp.parameters[index].shape,
            size_bytes=rank.fsdp.parameters[index].size_bytes,
        )
        for unit in rank.fsdp.units
        for index in unit.parameters
    )


def fsdp_knobs(rank: RawRank) -> dict[str, str]:
    """How the model was sharded."""
    units = rank.fsdp.units
    return {
        "units": str(len(units)),
        "resharding_units": str(sum(unit.reshards for unit in units)),
        "prefetch": str(int(any(unit.asynchronous for unit in units))),
    }
