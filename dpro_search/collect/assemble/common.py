"""The part of assembling a trace that all frameworks share: raw JSON, steps, columns of events, clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from dpro_search._regular_files import read_regular
from dpro_search.collect._files import DAMAGED
from dpro_search.collect.assemble.described import described
from dpro_search.collect.clock import CommSpans, align_clocks
from dpro_search.collect.trace import DESCRIPTIONS, ClockReport, EventKind, Events, Floats, Ints, Steps, Trace
from dpro_search.errors import InputError, TraceFormatError

NO_JOB = "make a raw folder with 'dpro-search collect --keep-raw'"
_UNNAMED = "tensorflow-horovod"  # whose recorder did not name its format once

_File = TypeVar("_File")
_Table = TypeVar("_Table", Events, Steps)


class RawJobFile(msgspec.Struct, kw_only=True):
    """``job.json`` of a raw folder: what only the launcher knows."""

    format: str = _UNNAMED  # As `TraceMeta.format`: which launcher recorded the job.
    ranks: int
    command: tuple[str, ...]
    machine: str
    recorded_at: str
    rate_bps: float | None = None  # Limit of every link in each direction, bits a second; None: none.
    # host_cpus, host_changes: As `launch.host_limits.HostLimits` has them.
    host_cpus: tuple[float, ...] = ()
    host_changes: tuple[str, ...] = ()
    knobs: dict[str, str] = {}  # Settings of the communication, by the variable that sets them.


_Job = TypeVar("_Job", bound=RawJobFile)


class _JobFormat(msgspec.Struct):
    format: str = ""


class RankFile(msgspec.Struct, kw_only=True):
    """Facts that every hook writes about its rank.

    A step is [start ns, end ns, compute CPU ns so far, communication CPU ns so far, traced].
    """

    rank: int
    host: str
    machine: str  # equal for ranks that share a kernel's clock
    cores: list[int]
    steps: list[tuple[int, int, int, int, bool]]
    peak_rss_bytes: int
    versions: dict[str, str]

    @property
    def traced_steps(self) -> list[int]:
        """Numbers of the profiled steps."""
        return [number for number, step in enumerate(self.steps) if step[4]]

    @property
    def core(self) -> int:
        """The core that the rank was pinned to; -1: it was not."""
        return self.cores[0] if len(self.cores) == 1 else -1


def read_json(path: Path, kind: type[_File], hint: str) -> _File:
    """Decode a raw file; raises `InputError` (with the hint) if it is missing, `TraceFormatError` if it is damaged."""
    if not path.is_file():
        raise InputError(f"{path}: missing: {hint}")
    try:
        return msgspec.json.decode(read_regular(path), type=kind)
    except DAMAGED as error:
        raise TraceFormatError(f"{path}: {error}; record the job again") from error


def raw_format(raw: Path) -> str:
    """Which recorder made a raw folder; raises `InputError` or `TraceFormatError` that name the file."""
    return read_json(raw / "job.json", _JobFormat, NO_JOB).format or _UNNAMED


def read_job(raw: Path, kind: type[_Job], *formats: str) -> _Job:
    """The file that the launcher of a job wrote, in one of the given formats.

    Raises
    ------
    InputError
        There is no such file, or it is of another format.
    TraceFormatError
        It is damaged.
    """
    recorded_format = raw_format(raw)
    if recorded_format not in formats:
        raise InputError(f"{raw}/job.json: the raw files are of '{recorded_format}', not of {' or '.join(formats)}")
    job = read_json(raw / "job.json", kind, NO_JOB)
    if job.ranks < 1:
        raise TraceFormatError(f"{raw}/job.json: {job.ranks} ranks; record the job again")
    return job


def no_profiled_step(folder: Path, hook: RankFile) -> InputError:
    """The error of a rank's folder whose job ended before the profiler began."""
    return InputError(f"{folder}/hook.json: only {len(hook.steps)} steps ran, none was profiled; run more or lower --warmup")


def job_facts(
    job: RawJobFile, hooks: Sequence[RankFile], server_hosts: Sequence[str] = (), server_cores: Sequence[int] = ()
) -> dict[str, Any]:
    """Fields of `TraceMeta` that launcher and hooks of all frameworks report in the same way; servers are the last ranks."""
    return {
        "ranks": job.ranks + len(server_hosts),
        "hosts": (*(hook.host for hook in hooks), *server_hosts),
        "cores": (*(hook.core for hook in hooks), *server_cores),
        "rate_bps": job.rate_bps,
        "host_cpus": job.host_cpus,
        "host_changes": job.host_changes,
        "versions": hooks[0].versions,
        "peak_rss_bytes": max(hook.peak_rss_bytes for hook in hooks),
        "command": job.command,
        "machine": job.machine,
        "recorded_at": job.recorded_at,
    }


