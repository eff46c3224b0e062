"""A Horovod timeline alone, without a profile of the computation: steps, fused groups and the pauses between them.

Rank 0 writes the timeline, so the events are as rank 0 saw them. It does not record where a step begins; but every step all-reduces
each gradient once, and no gradient of the next step can be ready before the last one of this step is back. So a step ends where
a tensor is enqueued again. From its first enqueue to its last completion it is recorded; the computation before that is only known
as the pause since the step before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from dpro_search.collect.assemble.described import described
from dpro_search.collect.readers.event_table import EventTable, clocks_as_recorded, steps_by_repetition
from dpro_search.collect.readers.horovod.timeline import KIND_OF_PHASE, HorovodTimeline, TimelinePhase, read_horovod_timeline
from dpro_search.collect.readers.importers import Importer
from dpro_search.collect.trace import CollectiveKind, DependencyKind, EventKind, TensorInfo, Trace
from dpro_search.errors import InputError, TraceFormatError

FORMAT = "horovod-timeline"
PAUSE = "computation (not recorded)"  # name of the events between steps

_MARK = b'"start_time_since_epoch_in_micros"'
_COMM_STREAM = 1  # Horovod's thread; stream 0 is the framework's


@dataclass
class _TensorAllReduce:
    """One all-reduce of one tensor: rows of the timeline."""

    tensor: int
    rows: list[int] = field(default_factory=list)
    enqueue_us: float = 0.0
    end_us: float | None = None  # None: not completed in the file
    collective: int = -1
    step: int = -1


def recognise(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` is a timeline of Horovod."""
    return head.lstrip().startswith(b"[") and _MARK in head


def read(paths: Sequence[Path]) -> Trace:
    """Read one timeline, also of a killed job.

    Every all-reduce gives a COMM event of rank 0 (enqueue to completion) and one of each phase. A last step that is not whole keeps
    its events, outside any step. Between steps lies an event `PAUSE`, which needs the step before and which the next step needs.

    Raises
    ------
    InputError
        The file cannot be read, or there are several.
    TraceFormatError
        Without an all-reduce.
    """
    if len(paths) != 1:
        raise InputError(f"{paths[0]} and {len(paths) - 1} more: a job has one Horovod timeline; import one at a time")
    timeline = read_horovod_timeline(paths[0])
    dropped = Counter({f"timeline {name.lower()}": count for name, count in timeline.skipped.items()})
    dropped["timeline unfinished"] = timeline.unfinished
    dropped.update(timeline.dropped)
    runs = _runs(timeline, dropped)
    if not runs:
        raise TraceFormatError(f"{paths[0]}: the timeline holds no all-reduce; record some training steps")
    steps = _steps(runs)
    warnings = _warnings(timeline, runs, len(steps), paths[0])
    events = EventTable()
    _add_runs(events, timeline, runs, steps)
    for instant in timeline.cycle_us.tolist():
        events.add("horovod cycle", EventKind.CYCLE, rank=0, stream=_COMM_STREAM, start_us=instant, end_us=instant)
    return described(
        events.trace(
            format=FORMAT,
            framework="unknown",
            comm="horovod",
            clock=clocks_as_recorded(max(timeline.ranks, 1), "all events are rank 0's"),
            steps=((0, number, start, end) for number, (start, end) in enumerate(steps)),
            dropped=dropped,
            warnings=warnings,
            tensors=(
                TensorInfo(name=t.name, node="", dtype=t.dtype, shape=t.shape, size_bytes=max(t.size_bytes, 0))
                for t in timeline.tensors
            ),
        )
    )


