"""Content of the profile of a rank of any PyTorch job: its ops, and its collectives from enqueue to end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.collect.assemble.common import event_columns, joined, step_of
from dpro_search.collect.assemble.torch.execution import EnqueuedCollective
from dpro_search.collect.assemble.torch.files import RawRank
from dpro_search.collect.assemble.torch.host_spans import HostSpans
from dpro_search.collect.recorded_names import AUTOGRAD_FUNCTION, ENQUEUE, GLOO_RUN, collective_kind_of, dtype_of
from dpro_search.collect.trace import Codes, EventKind, Events, Ints, Role, Steps, TensorInfo
from dpro_search.errors import TraceFormatError

MODULE = "dpro_search.module "  # an annotation of the recorder, around the forward pass of a module


class RankEvents(ABC):
    """Events of one rank but the transfers, on the job's clock; collectives are numbered within their step.

    A kind of job defines which ops it shows (`_shown`) and what its communication is (`_communication`).
    """

    def __init__(
        self,
        rank: RawRank,
        number: int,
        base_ns: int,
        steps: Steps,
        tensors: tuple[TensorInfo, ...],
        names: dict[str, int],
        dtypes: dict[str, int],
    ) -> None:
        self._rank, self._number, self._names, self._dtypes, self._tensors = rank, number, names, dtypes, tensors
        self._spans = spans = rank.spans
        self._shift_us = (rank.origin_ns - base_ns) / 1e3
        self._enqueues, self._runs = _enqueues_and_runs(rank)
        self._outer = self._shown()
        self._step = step_of(steps, number, spans.start_us + self._shift_us)
        self._threads = {int(thread): i for i, thread in enumerate(_threads(spans, self._outer))}
        traced = set(steps.index[(steps.rank == number) & steps.traced].tolist())
        self._seen = sorted(traced & set(self._step[self._enqueues].tolist()))
        self.warnings: list[str] = []
        if rank.hook.other_models:
            self._warn(f"{rank.hook.other_models} more distributed modules; steps are the first one's")

    def events(self) -> Events:
        """All events of the rank."""
        return joined([self._ops(), *(part for step in self._seen for part in self._communication(step))])

    @abstractmethod
    def _shown(self) -> npt.NDArray[np.bool_]:
        """Which spans become ops; those of a thread do not overlap, [spans]."""

    @abstractmethod
    def _communication(self, step: int) -> list[Events]:
        """Gradients and collectives of a step."""

    def _warn(self, text: str) -> None:
        self.warnings.append(f"rank {self._number}: {text}")

    def _numbers(self, labels: list[str]) -> Ints:
        return np.array([self._names.setdefault(label, len(self._names)) for label in labels], dtype=np.int64)

    def _ops(self) -> Events:
        spans, ops = self._spans, np.flatnonzero(self._outer)
        names = labels(spans, ops)
        return event_columns(
            name=self._numbers(names),
            kind=EventKind.OP,
            rank=self._number,
            stream=np.array([self._threads[int(thread)] for thread in spans.thread[ops]], dtype=np.int64),
            start_us=spans.start_us[ops] + self._shift_us,
            end_us=spans.end_us[ops] + self._shift_us,
            step=self._step[ops],
            **self._copies(ops, names),
        )

    @abstractmethod
    def _copies(self, ops: Ints, names: list[str]) -> dict[str, Codes | Ints]:
        """Columns that mark which ops (rows of spans, with their names) copy what is communicated."""

    def _collectives(self, step: int, which: Ints, names: list[str], size_bytes: Ints, role: Codes | Role) -> list[Events]:
        """Each from its enqueue to its end, and from its enqueue to when a thread of Gloo took it up."""
        spans, enqueues, runs = self._spans, self._enqueues[which], self._runs[which]
        start_us = spans.start_us[enqueues] + self._shift_us
        same: dict[str, Any] = {
            "rank": self._number, "step": step, "collective": np.arange(len(which)), "size_bytes": size_bytes, "start_us": start_us,
            "stream": np.array([self._threads[int(thread)] for thread in spans.thread[runs]], dtype=np.int64),
            "collective_kind": self._enqueued_kinds(which), "dtype": self._enqueued_dtypes(which),
        }  # fmt: skip
        taken_us = np.maximum(spans.start_us[runs] + self._shift_us, start_us)
        end_us = np.maximum(spans.end_us[runs] + self._shift_us, taken_us)
        return [
            event_columns(name=self._numbers(names), kind=EventKind.COLLECTIVE, end_us=end_us, role=role, **same),
            event_columns(name=self._numbers(["gloo queue"])[0], kind=EventKind.QUEUE, end_us=taken_us, **same),
        ]

    def _enqueued_names(self, which: Ints) -> list[str]:
        """Names of the enqueued collectives in c10d: "allreduce"."""
        spans = self._spans
        return [spans.names[name].removeprefix(ENQUEUE).rstrip("_") for name in spans.name[self._enqueues[which]]]

    def _enqueued_kinds(self, which: Ints) -> Codes:
        return np.array([collective_kind_of(name) for name in self._enqueued_names(which)], dtype=np.int8)

    def _enqueued_dtypes(self, which: Ints) -> Codes:
        """Element types of the collectives of a step, in any order; unknown where the execution trace's step enqueued others."""
        order = np.argsort(which, kind="stable")
        dtype_codes = np.full(len(which), -1, dtype=np.int32)
        for place, collective in zip(order.tolist(), self._executed(which[order]) or (), strict=False):
            if dtype := dtype_of(collective.dtype):
                dtype_codes[place] = self._dtypes.setdefault(dtype, len(self._dtypes))
        return dtype_codes

    def _executed_bytes(self, which: Ints) -> Ints | None:
        """Bytes that the step of the execution trace moved with each collective of a step; None if it enqueued others."""
        executed = self._executed(which)
        return None if executed is None else np.array([collective.size_bytes for collective in executed], dtype=np.int64)

    def _executed(self, which: Ints) -> tuple[EnqueuedCollective, ...] | None:
        """The collectives of the step of the execution trace; None where a step enqueued others."""
        if self._rank.execution is None:
            return None
        executed = self._rank.execution.collectives
        return executed if self._enqueued_names(which) == [collective.name for collective in executed] else None


