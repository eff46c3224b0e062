"""The part of the assembly that Horovod jobs of all frameworks share: ``job.json``, and the timeline's phases as events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from dpro_search.collect.assemble.common import RankFile, RawJobFile, event_columns, job_facts, joined, step_of
from dpro_search.collect.readers._salvage import loss_warnings
from dpro_search.collect.readers.horovod.timeline import KIND_OF_PHASE, HorovodTimeline, TimelinePhase
from dpro_search.collect.trace import CollectiveKind, CommSettings, EventKind, Events, Steps, TensorInfo

EXACT_GROUPS = "HOROVOD_DISABLE_GROUP_FUSION"


class IdleComm(msgspec.Struct):
    """Processor time of the communication's threads while nothing was to be sent."""

    wall_ns: tuple[int, int]
    comm_cpu_ns: int


class HorovodRankFile(RankFile, kw_only=True):
    """``hook.json`` of one rank of a Horovod job."""

    idle_comm: IdleComm | None = None


class HorovodJobFile(RawJobFile, kw_only=True):
    """``job.json`` of a Horovod job."""

    settings: CommSettings


def horovod_facts(job: HorovodJobFile, hooks: Sequence[HorovodRankFile], timeline: HorovodTimeline) -> dict[str, Any]:
    """Fields of `TraceMeta` that launcher, hooks and timeline of Horovod jobs of all frameworks report in the same way."""
    return {
        **job_facts(job, hooks),
        "comm": "horovod",
        "knobs": job.knobs,
        "idle_cycle_cpu_us": _idle_cycle_cpu_us(hooks[0].idle_comm, timeline),
    }


def settings_with_groups(job: HorovodJobFile, tensors: Sequence[TensorInfo]) -> CommSettings:
    """The job's knobs, with the tensors that share an op as exact groups if Horovod may not fuse them with others."""
    if EXACT_GROUPS not in job.knobs:
        return job.settings
    members: dict[str, list[str]] = {}
    for tensor in tensors:
        members.setdefault(tensor.node, []).append(tensor.name)
    groups = tuple(tuple(names) for names in members.values() if len(names) > 1)
    return msgspec.structs.replace(job.settings, groups=groups) if groups else job.settings


def phase_events(
    timeline: HorovodTimeline, base_ns: int, steps: Steps, tensor_of_horovod: dict[str, int], names: dict[str, int]
) -> Events:
    """Horovod's phases within the steps, as rank 0 wrote them."""
    shift_us = (timeline.origin_ns - base_ns) / 1e3
    tensor_of = np.array([tensor_of_horovod.get(tensor.name, -1) for tensor in timeline.tensors], dtype=np.int64)
    kind_of = np.full(max(TimelinePhase) + 1, -1, dtype=np.int64)
    for phase, kind in KIND_OF_PHASE.items():
        kind_of[phase] = kind
    start = timeline.start_us + shift_us
    keep = (kind_of[timeline.phase] >= 0) & (tensor_of[timeline.tensor] >= 0) & (step_of(steps, 0, start) >= 0)
    kind_names = np.zeros(max(EventKind) + 1, dtype=np.int64)
    for kind in (*KIND_OF_PHASE.values(), EventKind.CYCLE):
        kind_names[kind] = names.setdefault(f"horovod {kind.name.lower()}", len(names))
    kinds = kind_of[timeline.phase[keep]]
    phases = event_columns(
        name=kind_names[kinds],
        kind=kinds,
        start_us=start[keep],
        end_us=timeline.end_us[keep] + shift_us,
        step=step_of(steps, 0, start[keep]),
        tensor=tensor_of[timeline.tensor[keep]],
        collective=timeline.collective[keep],
        size_bytes=timeline.size_bytes[keep],
        collective_kind=CollectiveKind.ALL_REDUCE,
    )
    cycle = timeline.cycle_us + shift_us
    cycle = cycle[step_of(steps, 0, cycle) >= 0]
    marks = event_columns(
        name=kind_names[EventKind.CYCLE], kind=EventKind.CYCLE, start_us=cycle, end_us=cycle, step=step_of(steps, 0, cycle)
    )
    return joined([phases, marks])


def with_collectives(events: Events) -> Events:
    """Give every rank's communication span the number of the collective that its tensor travelled in at that step."""
    transfer = (events.kind == EventKind.ALLREDUCE) & (events.step >= 0)
    key = {
        (int(step), int(tensor)): int(number)
        for step, tensor, number in zip(events.step[transfer], events.tensor[transfer], events.collective[transfer], strict=True)
    }
    collective = events.collective.copy()
    for i in np.flatnonzero(events.kind == EventKind.COMM):
        collective[i] = key.get((int(events.step[i]), int(events.tensor[i])), -1)
    return replace(events, collective=collective)


def _idle_cycle_cpu_us(idle: IdleComm | None, timeline: HorovodTimeline) -> float | None:
    """CPU time of a cycle that sends nothing; None where it was not measured."""
    if idle is None:
        return None
    cycle_ns = timeline.origin_ns + timeline.cycle_us * 1e3
    count = int(((cycle_ns >= idle.wall_ns[0]) & (cycle_ns < idle.wall_ns[1])).sum())
    return idle.comm_cpu_ns / 1e3 / count if count else None


def timeline_warnings(timeline: HorovodTimeline, events: Events) -> list[str]:
    """Warnings about the timeline. `events`: those of the whole job, with their collectives."""
    warnings = ["horovod_timeline.json is cut off; the last record was left out"] if timeline.truncated else []
    warnings += loss_warnings(timeline.dropped)
    in_steps = (events.kind == EventKind.COMM) & (events.rank == 0) & (events.step >= 0)
    missing = in_steps & (events.collective < 0)
    if missing.any():
        steps, without = len(np.unique(events.step[in_steps])), len(np.unique(events.step[missing]))
        warnings.append(
            f"horovod_timeline.json lacks {missing.sum()} of the {in_steps.sum()} all-reduces of the profiled steps, in {without} "
            f"of {steps} steps: was the job ended early, or the file cut?"
        )
    return warnings


def timeline_dropped(timeline: HorovodTimeline) -> dict[str, int]:
    """Counts of records that the timeline's reader left out, by reason."""
    skipped = {f"timeline {name.lower()}": count for name, count in timeline.skipped.items()}
    return skipped | timeline.dropped | ({"timeline unfinished": timeline.unfinished} if timeline.unfinished else {})
