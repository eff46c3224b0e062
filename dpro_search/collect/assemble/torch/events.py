"""One rank's part of a DistributedDataParallel job -> events on the job's clock; see `job` for what they are."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from dpro_search.collect.assemble.common import event_columns
from dpro_search.collect.assemble.torch.spans import FUNCTION, RankEvents, inside
from dpro_search.collect.trace import Codes, EventKind, Events, Ints, Role
from dpro_search.errors import TraceFormatError

BUCKET = "bucket "
_READY = FUNCTION + "torch::autograd::AccumulateGrad"
_COPY_OF_BUCKET = "ddp.reducer::copy_bucket_to_grad"
_USED_BYTES = 4  # of DDP's note for a parameter whether it was used


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
