"""Raw files of a recorded PyTorch DistributedDataParallel job -> `Trace`.

A raw folder holds ``job.json`` (how the job was started) and ``rank{r}/{hook.json,kineto.json.gz}`` of every rank.

What the events are, on each rank and in each profiled step:

* OP: the outermost operators of each thread, named ``annotation/operator`` where one of PyTorch's annotations is around them.
  In the backward pass these are the autograd engine's functions; AccumulateGrad holds the copy of a gradient into its bucket.
* COMM: a gradient, from when it is in its bucket to the completion of the bucket. ``TensorInfo.node`` names the bucket; tensors
  are in the order in which gradients become ready.
* COLLECTIVE: a bucket's all-reduce, or a broadcast of buffers, from its post to its completion on the rank.
* ALLREDUCE: the part of it after the last rank's Gloo thread has taken it up: without waiting for others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search.collect.assembly import (
    RankFile,
    aligned,
    event_columns,
    joined,
    overhead_pct,
    read_json,
    shifted,
    step_of,
    steps_of,
)
from dpro_search.collect.readers.kineto_cpu import HostSpans, read_host_spans
from dpro_search.collect.trace import EventKind, Events, Ints, Steps, TensorInfo, Trace, TraceMeta
from dpro_search.errors import InputError, TraceFormatError

FORMAT = "pytorch-ddp"
_MARK = "dpro_search.step"
_FUNCTION = "autograd::engine::evaluate_function: "
_READY = _FUNCTION + "torch::autograd::AccumulateGrad"
_BUCKET = "bucket "
_USED_BYTES = 4  # of DDP's note for a parameter whether it was used
_POST, _RUN = "c10d::", "gloo:"


class DdpParameter(msgspec.Struct):
    """A parameter that DDP reduces."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


class DdpFacts(msgspec.Struct, kw_only=True):
    """What DDP says of itself. `buckets`: in the order of their all-reduces, each the indices of its parameters."""

    buckets: list[list[int]]
    bucket_cap_bytes: int
    world_size: int
    threads: int
    backend: str
    parameters: list[DdpParameter]
    buffer_bytes: list[int]
    find_unused_parameters: bool = False
    ready_order: list[int] = []  # indices of the parameters as their gradients became ready in an early step


class TorchHookFile(RankFile, kw_only=True):
    """``hook.json`` of one rank; a mark is [ns before, ns after] the annotation at the start of a profiled step."""

    marks: list[tuple[int, int]]
    ddp: DdpFacts | None
    other_models: int = 0


class TorchJobFile(msgspec.Struct, kw_only=True):
    """``job.json``: what only the launcher knows."""

    format: str
    ranks: int
    command: tuple[str, ...]
    machine: str
    recorded_at: str
    rate_bps: float | None = None


def read_torch_hook(path: Path) -> TorchHookFile:
    """Read what the hook of one rank wrote; raises `InputError` or `TraceFormatError` that name the file."""
    return read_json(path, TorchHookFile, "this rank ran no DistributedDataParallel module, or its process was killed")


def assemble_ddp(raw: Path) -> Trace:
    """Build the trace of one job from its raw folder.

    Raises
    ------
    InputError
        A rank is missing, or nothing was profiled.
    TraceFormatError
        A file is damaged, or contradicts another.
    """
    job = read_json(raw / "job.json", TorchJobFile, "make a raw folder with 'dpro-search collect --keep-raw'")
    if job.format != FORMAT:
        raise InputError(f"{raw}/job.json: the raw files are of '{job.format}', not of {FORMAT}")
    if job.ranks < 1:
        raise TraceFormatError(f"{raw}/job.json: {job.ranks} ranks; record the job again")
    ranks = [_read_rank(raw / f"rank{r}") for r in range(job.ranks)]
    base_ns = ranks[0].hook.steps[0][0]
    steps = steps_of([rank.hook for rank in ranks], base_ns)
    tensors = _tensors(ranks[0].ddp)
    names: dict[str, int] = {}
    parts = [_RankPart(rank, r, base_ns, steps, tensors, names) for r, rank in enumerate(ranks)]
    events = _numbered(joined([part.events for part in parts]))
    clock = aligned(events, tuple(rank.hook.machine for rank in ranks), [rank.origin_residual_us for rank in ranks])
    events, steps = shifted(events, steps, clock)
    trace = Trace(
        meta=TraceMeta(
            framework="pytorch",
            comm="ddp",
            format=FORMAT,
            ranks=job.ranks,
            hosts=tuple(rank.hook.host for rank in ranks),
            cores=tuple(rank.hook.core for rank in ranks),
            rate_bps=job.rate_bps,
            clock=clock,
            versions=ranks[0].hook.versions,
            peak_rss_bytes=max(rank.hook.peak_rss_bytes for rank in ranks),
            dropped=_dropped(ranks),
            warnings=tuple(dict.fromkeys(text for part in parts for text in part.warnings)),
            command=job.command,
            machine=job.machine,
            recorded_at=job.recorded_at,
        ),
        names=tuple(names),
        events=joined([events, _transfers(events)]),
        steps=steps,
        tensors=tensors,
        graphs=(),
        graph_of_rank=(),
    )
    return replace(trace, meta=msgspec.structs.replace(trace.meta, overhead_pct=overhead_pct(trace)))


