"""``gradients_of(trace)``: the gradients of a profiled DistributedDataParallel job, and the buckets in which they are all-reduced.

PyTorch marks each gradient that becomes ready (``AccumulateGrad``), its copy into a bucket, and its copy out of it. A profile tells
their sizes by the shapes of the first (``record_shapes``), or by the bytes of the last on a device; else the parameters' sizes must
have been given to `import`. A bucket holds the gradients that became ready since the bucket before was posted; their sizes must add
up to its bytes. Where that fails, or nothing of it was marked, a bucket counts as one gradient: such buckets can only be joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dpro_search.collect.readers.parameters import GRADIENT
from dpro_search.collect.trace import CollectiveKind, EventKind, Ints, TensorInfo, Trace
from dpro_search.graph.marked_spans import MarkedSpans, ThreadSpan

_COPY_IN = ("torch::distributed::reducer::mul_out", "torch::distributed::reducer::copy_")
_COPY_OUT = ("torch.distributed.ddp.reducer::copy_bucket_to_grad",)
_SEARCH = ("torch.distributed.ddp.reducer::search_unused_parameters",)
_POST = ("c10d::allreduce_", "nccl:all_reduce", "record_param_comms")
_ITEM_BYTES = {"float64": 8, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class StepGradients:
    """A rank's gradients in a step: n gradients in the order in which they become ready, b buckets in that of their posts.

    Attributes
    ----------
    ready
        Until when each has been copied into its bucket, [n].
    back
        Its copy out of the bucket, [n]; empty: none, or they are not known.
    posts
        The enqueue of each bucket, [b].
    parts
        The event that is the rank's part of each all-reduce, [b].
    searches
        DDP's searches for unused parameters.
    """

    rank: int
    step: int
    ready: tuple[ThreadSpan, ...]
    back: tuple[ThreadSpan, ...]
    posts: tuple[ThreadSpan, ...]
    parts: tuple[int, ...]
    searches: tuple[ThreadSpan, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """The gradients of a job.

    Attributes
    ----------
    tensors
        In the order in which they become ready; where they are not known one for each bucket; none where no size is known.
    bucket_of
        Bucket of each, [n].
    share
        Bytes that the buckets move over those of the gradients: 0.5 where a hook compressed them.
    steps
        By rank and step.
    known
        Whether the gradients are known, and not only the buckets.
    why
        How the gradients' sizes are known, or why they are not.
    """

    tensors: tuple[TensorInfo, ...]
    bucket_of: Ints
    share: float
    steps: dict[tuple[int, int], StepGradients]
    known: bool
    why: str

    @property
    def buckets(self) -> int:
        """Number of recorded buckets."""
        return int(self.bucket_of.max(initial=-1)) + 1

    @property
    def searches(self) -> bool:
        """Whether DDP searched unused parameters."""
        return any(step.searches for step in self.steps.values())

    @property
    def has_copies(self) -> bool:
        """Whether gradients are copied out of their buckets, and all these copies are known."""
        return all(len(step.back) == len(self.tensors) for step in self.steps.values())


def gradients_of(trace: Trace) -> Gradients | None:
    """The gradients of a job whose ranks all-reduce the same buckets in every step; None where they do not."""
    spans = _Spans(trace)
    gradients_of_step = {(rank, step): spans.of(rank, step) for rank in range(trace.meta.ranks) for step in spans.steps_of(rank)}
    if not gradients_of_step or not all(value.parts for value in gradients_of_step.values()):
        return None
    first = next(iter(gradients_of_step.values()))
    sizes = _bucket_bytes(trace, first)
    if any(len(value.parts) != len(sizes) for value in gradients_of_step.values()) or any(
        _bucket_bytes(trace, value) != sizes for value in gradients_of_step.values()
    ):
        return None
    tensors, bucket_of, share, why = _gradients(trace, spans, gradients_of_step, sizes)
    known = bool(tensors)
    if not known and min(sizes) > 0:
        tensors = tuple(
            TensorInfo(name=f"bucket {number}", node="", dtype="float32", shape=(), size_bytes=size)
            for number, size in enumerate(sizes)
        )
        bucket_of = np.arange(len(sizes))
        gradients_of_step = {key: _of_buckets(value) for key, value in gradients_of_step.items()}
    return Gradients(
        tensors=tensors,
        bucket_of=bucket_of,
        share=share,
        steps=gradients_of_step,
        known=known,
        why=why,
    )


def _bucket_bytes(trace: Trace, gradients: StepGradients) -> list[int]:
    return [int(size) for size in trace.events.size_bytes[list(gradients.parts)]]


def _of_buckets(gradients: StepGradients) -> StepGradients:
    """With each bucket in place of its gradients: it is ready when it is posted."""
    ready = tuple(ThreadSpan(post.thread, post.start_us, post.start_us) for post in gradients.posts)
    return replace(gradients, ready=ready, back=())


def _gradients(
    trace: Trace, spans: _Spans, gradients_of_step: dict[tuple[int, int], StepGradients], sizes: Sequence[int]
) -> tuple[tuple[TensorInfo, ...], Ints, float, str]:
    """The gradients, the bucket of each, `Gradients.share`, and how that is known; no gradients where it is not."""
    none: Ints = np.zeros(0, np.int64)
    first = next(iter(gradients_of_step.values()))
    count = len(first.ready)
    if not count or any(len(value.ready) != count for value in gradients_of_step.values()):
        return (), none, 1.0, "which gradients are in a bucket was not recorded: buckets can be joined, not cut"
    assigned = [_by_time(value) for value in gradients_of_step.values()]
    bucket_of = assigned[0]
    if any((one != bucket_of).any() for one in assigned) or bucket_of.max() >= len(sizes):
        return (), none, 1.0, "gradients become ready in an order that changes from step to step: buckets can be joined, not cut"
    tensors, why = spans.sized(first)
    if not tensors:
        return (), none, 1.0, why
    totals = np.bincount(bucket_of, weights=[tensor.size_bytes for tensor in tensors], minlength=len(sizes)).tolist()
    known = min(sizes) > 0
    share = sizes[0] / totals[0] if known and totals[0] else 1.0
    if known and (
        share not in (1.0, 0.5) or any(abs(size - total * share) > 0.5 for size, total in zip(sizes, totals, strict=True))
    ):
        return (
            (),
            none,
            1.0,
            f"the sizes of the gradients ({why}) do not add up to those of the buckets: buckets can only be joined",
        )
    return tensors, bucket_of, share, why


def _by_time(gradients: StepGradients) -> Ints:
    """The bucket of each gradient: the first that is posted after it has become ready."""
    posted_us = np.array([post.start_us for post in gradients.posts])
    return np.searchsorted(posted_us, np.array([span.start_us for span in gradients.ready]), side="left")


class _Spans(MarkedSpans):
    """Events of gradients that PyTorch marks."""

    def of(self, rank: int, step: int) -> StepGradients:
        events = self.trace.events
        reduces = np.flatnonzero(
            (events.rank == rank)
            & (events.step == step)
            & (events.kind == EventKind.COLLECTIVE)
            & (events.collective_kind == CollectiveKind.ALL_REDUCE)
        )
        posts = [(self._post(event), event) for event in reduces.tolist() if event in self.call_of]
        posts.sort(key=lambda pair: pair[0].start_us)
        ready, back = self._ready(rank, step), self.named(_COPY_OUT, rank, step)
        if ready:
            last_us = max(ready[-1].end_us, *(span.start_us for span in back)) if back else ready[-1].end_us + 1000.0
            posts = [pair for pair in posts if ready[0].end_us <= pair[0].start_us <= last_us]
        return StepGradients(
            rank, step, tuple(ready), tuple(back), tuple(post for post, _ in posts), tuple(event for _, event in posts),
            tuple(self.named(_SEARCH, rank, step)),
        )  # fmt: skip

    def _post(self, event: int) -> ThreadSpan:
        """The outermost marked span around the call that launched a collective."""
        events, call = self.trace.events, self.call_of[event]
        at_us, thread = float(events.start_us[call]), int(events.stream[call])
        for name in _POST:
            rows = self.rows((name,), int(events.rank[call]))
            place = int(np.searchsorted(events.start_us[rows], at_us, side="right")) - 1
            if place >= 0 and events.end_us[rows[place]] >= at_us and events.stream[rows[place]] == thread:
                return ThreadSpan(thread, float(events.start_us[rows[place]]), float(events.end_us[rows[place]]))
        return ThreadSpan(thread, at_us, float(events.end_us[call]))

    def _ready(self, rank: int, step: int) -> list[ThreadSpan]:
        """Each gradient with its copy into the bucket, where one exists."""
        copies = iter([*self.named(_COPY_IN, rank, step), None])
        ready, copy = [], next(copies)
        spans = self.named((GRADIENT,), rank, step)
        for number, span in enumerate(spans):
            until_us = spans[number + 1].start_us if number + 1 < len(spans) else np.inf
            while copy is not None and copy.start_us < span.start_us:
                copy = next(copies)
            whole = span
            if copy is not None and copy.start_us < until_us and copy.thread == span.thread:
                whole = ThreadSpan(span.thread, span.start_us, copy.end_us, copy.events)
            ready.append(whole)
        return ready

    def sized(self, gradients: StepGradients) -> tuple[tuple[TensorInfo, ...], str]:
        """The gradients of a step with their sizes, and how these are known; none, and why."""
        trace, events = self.trace, self.trace.events
        given = tuple(tensor for tensor in trace.tensors if tensor.node == GRADIENT)
        rows = self.rows((GRADIENT,), gradients.rank, gradients.step)
        shapes = [trace.shapes[code][:1] if code >= 0 else () for code in events.shapes[rows].tolist()]
        if given and len(given) == len(rows):
            if all(shapes) and [shape[0] for shape in shapes] != [tensor.shape for tensor in given]:
                return (), "the shapes in the profile are not those of the given parameters in the reverse of their order"
            return given, "sizes of parameters as given to import, in the reverse of the order in which the model registers them"
        if all(shapes):
            dtypes = [trace.dtypes[code] if code >= 0 else "float32" for code in events.dtype[rows].tolist()]
            tensors = [_tensor(number, dtype, shape[0]) for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
            return tuple(tensors), "shapes of the gradients in the profile"
        copied = [
            [int(events.size_bytes[event]) for event in span.events if events.kind[event] == EventKind.COPY]
            for span in gradients.back
        ]
        if len(copied) == len(rows) and all(len(sizes) == 1 and sizes[0] > 0 for sizes in copied):
            tensors = [_tensor(number, "float32", (sizes[0] // 4,)) for number, sizes in enumerate(copied)]
            return tuple(tensors), "bytes of the copies of buckets to gradients"
        return (), (
            "the profile has neither shapes nor copies that tell the sizes of the gradients: buckets can be joined, not cut; "
            "profile with record_shapes=True, or import with --parameters"
        )


def _tensor(number: int, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    elements = int(np.prod(shape, dtype=np.int64))
    size = elements * _ITEM_BYTES.get(dtype, 4)
    return TensorInfo(name=f"gradient {number}", node=GRADIENT, dtype=dtype, shape=shape, size_bytes=size)
