"""Folders of the recorder in training scripts (`runtime.record`): all ranks' profiles of a window, and what they say of the job.

A folder ``window1`` holds ``rank00003.json.gz``, a Kineto profile, and ``rank00003.job.json`` of each rank that wrote both. The
last window of which all ranks' files are whole is read; without one, that with the most ranks, and a warning names the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from dpro_search._regular_files import read_regular
from dpro_search._text import numbers_text
from dpro_search.collect._files import DAMAGED
from dpro_search.collect.readers.importers import Importer
from dpro_search.collect.readers.parameters import ParameterRow, gradients_of_a_step, with_parameter_rows
from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError

_FORMAT = "dpro-search recorder"
_JOB, _PROFILE = ".job.json", ".json.gz"
_SETTLED_STEPS = 5  # of a job: the first steps are slower
_LEAST_STEPS = 3  # whose median is a time of a step
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
_PLACE = ("RANK", "LOCAL_RANK", "GROUP_RANK")  # variables that differ between ranks


class RecorderJobFile(msgspec.Struct, frozen=True, kw_only=True):
    """``rank00003.job.json``: the job as one rank sees it. Fields that the importer does not use are not read."""

    format: str
    version: int
    rank: _Count
    world_size: _Count
    window: _Count
    profile_bytes: int
    clocks: tuple[Mapping[str, int], ...] = ()
    environment: dict[str, str] = {}
    versions: dict[str, str] = {}
    memory: dict[str, int] = {}
    models: tuple[dict[str, Any], ...] = ()
    parameters: tuple[ParameterRow, ...] | None = None
    first_timed_step: int = 0
    step_us: tuple[float, ...] = ()
    slowed_steps: tuple[tuple[int, int], ...] = ()

    def unprofiled_us(self) -> list[float]:
        """Durations of the steps that no window slowed, without the first of the job."""
        slow = [(0, _SETTLED_STEPS), *self.slowed_steps]
        steps = enumerate(self.step_us, self.first_timed_step)
        return [us for step, us in steps if not any(begin <= step < end for begin, end in slow)]


def recognise(head: bytes, path: Path) -> bool:
    """The description of a job that begins with this format."""
    return head.startswith(b'{"format":"%s"' % _FORMAT.encode())


def _is_profile(head: bytes, path: Path) -> bool:
    return path.name.endswith(_PROFILE)


def read(paths: Sequence[Path]) -> Trace:
    """The trace of the last whole window.

    Raises
    ------
    InputError
        No rank's files are whole, or the profiles are of several jobs.
    TraceFormatError
        A profile is damaged.
    """
    from dpro_search.collect.readers.kineto.importer import read as read_profiles  # needs scipy

    warnings: list[str] = []
    windows: dict[Path, dict[int, RecorderJobFile]] = defaultdict(dict)
    for path in paths:
        if path.name.endswith(_JOB):
            job, why = _job(path)
            if why:
                warnings.append(f"{path}: {why}; this rank was left out of {path.parent.name}")
            if job is not None:
                windows[path.parent][job.rank] = job
    if not any(windows.values()):
        raise InputError(f"{paths[0].parent}: no rank wrote a whole profile; {'; '.join(warnings) or 'record the job again'}")
    last = max(windows, key=lambda folder: max((job.window for job in windows[folder].values()), default=-1))
    chosen = max(windows, key=lambda folder: _preference(windows[folder]))
    jobs = dict(sorted(windows[chosen].items()))
    if chosen != last:
        warnings.append(f"{last}: {_lacking(windows[last])}, so that {chosen.name} was read, which has more ranks")
    trace = read_profiles([chosen / f"rank{rank:05d}{_PROFILE}" for rank in jobs])
    return _described(trace, list(jobs.values()), warnings)


def _preference(jobs: Mapping[int, RecorderJobFile]) -> tuple[int, int]:
    """Key by which windows are chosen: those with the most ranks, and among them the last."""
    return len(jobs), max((job.window for job in jobs.values()), default=-1)


def _lacking(jobs: Mapping[int, RecorderJobFile]) -> str:
    world = max((job.world_size for job in jobs.values()), default=0)
    missing = sorted(set(range(world)) - set(jobs))
    return f"the files of rank{'s' if len(missing) > 1 else ''} {numbers_text(missing)} are missing or not whole"


def _job(path: Path) -> tuple[RecorderJobFile | None, str]:
    """A rank's description, and why its files cannot be used ("": they can)."""
    try:
        job = msgspec.json.decode(read_regular(path), type=RecorderJobFile)
    except DAMAGED as error:
        return None, f"not whole, or damaged ({error})"
    if job.format != _FORMAT or job.version != 1:
        return None, f"of version {job.version}, which this release does not read"
    profile = path.with_name(path.name.removesuffix(_JOB) + _PROFILE)
    if profile.name != f"rank{job.rank:05d}{_PROFILE}":
        return None, f"describes rank {job.rank}"
    size = profile.stat().st_size if profile.is_file() else -1
    if size != job.profile_bytes:
        state = "is missing" if size < 0 else f"has {size} of {job.profile_bytes} bytes"
        return None, f"{profile.name} {state}; copy it again"
    return job, ""


def _described(trace: Trace, jobs: Sequence[RecorderJobFile], warnings: Sequence[str]) -> Trace:
    """The trace with what the ranks say of the job beside their profiles."""
    first = jobs[0]
    environment = {name: value for name, value in first.environment.items() if name not in _PLACE}
    meta = msgspec.structs.replace(
        trace.meta,
        versions={**first.versions, **trace.meta.versions},
        knobs={**environment, **dict(_settings(first)), **trace.meta.knobs},
        recorded_at=_recorded_at(first),
        peak_rss_bytes=max((job.memory.get("rss_bytes", 0) for job in jobs), default=0) or None,
        unprofiled_us=_unprofiled_us(jobs),
        warnings=(*warnings, *trace.meta.warnings),
    )
    trace = replace(trace, meta=meta)
    rows = first.parameters
    # Shapes in the profile are of the gradients themselves; the list is what is left without them.
    if rows and not trace.shapes and len(rows) == gradients_of_a_step(trace):
        trace = with_parameter_rows(trace, rows)
    return trace


def _settings(job: RecorderJobFile) -> Iterator[tuple[str, str]]:
    """Settings of the wrapper of a job's only model, such as ``ddp.bucket_cap_bytes``."""
    for model in job.models if len(job.models) == 1 else ():
        kind = model.get("kind")
        for name, value in model.items():
            if isinstance(kind, str) and name != "kind" and isinstance(value, str | int | float):
                yield f"{kind}.{name}", str(value)


def _recorded_at(job: RecorderJobFile) -> str:
    wall_ns = job.clocks[-1].get("wall_ns", 0) if job.clocks else 0
    return datetime.fromtimestamp(wall_ns / 1e9, UTC).isoformat(timespec="seconds") if 0 < wall_ns < 4e18 else ""


def _unprofiled_us(jobs: Sequence[RecorderJobFile]) -> float | None:
    """Median duration of all ranks' steps that no window slowed; None: too few were timed."""
    others_us = [us for job in jobs for us in job.unprofiled_us()]
    return float(np.median(others_us)) if len(others_us) >= _LEAST_STEPS * len(jobs) else None


IMPORTER = Importer(
    name="recorder",
    description="a folder of dpro_search.record (windows of profiles, with a description of the job of each rank)",
    recognise=recognise,
    read=read,
    companion=_is_profile,
)
