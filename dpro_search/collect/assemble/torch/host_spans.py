"""Reads the host side of a profile that torch.profiler wrote (Kineto's Chrome trace, gzipped or not): ops, annotations, threads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search.collect._files import DAMAGED
from dpro_search.collect.readers._bytes import read_whole
from dpro_search.collect.readers._nesting import is_outermost
from dpro_search.collect.trace import Floats, Ints
from dpro_search.errors import InputError, TraceFormatError


@dataclass(frozen=True, kw_only=True)
class HostSpans:
    """n spans on host threads, sorted by thread, start and (longest first) end.

    Attributes
    ----------
    name
        Index into `names`, [n].
    is_op
        True for an operator, False for an annotation, [n].
    thread
        Number of the thread within the process, [n].
    start_us, end_us
        Microseconds after `base_ns`, nanoseconds of the epoch, [n].
    function
        Number of an operator's call, which an execution trace of the same step has as well; 0: none, [n].
    sequence
        Number that links passes: a forward operator has that of the next backward function, which has it too; -1: none, [n].
    dropped
        Records that were left out, by reason.
    """

    names: tuple[str, ...]
    name: Ints
    is_op: npt.NDArray[np.bool_]
    thread: Ints
    start_us: Floats
    end_us: Floats
    function: Ints
    sequence: Ints
    base_ns: int
    dropped: dict[str, int]

    def __len__(self) -> int:
        return len(self.name)

    def named(self, text: str, *, prefix: bool = False) -> npt.NDArray[np.bool_]:
        """Which spans have a name, or a name that begins so, [n]."""
        fits = np.array([name.startswith(text) if prefix else name == text for name in self.names], dtype=np.bool_)
        return np.zeros(len(self), dtype=np.bool_) if not len(fits) else fits[self.name]

    def outermost(self, among: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Whether each span is marked and lies in no other marked span of its thread, [n]."""
        outermost = np.zeros(len(self), dtype=np.bool_)
        for thread in np.unique(self.thread[among]):
            rows = np.flatnonzero(among & (self.thread == thread))
            outermost[rows] = is_outermost(self.start_us[rows], self.end_us[rows])
        return outermost


class _Arguments(msgspec.Struct, gc=False, rename={"function": "Record function id", "sequence": "Sequence number"}):
    function: Any = 0
    sequence: Any = -1


class _ProfileRecord(msgspec.Struct, gc=False):
    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    args: _Arguments | None = None


class _Profile(msgspec.Struct):
    traceEvents: list[_ProfileRecord]  # noqa: N815 (Kineto's name)
    baseTimeNanoseconds: int = 0  # noqa: N815


def read_host_spans(path: Path) -> HostSpans:
    """Read one rank's profile.

    Raises
    ------
    InputError
        The file is missing.
    TraceFormatError
        It is cut off, damaged, or not a Kineto profile.
    """
    if not path.is_file():
        raise InputError(f"{path}: missing: the job ended before its profiled steps, or was killed")
    raw = read_whole(path)
    try:
        profile = msgspec.json.decode(raw, type=_Profile)
    except DAMAGED as error:
        raise TraceFormatError(f"{path}: not a whole Kineto profile ({error}); record the job again") from error
    dropped: dict[str, int] = {}
    kept: list[_ProfileRecord] = []
    for record in profile.traceEvents:
        reason = _reason_to_drop(record)
        if reason is None:
            kept.append(record)
        else:
            dropped[reason] = dropped.get(reason, 0) + 1
    names: dict[str, int] = {}
    name = np.array([names.setdefault(record.name, len(names)) for record in kept], dtype=np.int64)
    is_op = np.array([record.cat == "cpu_op" for record in kept], dtype=np.bool_)
    thread = np.array([record.tid for record in kept], dtype=np.int64)
    start = np.array([record.ts for record in kept], dtype=np.float64)
    end = start + np.array([record.dur for record in kept], dtype=np.float64)
    order = np.lexsort((-end, start, thread))
    return HostSpans(
        names=tuple(names),
        name=name[order],
        is_op=is_op[order],
        thread=thread[order],
        start_us=start[order],
        end_us=end[order],
        function=np.array([_function(record) for record in kept], dtype=np.int64)[order],
        sequence=np.array([_sequence(record) for record in kept], dtype=np.int64)[order],
        base_ns=profile.baseTimeNanoseconds,
        dropped=dropped,
    )


def _reason_to_drop(record: _ProfileRecord) -> str | None:
    """Why a record is no span of a host thread; None if it is one."""
    if record.ph != "X":
        return {"M": "metadata", "i": "instants", "s": "flows", "f": "flows"}.get(record.ph, "other phases")
    if record.cat not in ("cpu_op", "user_annotation"):
        return f"category {record.cat or 'none'}"
    if not isinstance(record.tid, int) or not 0 <= record.tid < 2**63:
        return "no thread"
    if not (abs(record.ts) < 1e15 and 0 <= record.dur < 1e15):
        return "impossible times"
    return None


def _function(record: _ProfileRecord) -> int:
    number = 0 if record.args is None else record.args.function
    return number if isinstance(number, int) and 0 < number < 2**63 else 0


def _sequence(record: _ProfileRecord) -> int:
    number = -1 if record.args is None else record.args.sequence
    return number if isinstance(number, int) and 0 <= number < 2**63 else -1