def _runs(timeline: HorovodTimeline, dropped: Counter[str]) -> list[_TensorAllReduce]:
    """The all-reduces in the order of their enqueues."""
    runs: list[_TensorAllReduce] = []
    under_way: dict[int, _TensorAllReduce] = {}
    columns = (timeline.tensor, timeline.phase, timeline.start_us, timeline.end_us, timeline.collective)
    for row, (tensor, phase, start_us, end_us, collective) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        if end_us < start_us:
            dropped["ends before it starts"] += 1
            continue
        run = under_way.get(tensor)
        if run is None:
            run = under_way[tensor] = _TensorAllReduce(tensor=tensor, enqueue_us=start_us)
            runs.append(run)
        run.collective = max(run.collective, collective)
        if phase != TimelinePhase.WHOLE:
            run.rows.append(row)
        else:
            run.end_us = end_us if end_us >= run.enqueue_us else None
            dropped["ends before it starts"] += run.end_us is None
            del under_way[tensor]
    return sorted(runs, key=lambda run: run.enqueue_us)


def _steps(runs: Sequence[_TensorAllReduce]) -> list[tuple[float, float]]:
    """First enqueue and last completion of every whole step; the runs learn their step."""
    groups: dict[int, list[_TensorAllReduce]] = defaultdict(list)
    for run, number in zip(runs, steps_by_repetition([run.tensor for run in runs]), strict=True):
        groups[number].append(run)
    last = len(groups) - 1
    missing = {run.tensor for run in groups.get(last - 1, ())} - {run.tensor for run in groups[last]}
    if missing or any(run.end_us is None for run in groups[last]):
        del groups[last]
    steps = []
    for number, group in groups.items():
        for run in group:
            run.step = number
        steps.append((group[0].enqueue_us, max(run.enqueue_us if run.end_us is None else run.end_us for run in group)))
    return steps


def _warnings(timeline: HorovodTimeline, runs: Sequence[_TensorAllReduce], steps: int, path: Path) -> tuple[str, ...]:
    warnings = []
    if timeline.truncated:
        warnings.append(f"{path.name} is cut off; the last record was left out")
    partial = [run for run in runs if run.step < 0]
    if partial:
        whole = len({run.tensor for run in runs})
        done = sum(run.end_us is not None for run in partial)
        warnings.append(
            f"{path.name} ends in step {steps}: {whole - done} of its {whole} all-reduces are missing or not completed, and the "
            f"{len(partial)} that began are in no step; how many steps followed is not in the file"
        )
    if not steps:
        warnings.append("no whole step")
    if not timeline.ranks:
        warnings.append("the number of ranks is not in the file; taken to be 1")
    return tuple(warnings)


def _add_runs(
    events: EventTable, timeline: HorovodTimeline, runs: Sequence[_TensorAllReduce], steps: Sequence[tuple[float, float]]
) -> None:
    last_end: list[list[int]] = [[] for _ in steps]  # events that a step's end waits for
    enqueued: list[list[int]] = [[] for _ in steps]
    for run in runs:
        tensor = timeline.tensors[run.tensor]
        about: dict[str, Any] = {
            "rank": 0,
            "step": run.step,
            "tensor": run.tensor,
            "collective": run.collective,
            "size_bytes": max(tensor.size_bytes, 0),
            "collective_kind": CollectiveKind.ALL_REDUCE,
        }
        if run.end_us is not None and run.end_us >= run.enqueue_us:
            comm = events.add(tensor.name, EventKind.COMM, start_us=run.enqueue_us, end_us=run.end_us, **about)
            if run.step >= 0:
                enqueued[run.step].append(comm)
                last_end[run.step].append(comm)
        for row in run.rows:
            kind = KIND_OF_PHASE[TimelinePhase(int(timeline.phase[row]))]
            span: dict[str, Any] = {"start_us": float(timeline.start_us[row]), "end_us": float(timeline.end_us[row])}
            events.add(f"horovod {kind.name.lower()}", kind, stream=_COMM_STREAM, **span, **about)
    for number, (before, after) in enumerate(pairwise(steps)):
        if after[0] < before[1]:
            continue
        pause = events.add(PAUSE, EventKind.OP, rank=0, start_us=before[1], end_us=after[0], step=number + 1)
        for source in last_end[number]:
            events.need(source, pause, DependencyKind.DATA)
        for target in enqueued[number + 1]:
            events.need(pause, target, DependencyKind.DATA)


IMPORTER = Importer(
    name=FORMAT,
    description="a Horovod timeline (a JSON list with start_time_since_epoch_in_micros)",
    recognise=recognise,
    read=read,
)
