"""A replayed step beside the recorded one, op by op: what `--perfetto` shows of an imported trace."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dpro_search.collect.trace import EventKind, Floats, Ints, Trace
from dpro_search.graph.event_names import origins
from dpro_search.replay.outputs import MeasuredOps, PredictedOps
from dpro_search.replay.timeline import Timeline
from dpro_search.space.recorded.events import CALL_KINDS, DEVICE_KINDS, outermost
from dpro_search.space.recorded.ops import RecordedOps

_DECIMALS = 3


def about_ops(trace: Trace, timeline: Timeline, ops: RecordedOps, rows: Ints, *, compared: bool) -> PredictedOps:
    """Origin of each op of the timeline, the bytes of its collective, and where `compared` its measured time and the error.

    Idle time that is part of an op (`RecordedOps.unexplained_us`) does not count.

    Parameters
    ----------
    rows
        The recorded op that each op of the timeline is, [n].
    """
    if not len(rows):
        return PredictedOps()
    args: list[dict[str, str | float]] = [dict(origin) for origin in origins(trace, ops.about[rows])]
    events, event = trace.events, ops.event[rows]
    of_events = np.flatnonzero(event >= 0)
    moves = of_events[events.kind[event[of_events]] == EventKind.COLLECTIVE]
    size_bytes = np.zeros(len(rows), np.int64)
    size_bytes[moves] = np.maximum(events.size_bytes[event[moves]], 0)
    if compared and len(of_events):
        first = (timeline.iterations - 1) * len(timeline.graph)
        start_us, moved_us, end_us = (column[first + of_events] for column in timeline.times[1:4])
        gap_us = np.minimum(ops.unexplained_us[rows[of_events]], end_us - moved_us)
        start_us, moved_us = start_us + gap_us, moved_us + gap_us
        measured_start_us, measured_end_us = _moves_us(trace, event[of_events]), events.end_us[event[of_events]]
        late_us = (moved_us - start_us.min()) - (measured_start_us - events.start_us[event[of_events]].min())
        columns = (of_events, end_us - moved_us, measured_end_us - measured_start_us, late_us)
        for op, predicted, measured, late in zip(*(column.tolist() for column in columns), strict=True):
            args[op] |= {"measured_us": round(measured, _DECIMALS), "starts_later_us": round(late, _DECIMALS)}
            if measured > 0:
                args[op]["error_pct"] = round((predicted / measured - 1) * 100, _DECIMALS)
    return PredictedOps(args=args, size_bytes=size_bytes)


def measured_step(trace: Trace, step: int, timeline: Timeline, ops: RecordedOps, rows: Ints) -> MeasuredOps:
    """The recorded step that a timeline replays; the first ops of the devices of both are at one time."""
    events = trace.events
    inside = events.step == step
    chosen = np.flatnonzero(inside & np.isin(events.kind, (*DEVICE_KINDS, *CALL_KINDS)))
    if not np.isin(events.kind[chosen], CALL_KINDS).any():
        chosen = outermost(events.stream, events.start_us, events.end_us, np.flatnonzero(inside))
    replayed = _replayed(timeline, ops, rows)
    kind, stream = events.kind[chosen], events.stream[chosen]
    collective = np.where(kind == EventKind.COLLECTIVE, events.collective[chosen], -1)
    known = [dict[str, str | float](origin) for origin in origins(trace, chosen)]
    for args, event in zip(known, chosen.tolist(), strict=True):
        args |= replayed.get(event, {})
    begin_us = float(events.start_us[chosen].min(initial=np.inf))
    begin_us = min(begin_us, _anchor_us(trace, timeline, ops, rows, begin_us))
    counted = trace.memory.time_us
    until_us = float(events.end_us[chosen].max(initial=begin_us))
    in_step = (counted >= begin_us) & (counted <= until_us)
    return MeasuredOps(
        name=[trace.names[name] for name in events.name[chosen].tolist()],
        rank=events.rank[chosen],
        stream=stream,
        start_us=events.start_us[chosen] - begin_us,
        end_us=events.end_us[chosen] - begin_us,
        args=known,
        stream_names={int(s): _stream_name(int(s)) for s in np.unique(stream)},
        collective=collective,
        size_bytes=np.where(kind == EventKind.COLLECTIVE, np.maximum(events.size_bytes[chosen], 0), 0),
        memory_rank=trace.memory.rank[in_step],
        memory_us=counted[in_step] - begin_us,
        memory_bytes=trace.memory.allocated_bytes[in_step],
    )


def _replayed(timeline: Timeline, ops: RecordedOps, rows: Ints) -> Mapping[int, dict[str, float]]:
    """Predicted time of each event that is an op of the timeline."""
    event = ops.event[rows]
    of_events = np.flatnonzero(event >= 0)
    first = (timeline.iterations - 1) * len(timeline.graph)
    _, _, moved_us, end_us, *_ = timeline.times
    took_us = np.maximum((end_us - moved_us)[first + of_events] - ops.unexplained_us[rows[of_events]], 0.0)
    return {at: {"predicted_us": round(us, _DECIMALS)} for at, us in zip(event[of_events].tolist(), took_us.tolist(), strict=True)}


def _anchor_us(trace: Trace, timeline: Timeline, ops: RecordedOps, rows: Ints, fallback_us: float) -> float:
    """The recorded time at which the shown replay begins, so that the first device op is at one place in both."""
    event = ops.event[rows]
    of_events = np.flatnonzero(event >= 0)
    if not len(of_events):
        return fallback_us
    start_us = timeline.times.start_us[(timeline.iterations - 1) * len(timeline.graph) :]
    return float(trace.events.start_us[event[of_events]].min() - (start_us[of_events].min() - start_us.min()))


def _moves_us(trace: Trace, event: Ints) -> Floats:
    """When the work of each event began: of a collective on several ranks, when the last of them enqueued it."""
    events = trace.events
    moves_us: Floats = events.start_us[event].copy()
    parts = np.flatnonzero((events.kind[event] == EventKind.COLLECTIVE) & (events.collective[event] >= 0))
    if len(parts):
        _, of = np.unique(events.collective[event[parts]], return_inverse=True)
        last = np.full(int(of.max()) + 1, -np.inf)
        np.maximum.at(last, of, moves_us[parts])
        moves_us[parts] = last[of]
    return moves_us


def _stream_name(stream: int) -> str:
    return f"host thread {-stream}" if stream < 0 else f"stream {stream}"
