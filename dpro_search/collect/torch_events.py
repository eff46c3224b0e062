"""One rank's part of a DistributedDataParallel job -> events on the job's clock; see `torch_assemble` for what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.collect.assembly import event_columns, joined, step_of
from dpro_search.collect.readers.kineto_cpu import HostSpans
from dpro_search.collect.torch_files import RawRank
from dpro_search.collect.trace import EventKind, Events, Ints, Steps, TensorInfo
from dpro_search.errors import TraceFormatError

BUCKET = "bucket "
_FUNCTION = "autograd::engine::evaluate_function: "
_READY = _FUNCTION + "torch::autograd::AccumulateGrad"
_USED_BYTES = 4  # of DDP's note for a parameter whether it was used
_POST, _RUN = "c10d::", "gloo:"


class RankPart:
    """Events of one rank but the transfers; collectives are numbered within their step."""

    def __init__(
        self, rank: RawRank, number: int, base_ns: int, steps: Steps, tensors: tuple[TensorInfo, ...], names: dict[str, int]
    ) -> None:
        self._rank, self._number, self._names = rank, number, names
        self._spans = spans = rank.spans
        self._shift_us = (rank.origin_ns - base_ns) / 1e3
        self._outer = spans.outermost(spans.is_op)
        self._step = np.where(spans.is_op, step_of(steps, number, spans.start_us + self._shift_us), -1)
        self._threads = {int(thread): i for i, thread in enumerate(_threads(spans, self._outer))}
        self._ready = self._outer & spans.named(_READY)
        self._posts, self._runs = _collectives(rank, spans)
        self._size_bytes = np.array([tensor.size_bytes for tensor in tensors], dtype=np.int64)
        self._bucket_of = np.array([_bucket(tensor) for tensor in tensors], dtype=np.int64)
        self.warnings: list[str] = []
        if rank.hook.other_models:
            self._warn(f"{rank.hook.other_models} more DistributedDataParallel modules; steps are the first one's")
        traced = set(steps.index[(steps.rank == number) & steps.traced].tolist())
        seen = sorted(traced & set(self._step[self._posts].tolist()))
        self.events = joined([self._ops(), *(part for step in seen for part in self._communication(step))])

    def _warn(self, text: str) -> None:
        self.warnings.append(f"rank {self._number}: {text}")

    def _numbers(self, labels: list[str]) -> Ints:
        return np.array([self._names.setdefault(label, len(self._names)) for label in labels], dtype=np.int64)

    def _ops(self) -> Events:
        spans, ops = self._spans, np.flatnonzero(self._outer)
        return event_columns(
            name=self._numbers(_labels(spans, ops)),
            kind=EventKind.OP,
            rank=self._number,
            stream=np.array([self._threads[int(thread)] for thread in spans.thread[ops]], dtype=np.int64),
            start_us=spans.start_us[ops] + self._shift_us,
            end_us=spans.end_us[ops] + self._shift_us,
            step=self._step[ops],
        )

    def _communication(self, step: int) -> list[Events]:
        """Gradients and collectives of a step: DDP's buckets, what else it reduces at the end, and the forward pass's."""
        mine = np.flatnonzero(self._step[self._posts] == step)
        in_backward = _inside(self._spans, self._posts[mine], self._ready)
        buckets, ddp = int(self._bucket_of.max()) + 1, self._rank.ddp
        # After the buckets, DDP may tell which parameters were used.
        reduced, extra = np.split(mine[in_backward], [buckets])
        others = mine[~in_backward]
        if len(reduced) != buckets or len(extra) > ddp.find_unused_parameters:
            raise TraceFormatError(
                f"{self._rank.folder}: step {step} all-reduced {len(reduced) + len(extra)} buckets, DDP has {buckets}; "
                "is the model frozen or rebuilt while it trains, or has its communication hook more than one collective a bucket?"
            )
        which = np.concatenate((reduced, others, extra))
        executed = self._executed_bytes(self._posts[mine])
        if executed is not None:
            return [self._gradients(step, reduced), *self._collectives(step, which, executed[np.searchsorted(mine, which)])]
        sizes = self._believed_bytes(step, len(others), len(extra))
        return [self._gradients(step, reduced), *self._collectives(step, which, sizes)]

    def _executed_bytes(self, posts: Ints) -> Ints | None:
        """What the step of the execution trace moved with each collective; None where it posted others."""
        if self._rank.execution is None:
            return None
        executed = self._rank.execution.collectives
        names = [self._spans.names[name].removeprefix(_POST).rstrip("_") for name in self._spans.name[posts]]
        if names != [collective.name for collective in executed]:
            return None
        return np.array([collective.size_bytes for collective in executed], dtype=np.int64)

    def _believed_bytes(self, step: int, others: int, extra: int) -> Ints:
        """What DDP's buckets, its buffers and its note of used parameters take."""
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
        posted_us = (spans.start_us[self._posts[reduced]] + self._shift_us)[self._bucket_of]
        accumulated = np.flatnonzero(self._ready & (self._step == step))[-tensors:]
        ready_us = posted_us
        if len(accumulated) == tensors:
            ready_us = np.minimum(spans.end_us[accumulated] + self._shift_us, posted_us)
        else:
            self._warn("gradients could not be told apart; each counts as ready when its bucket is")
        return event_columns(
            name=self._numbers(["ddp gradient"])[0],
            kind=EventKind.COMM,
            rank=self._number,
            step=step,
            tensor=np.arange(tensors),
            collective=self._bucket_of,
            size_bytes=self._size_bytes,
            start_us=ready_us,
            end_us=(spans.end_us[self._runs[reduced]] + self._shift_us)[self._bucket_of],
        )

    def _collectives(self, step: int, which: Ints, size_bytes: Ints) -> list[Events]:
        """Each from its post to its end, and from its post to when a thread of Gloo took it up."""
        spans, posts, runs = self._spans, self._posts[which], self._runs[which]
        start_us = spans.start_us[posts] + self._shift_us
        labels = [spans.names[name].removeprefix(_POST).rstrip("_") for name in spans.name[posts]]
        same: dict[str, Any] = {
            "rank": self._number, "step": step, "collective": np.arange(len(which)), "size_bytes": size_bytes, "start_us": start_us,
            "stream": np.array([self._threads[int(thread)] for thread in spans.thread[runs]], dtype=np.int64),
        }  # fmt: skip
        taken_us = np.maximum(spans.start_us[runs] + self._shift_us, start_us)
        end_us = np.maximum(spans.end_us[runs] + self._shift_us, taken_us)
        return [
            event_columns(name=self._numbers(labels), kind=EventKind.COLLECTIVE, end_us=end_us, **same),
            event_columns(name=self._numbers(["gloo queue"])[0], kind=EventKind.QUEUE, end_us=taken_us, **same),
        ]