@dataclass(frozen=True)
class _Rank:
    folder: Path
    hook: TorchHookFile
    ddp: DdpFacts
    spans: HostSpans
    origin_ns: float  # epoch time of the spans' zero
    origin_residual_us: float


def _read_rank(folder: Path) -> _Rank:
    hook = read_torch_hook(folder / "hook.json")
    if not hook.steps:
        raise InputError(f"{folder}/hook.json: no training step was seen; a step begins with a DistributedDataParallel's forward")
    ddp = hook.ddp
    if ddp is None or not hook.marks:
        raise InputError(f"{folder}/hook.json: only {len(hook.steps)} steps ran, none was profiled; run more or lower --warmup")
    indices = [index for bucket in ddp.buckets for index in bucket]
    if not indices or sorted(indices) != sorted(set(indices)) or not 0 <= min(indices) <= max(indices) < len(ddp.parameters):
        raise TraceFormatError(f"{folder}/hook.json: ddp.buckets does not name each parameter at most once; record the job again")
    if any(parameter.size_bytes < 0 for parameter in ddp.parameters):
        raise TraceFormatError(f"{folder}/hook.json: ddp.parameters has a negative size; record the job again")
    spans = read_host_spans(folder / "kineto.json.gz")
    origin_ns, residual_us = _origin(folder, hook, spans)
    return _Rank(folder, hook, ddp, spans, origin_ns, residual_us)


def _origin(folder: Path, hook: TorchHookFile, spans: HostSpans) -> tuple[float, float]:
    """When the profile's clock was zero, from the marks; and the half-width of what they leave open, in us."""
    start_us = np.sort(spans.start_us[spans.named(_MARK)])
    if len(start_us) != len(hook.marks):
        raise TraceFormatError(
            f"{folder}: the profile has {len(start_us)} of {len(hook.marks)} marks of steps; record the job again"
        )
    before, after = np.array(hook.marks, dtype=np.float64).T
    earliest, latest = (before - start_us * 1e3).max(), (after - start_us * 1e3).min()
    # Marks that contradict each other (the clock was set meanwhile) leave the middle, and say so by the residual.
    return float((earliest + latest) / 2), float(abs(latest - earliest) / 2e3)


def _tensors(ddp: DdpFacts) -> tuple[TensorInfo, ...]:
    """Gradients in the order in which they become ready; their nodes are their buckets."""
    bucket_of = {index: number for number, bucket in enumerate(ddp.buckets) for index in bucket}
    order = ddp.ready_order if sorted(ddp.ready_order) == sorted(bucket_of) else list(bucket_of)
    return tuple(
        TensorInfo(
            name=ddp.parameters[index].name,
            node=f"{_BUCKET}{bucket_of[index]}",
            dtype=ddp.parameters[index].dtype,
            shape=ddp.parameters[index].shape,
            size_bytes=ddp.parameters[index].size_bytes,
        )
        for index in order
    )


class _RankPart:
    """Events of one rank but the transfers; collectives are numbered within their step."""

    def __init__(
        self, rank: _Rank, number: int, base_ns: int, steps: Steps, tensors: tuple[TensorInfo, ...], names: dict[str, int]
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
                "is the model frozen or rebuilt while it trains?"
            )
        known = len(others) == len(ddp.buffer_bytes)
        if not known:
            self._warn(f"{len(others)} collectives beside DDP's own in step {step}: their sizes are not known")
        other_bytes = ddp.buffer_bytes if known else [0] * len(others)
        which = np.concatenate((reduced, others, extra))
        sizes = np.concatenate(
            (
                np.bincount(self._bucket_of, weights=self._size_bytes).astype(np.int64),
                np.array([*other_bytes, *[_USED_BYTES * len(ddp.parameters)] * len(extra)], dtype=np.int64),
            )
        )
        return [self._gradients(step, reduced), *self._collectives(step, which, sizes)]

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
    return int(tensor.node.removeprefix(_BUCKET))


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


def _collectives(rank: _Rank, spans: HostSpans) -> tuple[Ints, Ints]:
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


def _numbered(events: Events) -> Events:
    """Collectives numbered through the whole job: equal on all ranks, in the order of steps and of posting within each."""
    has = events.collective >= 0
    width = int(events.collective.max(initial=0)) + 1
    columns = {name: getattr(events, name) for name in Events.__dataclass_fields__}
    return Events(**{**columns, "collective": np.where(has, events.step * width + events.collective, -1)})


def _transfers(events: Events) -> Events:
    """From when the last rank's thread had taken up a collective to its end on each rank."""
    taken = events.select(events.kind == EventKind.QUEUE)
    whole = events.select(events.kind == EventKind.COLLECTIVE)
    numbers, row = np.unique(taken.collective, return_inverse=True)
    last = np.full(len(numbers), -np.inf)
    np.maximum.at(last, row, taken.end_us)
    begun = last[np.searchsorted(numbers, whole.collective)]
    columns = {name: getattr(whole, name) for name in Events.__dataclass_fields__}
    kind = np.full(len(whole), int(EventKind.ALLREDUCE))
    return Events(**{**columns, "kind": kind, "start_us": np.minimum(begun, whole.end_us)})


def _dropped(ranks: list[_Rank]) -> dict[str, int]:
    found: dict[str, int] = {}
    for rank in ranks:
        for reason, count in rank.spans.dropped.items():
            found[reason] = found.get(reason, 0) + count
    return found
