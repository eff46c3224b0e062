"""Diagnosis of a Horovod job: facts, and findings: sentences with numbers and the setting to change, the costliest first."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import UNSET

from dpro_search.collect.trace import Trace
from dpro_search.graph.measured import measured_iteration_us
from dpro_search.graph.recorded_collectives import Arrival, arrivals
from dpro_search.kinds._diagnosis import (
    Diagnosis,
    PredictedGain,
    Table,
    critical_ops,
    critical_table,
    gain_table,
    rank_facts,
    rank_table,
)
from dpro_search.quantities import percent_text, size_text, time_text
from dpro_search.replay.horovod.ops import iteration_ops
from dpro_search.replay.horovod.schedule import HorovodSchedule
from dpro_search.replay.memory import memory
from dpro_search.replay.path.findings import path_findings
from dpro_search.replay.path.segments import LATE_RANK, PathSegment, path_segments
from dpro_search.replay.path.slack import slack_us
from dpro_search.replay.replayer import replay
from dpro_search.replay.sentences import WORTH_PCT, share
from dpro_search.replay.timeline import Timeline
from dpro_search.space.plan import Plan

_TOP_BUFFERS = 5
_OFTEN_PCT = 75.0  # a rank that comes last to so many collectives is a straggler


class Slack(msgspec.Struct, frozen=True, kw_only=True):
    """How much later the ops that take time could end, in an iteration in the middle: others follow it."""

    ops: int
    below_1_ms_pct: float
    p10_us: float
    p50_us: float
    p90_us: float


class BufferFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A buffer of a tensor."""

    name: str
    size_bytes: float = msgspec.field(name="bytes")


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Peak memory of a rank, as far as the recording knows it: when it is reached, and the largest buffers then."""

    rank: int
    peak_bytes: float
    peak_op: str | None
    buffers: tuple[BufferFacts, ...]


class HorovodDiagnosis(Diagnosis, frozen=True, kw_only=True, omit_defaults=True):
    """The diagnosis of a Horovod job; `critical_ops`, `slack` and `memory` are those of the replay of single ops."""

    op_level_iteration_us: float
    slack: Slack
    memory: tuple[MemoryFacts, ...]

    @property
    def tables(self) -> Sequence[Table]:
        shares: dict[str, float] = {}
        for segment in self.critical_path:
            shares[segment.kind] = shares.get(segment.kind, 0.0) + segment.duration_us
        length_us = sum(shares.values()) or 1.0
        path = [
            (kind, time_text(spent_us), percent_text(spent_us / length_us * 100))
            for kind, spent_us in sorted(shares.items(), key=lambda item: -item[1])
        ]
        slack = self.slack
        room = [(percent_text(slack.below_1_ms_pct), *(time_text(us) for us in (slack.p10_us, slack.p50_us, slack.p90_us)))]
        buffers = [
            (str(row.rank), size_text(row.peak_bytes), row.buffers[0].name if row.buffers else "none") for row in self.memory
        ]
        return (
            Table(title="critical path", columns=("what", "time", "share"), rows=path),
            rank_table(self.ranks),
            gain_table(self.gains, self.iteration_us),
            critical_table(self.critical_ops),
            Table(title="slack of ops", columns=("less than 1 ms", "10 %", "50 %", "90 %"), rows=room),
            Table(title="memory", columns=("rank", "variables, gradients, buffer", "largest"), rows=buffers),
        )


def diagnosis(trace: Trace, schedule: HorovodSchedule, gains: Sequence[PredictedGain]) -> Diagnosis:
    """The diagnosis of a Horovod job without a plan."""
    timeline, gains = schedule.logged(), _with_knobs(gains)
    path = path_segments(iteration_ops(timeline))
    ops = replay(schedule.single_ops())
    return HorovodDiagnosis(
        iteration_us=timeline.iteration_us,
        measured_iteration_us=measured_iteration_us(trace),
        critical_path=path,
        critical_ops=critical_ops(ops),
        ranks=rank_facts(trace, timeline.rank_breakdown_us),
        gains=gains,
        findings=findings(path, arrivals(trace), gains, timeline.iteration_us),
        warnings=trace.meta.warnings,
        op_level_iteration_us=ops.iteration_us,
        slack=_slack(ops),
        memory=_memory(ops),
    )


def _slack(timeline: Timeline) -> Slack:
    graph = timeline.graph
    middle = timeline.iterations // 2 * len(graph)
    slacks_us = slack_us(timeline)[middle : middle + len(graph)][graph.duration_us > 0]
    p10, p50, p90 = np.quantile(slacks_us, (0.1, 0.5, 0.9)).tolist()
    return Slack(ops=len(slacks_us), below_1_ms_pct=float((slacks_us < 1000).mean()) * 100, p10_us=p10, p50_us=p50, p90_us=p90)


def _memory(timeline: Timeline) -> tuple[MemoryFacts, ...]:
    graph = timeline.graph
    return tuple(
        MemoryFacts(
            rank=usage.rank,
            peak_bytes=usage.peak_bytes,
            peak_op=graph.name(usage.peak_op % len(graph)) if usage.peak_op >= 0 else None,
            buffers=tuple(
                BufferFacts(name=graph.buffer_names[number % len(graph.buffer_op)], size_bytes=taken)
                for number, taken in zip(usage.alive[:_TOP_BUFFERS].tolist(), usage.alive_bytes.tolist(), strict=False)
            ),
        )
        for usage in memory(timeline)
    )


def _with_knobs(gains: Sequence[PredictedGain]) -> tuple[PredictedGain, ...]:
    """The gains; those that a variable of the environment answers name it."""
    variables = {text: variable for text, variable, _ in _knobs()}
    return tuple(msgspec.structs.replace(gain, knob=variables.get(gain.what_if, UNSET)) for gain in gains)


def questions() -> dict[str, Plan]:
    """Other settings of Horovod, by how ``--set`` takes them."""
    return {text: plan for text, _, plan in _knobs()}


def _knobs() -> list[tuple[str, str, Plan]]:
    """Settings of Horovod that are worth a look: (option of ``replay --set``, variable, plan)."""
    settings = []
    for mib in (1, 8, 64):
        threshold = mib * 2**20
        changed = Plan.of(fusion_threshold_bytes=threshold)
        settings.append((f"fusion_threshold_bytes={threshold}", f"HOROVOD_FUSION_THRESHOLD={threshold}", changed))
    for cycle_ms in (1, 10):
        changed = Plan.of(cycle_time_us=cycle_ms * 1000.0)
        settings.append((f"cycle_time_us={cycle_ms * 1000}", f"HOROVOD_CYCLE_TIME={cycle_ms}", changed))
    return settings


def findings(
    path: Sequence[PathSegment], late: Sequence[Arrival], gains: Sequence[PredictedGain], iteration_us: float
) -> tuple[str, ...]:
    """Those of `path_findings` with Horovod's knobs; who comes late is taken from the recording.

    Parameters
    ----------
    late
        Of every rank, how often it comes last.
    gains
        Gains, with knobs.
    """
    best = max((gain for gain in gains if gain.knob), key=lambda gain: gain.gain_us, default=None)
    advice = "no other fusion threshold or cycle time that was tried would gain anything; a faster link or compression would"
    if best is not None and best.gain_us >= WORTH_PCT / 100 * iteration_us:
        advice = f"'{best.knob}' would gain {share(best.gain_us, iteration_us)}"
    on_path = [segment for segment in path if segment.kind != LATE_RANK]
    return path_findings(on_path, gains, iteration_us, advice=advice, more=_late_ranks(late, iteration_us))


def _late_ranks(late: Sequence[Arrival], iteration_us: float) -> list[tuple[float, str]]:
    return [
        (
            waited_us,
            f"Rank {row.rank} comes last to {row.last_pct:.0f} % of the all-reduces, and the others wait "
            f"{share(waited_us, iteration_us)} for it: give it less work, or look at its host and at what else runs on its cores.",
        )
        for row in late
        if row.last_pct >= _OFTEN_PCT and (waited_us := max(other.waited_us for other in late if other.rank != row.rank)) > 0
    ]