def _bucket(tensor: TensorInfo) -> int:
    return int(tensor.node.removeprefix(BUCKET))


def _threads(spans: HostSpans, outer: npt.NDArray[np.bool_]) -> Ints:
    """Threads that ran ops or collectives, the one with most ops first."""
    found, counts = np.unique(spans.thread[outer], return_counts=True)
    first = found[np.argsort(-counts, kind="stable")]
    return np.concatenate((first, np.setdiff1d(np.unique(spans.thread), first)))


def _labels(spans: HostSpans, ops: Ints) -> list[str]:
    """Names of ops, after the innermost annotation around each."""
    around = np.full(len(spans), -1, dtype=np.int64)
    open_spans: list[int] = []
    wanted = np.zeros(len(spans), dtype=np.bool_)
    wanted[ops] = True
    asynchronous = spans.named(_RUN, prefix=True)
    thread = -1
    for i in np.flatnonzero(wanted | (~spans.is_op & ~asynchronous)):
        if spans.thread[i] != thread:
            thread, open_spans = int(spans.thread[i]), []
        while open_spans and spans.end_us[open_spans[-1]] <= spans.start_us[i]:
            open_spans.pop()
        if wanted[i]:
            around[i] = open_spans[-1] if open_spans else -1
        else:
            open_spans.append(int(i))
    labels = []
    for i in ops:
        name = spans.names[spans.name[i]]
        label = "backward/" + name.removeprefix(_FUNCTION) if name.startswith(_FUNCTION) else name
        labels.append(label if around[i] < 0 else f"{spans.names[spans.name[around[i]]]}/{label}")
    return labels


def _collectives(rank: RawRank, spans: HostSpans) -> tuple[Ints, Ints]:
    """Rows of the posts and of the runs of collectives, pair by pair in the order of posting."""
    posts = np.flatnonzero(spans.is_op & spans.named(_POST, prefix=True))
    runs = np.flatnonzero(~spans.is_op & spans.named(_RUN, prefix=True))
    posts = posts[np.argsort(spans.start_us[posts], kind="stable")]
    runs = runs[np.argsort(spans.start_us[runs], kind="stable")]
    if len(posts) != len(runs):
        raise TraceFormatError(
            f"{rank.folder}: {len(posts)} collectives were posted in the profiled steps, Gloo ran {len(runs)}; "
            f"the backend is '{rank.ddp.backend}': only gloo can be recorded, with CUDA tensors import the profile instead"
        )
    return posts, runs


def _inside(spans: HostSpans, rows: Ints, holders: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which rows lie within one of the marked, disjoint spans of their thread."""
    found = np.zeros(len(rows), dtype=np.bool_)
    for thread in np.unique(spans.thread[rows]):
        mine, held = np.flatnonzero(spans.thread[rows] == thread), np.flatnonzero(holders & (spans.thread == thread))
        if len(held):
            at = np.searchsorted(spans.start_us[held], spans.start_us[rows[mine]], side="right") - 1
            found[mine] = (at >= 0) & (spans.start_us[rows[mine]] < spans.end_us[held[np.maximum(at, 0)]])
    return found