def steps_of(hooks: Sequence[RankFile], base_ns: int) -> Steps:
    """All steps but each rank's last, whose distance to the next is unknown."""
    rows = []
    for rank, hook in enumerate(hooks):
        for i, (step, following) in enumerate(zip(hook.steps, hook.steps[1:], strict=False)):
            rows.append((rank, i, step[0], step[1], step[4], following[2] - step[2], following[3] - step[3]))
    columns = list(zip(*rows, strict=True))
    if not columns:
        raise InputError("hook.json: fewer than two steps ran; nothing can be measured")
    return Steps(
        rank=np.array(columns[0], dtype=np.int64),
        index=np.array(columns[1], dtype=np.int64),
        start_us=(np.array(columns[2], dtype=np.int64) - base_ns) / 1e3,
        end_us=(np.array(columns[3], dtype=np.int64) - base_ns) / 1e3,
        traced=np.array(columns[4], dtype=np.bool_),
        compute_cpu_us=np.array(columns[5], dtype=np.float64) / 1e3,
        comm_cpu_us=np.array(columns[6], dtype=np.float64) / 1e3,
    )


def step_of(steps: Steps, rank: int, start_us: Floats) -> Ints:
    """Step in which each instant of a rank lies (a step lasts until the next one starts), -1 outside."""
    of_rank = steps.rank == rank
    begin, index = steps.start_us[of_rank], steps.index[of_rank]
    position = np.searchsorted(begin, start_us, side="right") - 1
    last_end = steps.end_us[of_rank][-1]
    inside = (position >= 0) & (start_us <= last_end)
    return np.where(inside, index[np.maximum(position, 0)], -1)


def event_columns(*, start_us: Floats, end_us: Floats, **columns: Any) -> Events:
    """Events of the given columns; others have defaults, and a scalar fills its column."""
    defaults: dict[str, Any] = {"rank": 0, "stream": 0, "tensor": -1, "collective": -1, "size_bytes": 0}
    filled = {
        key: np.broadcast_to(np.asarray(value, dtype=DESCRIPTIONS.get(key, np.int64)), start_us.shape)
        for key, value in (defaults | columns).items()
    }
    return Events(start_us=start_us, end_us=end_us, **filled)


def joined(parts: Sequence[_Table]) -> _Table:
    """All rows, part after part, of at least one part."""
    fields = parts[0].__dataclass_fields__
    return type(parts[0])(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in fields})


def aligned(events: Events, machines: tuple[str, ...], origin_residual_us: Sequence[float]) -> ClockReport:
    """Offsets from the collectives of the traced steps: a collective is enqueued by a rank's last tensor, ends with its first."""
    comm = events.select((events.kind == EventKind.COMM) & (events.collective >= 0))
    numbers, row = np.unique(comm.collective, return_inverse=True)
    enqueue = np.full((len(numbers), len(machines)), -np.inf)
    end = np.full((len(numbers), len(machines)), np.inf)
    size = np.zeros(len(numbers), dtype=np.int64)
    np.maximum.at(enqueue, (row, comm.rank), comm.start_us)
    np.minimum.at(end, (row, comm.rank), comm.end_us)
    np.add.at(size, row[comm.rank == 0], comm.size_bytes[comm.rank == 0])
    whole = np.isfinite(enqueue).all(axis=1) & np.isfinite(end).all(axis=1)
    if not whole.any():
        raise InputError("no all-reduce was seen on every rank in the traced steps; record more steps")
    family = np.floor(np.log2(np.maximum(size, 1))).astype(np.int64)
    report = align_clocks(CommSpans(enqueue_us=enqueue[whole], end_us=end[whole], family=family[whole]), machines)
    placed = tuple(float(np.hypot(a, b)) for a, b in zip(report.residual_us, origin_residual_us, strict=True))
    return msgspec.structs.replace(report, residual_us=placed)


def shifted(events: Events, steps: Steps, clock: ClockReport) -> tuple[Events, Steps]:
    """Events and steps on the aligned clock: each rank's offset is subtracted."""
    offset = np.array(clock.offset_us)
    of_event, of_step = offset[events.rank], offset[steps.rank]
    return (
        replace(events, start_us=events.start_us - of_event, end_us=events.end_us - of_event),
        replace(steps, start_us=steps.start_us - of_step, end_us=steps.end_us - of_step),
    )


def completed(trace: Trace) -> Trace:
    """The trace as `described`, with what profiling cost where it has three traced and three untraced iterations."""
    trace = described(trace)
    traced, untraced = trace.iterations_us(traced=True), trace.iterations_us()
    if len(traced) < 3 or len(untraced) < 3:
        return trace
    overhead_pct = float(np.median(traced) / np.median(untraced) - 1) * 100
    return replace(trace, meta=msgspec.structs.replace(trace.meta, overhead_pct=overhead_pct))
