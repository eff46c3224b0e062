"""Prediction and measurement of one step in one file for https://ui.perfetto.dev (Chrome trace format).

Two groups of processes: ``measured`` has the ops of each rank by thread, their gradients' communication, and Horovod's phases;
``predicted`` has each rank's main stream, the gradients from post to return, and the collectives. Flows lead from the post of a
gradient to the collective that carries it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from dpro_search.collect.trace import EventKind, Trace
from dpro_search.replay.horovod import machine
from dpro_search.replay.horovod.timeline import HorovodTimeline

_PHASES = (EventKind.NEGOTIATE, EventKind.MEMCPY_IN, EventKind.ALLREDUCE, EventKind.MEMCPY_OUT)
_STATE_NAMES = {
    machine.COPY_IN: "copy in",
    machine.LATENCY: "all-reduce (latency)",
    machine.TRANSFER: "all-reduce (transfer)",
    machine.COPY_OUT: "copy out",
}
_PREDICTED_PID, _HOROVOD_OFFSET = 1000, 900


def perfetto_json(trace: Trace, step: int, timeline: HorovodTimeline) -> bytes:
    """The file's content: a measured step, and an iteration of a replay that was logged. Both start at 0."""
    events = [*_measured(trace, step), *_predicted(timeline)]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _measured(trace: Trace, step: int) -> list[dict[str, Any]]:
    events = trace.events.select(trace.events.step == step)
    rows = (trace.steps.rank == 0) & (trace.steps.index == step)
    base_us = float(trace.steps.start_us[rows][0])
    found = [_named(rank, f"measured rank {rank}") for rank in range(trace.meta.ranks)]
    found.append(_named(_HOROVOD_OFFSET, "measured Horovod (rank 0)"))
    collective_start: dict[int, float] = {}
    for i in range(len(events)):
        kind = int(events.kind[i])
        start, duration = float(events.start_us[i]) - base_us, float(events.end_us[i] - events.start_us[i])
        if kind == EventKind.OP:
            found.append(_slice(trace.names[events.name[i]], int(events.rank[i]), int(events.stream[i]), start, duration))
        elif kind in _PHASES:
            tensor = trace.tensors[events.tensor[i]].name
            row = 1 + _PHASES.index(EventKind(kind))
            if kind == EventKind.ALLREDUCE:
                number = int(events.collective[i])
                if number in collective_start:
                    continue  # one slice for all tensors of a fused collective
                collective_start[number] = start
                tensor = f"collective of {int((events.collective == number).sum())} phases, first {tensor}"
            found.append(_slice(f"{EventKind(kind).name.lower()} {tensor}", _HOROVOD_OFFSET, row, start, duration))
    return found


def _predicted(timeline: HorovodTimeline) -> list[dict[str, Any]]:
    log = timeline.log
    steps = log[log[:, machine.LOG_KIND] == machine.LOG_STEP]
    iteration = int(steps[:, machine.LOG_ITERATION].max()) // 2
    first = steps[(steps[:, machine.LOG_ITERATION] == iteration), machine.LOG_START].min()
    last = steps[(steps[:, machine.LOG_ITERATION] == iteration), machine.LOG_END].max()
    log = log[(log[:, machine.LOG_START] >= first - 1) & (log[:, machine.LOG_START] <= last)]
    ranks = np.unique(log[log[:, machine.LOG_RANK] >= 0, machine.LOG_RANK]).astype(int).tolist()
    horovod = _PREDICTED_PID + _HOROVOD_OFFSET
    found = [_named(_PREDICTED_PID + rank, f"predicted rank {rank}") for rank in ranks]
    found.append(_named(horovod, "predicted Horovod"))
    collectives: dict[int, float] = {}
    for row in log:
        kind, start, duration = int(row[machine.LOG_KIND]), float(row[machine.LOG_START] - first), float(row[6] - row[5])
        if kind in _STATE_NAMES:
            number = int(row[machine.LOG_COLLECTIVE])
            name = f"{_STATE_NAMES[kind]}, {int(row[machine.LOG_UNIT])} tensors"
            collectives.setdefault(number, start)
            found.append(_slice(name, horovod, 1, start, duration))
        elif kind == machine.LOG_MAIN:
            found.append(_slice("script, forward, backward", _PREDICTED_PID + int(row[machine.LOG_RANK]), 1, start, duration))
    for flow, row in enumerate(log[log[:, machine.LOG_KIND] == machine.LOG_POST]):
        rank, unit, start = int(row[machine.LOG_RANK]), int(row[machine.LOG_UNIT]), float(row[machine.LOG_START] - first)
        pid, number = _PREDICTED_PID + rank, int(row[machine.LOG_COLLECTIVE])
        found.append(_slice(f"unit {unit}: post to return", pid, 100 + unit, start, float(row[6] - row[5])))
        if number in collectives:
            common = {"name": "posts", "cat": "flow", "id": flow}
            found.append({**common, "ph": "s", "pid": pid, "tid": 100 + unit, "ts": start})
            found.append({**common, "ph": "f", "bp": "e", "pid": horovod, "tid": 1, "ts": collectives[number]})
    return found


def _named(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}


def _slice(name: str, pid: int, tid: int, start_us: float, duration_us: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": round(start_us, 2),
        "dur": round(float(np.maximum(duration_us, 0)), 2),
    }