def labels(spans: HostSpans, ops: Ints) -> list[str]:
    """Names of ops, after the innermost annotation around each."""
    around = np.full(len(spans), -1, dtype=np.int64)
    open_spans: list[int] = []
    labelled = np.zeros(len(spans), dtype=np.bool_)
    labelled[ops] = True
    other = spans.named(GLOO_RUN, prefix=True) | spans.named(MODULE, prefix=True)
    thread = -1
    for i in np.flatnonzero(labelled | (~spans.is_op & ~other)):
        if spans.thread[i] != thread:
            thread, open_spans = int(spans.thread[i]), []
        while open_spans and spans.end_us[open_spans[-1]] <= spans.start_us[i]:
            open_spans.pop()
        if labelled[i]:
            around[i] = open_spans[-1] if open_spans else -1
        else:
            open_spans.append(int(i))
    labels_of_ops = []
    for i in ops:
        name = spans.names[spans.name[i]]
        label = "backward/" + name.removeprefix(AUTOGRAD_FUNCTION) if name.startswith(AUTOGRAD_FUNCTION) else name
        labels_of_ops.append(label if around[i] < 0 else f"{spans.names[spans.name[around[i]]]}/{label}")
    return labels_of_ops


def inside(spans: HostSpans, rows: Ints, holders: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which rows begin within one of the marked, disjoint spans of their thread."""
    is_inside = np.zeros(len(rows), dtype=np.bool_)
    for thread in np.unique(spans.thread[rows]):
        on_thread, held = np.flatnonzero(spans.thread[rows] == thread), np.flatnonzero(holders & (spans.thread == thread))
        if len(held):
            at = np.searchsorted(spans.start_us[held], spans.start_us[rows[on_thread]], side="right") - 1
            is_inside[on_thread] = (at >= 0) & (spans.start_us[rows[on_thread]] < spans.end_us[held[np.maximum(at, 0)]])
    return is_inside


def _threads(spans: HostSpans, outer: npt.NDArray[np.bool_]) -> Ints:
    """Threads that ran ops or collectives, the one with most ops first."""
    threads, counts = np.unique(spans.thread[outer], return_counts=True)
    first = threads[np.argsort(-counts, kind="stable")]
    return np.concatenate((first, np.setdiff1d(np.unique(spans.thread), first)))


def _enqueues_and_runs(rank: RawRank) -> tuple[Ints, Ints]:
    """Rows of the enqueues and of the runs of collectives, pair by pair in enqueue order."""
    spans = rank.spans
    enqueues = np.flatnonzero(spans.is_op & spans.named(ENQUEUE, prefix=True))
    runs = np.flatnonzero(~spans.is_op & spans.named(GLOO_RUN, prefix=True))
    enqueues = enqueues[np.argsort(spans.start_us[enqueues], kind="stable")]
    runs = runs[np.argsort(spans.start_us[runs], kind="stable")]
    if len(enqueues) != len(runs):
        raise TraceFormatError(
            f"{rank.folder}: {len(enqueues)} collectives were enqueued in the profiled steps, Gloo ran {len(runs)}; "
            f"the backend is '{rank.backend}': only gloo can be recorded, with CUDA tensors import the profile instead"
        )
    return enqueues, runs
