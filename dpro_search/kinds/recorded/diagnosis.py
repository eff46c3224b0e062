"""Diagnosis of an imported trace: breakdown of the devices' time, gains, late ranks, slow links.

Every number is of the replayed iteration that `replay` predicts, but for `last_pct`, `cost_us`, `waited_us` and `links`, which were
measured in the recorded steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET

from dpro_search.cluster import Device
from dpro_search.graph.event_names import origins
from dpro_search.graph.recorded_collectives import GroupSpeed, Lateness, group_speeds, lateness
from dpro_search.kinds._answers import fields_of
from dpro_search.kinds._diagnosis import Diagnosis, PredictedGain, RankFacts, Table, critical_ops, critical_table, gain_table
from dpro_search.kinds._job import JobInScenario
from dpro_search.kinds.recorded.findings import findings, stall_findings
from dpro_search.kinds.recorded.questions import answers
from dpro_search.kinds.recorded.replay import RecordedReplay
from dpro_search.quantities import percent_text, time_text
from dpro_search.replay.device_time import RankTime
from dpro_search.replay.path.segments import path_totals
from dpro_search.replay.sentences import differs_from_median
from dpro_search.space.plan import Plan

_PARTS = ("compute_us", "exposed_communication_us", "waiting_for_ranks_us", "unknown_us", "idle_us", "host_bound_us")
PARTS = ("compute", "exposed_communication", "waiting_for_ranks", "unknown", "idle")  # of an iteration; they add up to it
_SHOWN_PCT = 0.1  # of an iteration


class DeviceFacts(RankFacts, frozen=True, kw_only=True, omit_defaults=True):
    """Time of a rank's devices in an iteration (`replay.device_time.RankTime`), and how late it comes to collectives.

    `cost_us` is the time that the others lost by it in a recorded step; None: not known.
    """

    last_pct: float | None
    waited_us: float | None
    cost_us: float | None
    compute_us: float
    exposed_communication_us: float
    waiting_for_ranks_us: float
    unknown_us: float
    idle_us: float
    host_bound_us: float
    transfer_us: float

    @property
    def parts_us(self) -> Mapping[str, float]:
        return {name: getattr(self, f"{name}_us") for name in PARTS}


class ProfileDiagnosis(Diagnosis, frozen=True, kw_only=True, omit_defaults=True):
    """The diagnosis of a profile.

    Attributes
    ----------
    predicted_mean_us, measured_mean_us
        Means over the steps, which steps that stall make longer than the medians.
    breakdown_us
        Parts of an iteration, mean over the ranks.
    links
        The speed of each group of ranks, as measured.
    """

    predicted_mean_us: float | None
    measured_mean_us: float | None
    breakdown_us: Mapping[str, float]
    ranks: tuple[DeviceFacts, ...]
    links: tuple[GroupSpeed, ...]

    @property
    def mean_us(self) -> float | None:
        return self.predicted_mean_us

    @property
    def tables(self) -> Sequence[Table]:
        ranks = [
            (
                str(row.rank),
                *(time_text(getattr(row, part)) for part in _PARTS),
                "unknown" if row.last_pct is None else percent_text(row.last_pct),
            )
            for row in self.ranks
        ]
        worth = [gain for gain in self.gains if gain.gain_pct is not UNSET and gain.gain_pct >= _SHOWN_PCT] or self.gains[:1]
        gains = gain_table(worth, self.iteration_us)
        mean_us = self.predicted_mean_us
        if mean_us is not None and differs_from_median(mean_us, self.iteration_us):
            means = [msgspec.structs.replace(gain, predicted_iteration_us=_mean_us(gain)) for gain in worth]
            gains = replace(gain_table(means, mean_us), title="what would it gain on average")
        columns = ("rank", "compute", "exposed comm.", "waits", "unknown", "idle", "host-bound", "came last")
        return (
            Table(title="ranks, per iteration", columns=columns, rows=ranks),
            *([gains] if worth else []),
            critical_table(self.critical_ops),
        )


def _mean_us(gain: PredictedGain) -> float:
    return gain.predicted_iteration_us if gain.predicted_mean_us is UNSET else gain.predicted_mean_us


def diagnosis(
    here: JobInScenario, replay: RecordedReplay, *, is_profiled: bool = True, device: Device | None = None
) -> ProfileDiagnosis:
    """The diagnosis of a profile without a plan.

    Parameters
    ----------
    replay
        The job without a plan.
    is_profiled
        Whether host threads are as slow as the profiler made them.
    device
        The GPU, on which lower precision may be asked about; None: it is not known, or the precision is another one already.
    """
    trace = replay.steps.trace
    base, timeline = replay.iterations(), replay.timeline()
    punctuality, speeds = {row.rank: row for row in lateness(trace)}, group_speeds(trace)
    gains = answers(replay, speeds, error=abs(here.replay_error), device=device)
    numbers, rows = trace.meta.numbers, replay.rows
    times = [msgspec.structs.replace(row, rank=numbers[row.rank]) for row in replay.rank_times]
    collective = next(iter(replay.steps.categories.collectives), "")
    hosts = dict(zip(numbers, trace.meta.hosts, strict=True))
    return ProfileDiagnosis(
        iteration_us=base.iteration_us,
        measured_iteration_us=here.measurement.median_us,
        predicted_mean_us=base.mean_us,
        measured_mean_us=replay.measured.mean_us,
        breakdown_us=base.breakdown_us,
        critical_path=tuple(
            msgspec.structs.replace(row, rank=numbers[row.rank] if row.rank >= 0 else -1) for row in path_totals(timeline)
        ),
        critical_ops=critical_ops(
            timeline, numbers=numbers, origins=origins(trace, replay.steps.ops.about[rows]) if len(rows) else ()
        ),
        ranks=tuple(_device_facts(row, hosts[row.rank], punctuality.get(row.rank)) for row in times),
        gains=tuple(gains),
        links=tuple(speeds),
        findings=(
            *stall_findings(replay, gains),
            *findings(
                times,
                gains,
                base.iteration_us,
                speeds,
                collective,
                profiled=is_profiled,
                stalls=replay.stalls,
                framework=trace.meta.framework,
                pipeline=bool(replay.steps.pipelines),
            ),
        ),
        warnings=trace.meta.warnings,
    )


def _device_facts(row: RankTime, host: str, late: Lateness | None) -> DeviceFacts:
    return DeviceFacts(
        host=host or None,
        last_pct=None if late is None else late.last_pct,
        cost_us=None if late is None else late.cost_us,
        waited_us=None if late is None else late.waited_us,
        **fields_of(row),
    )


def gains_of_plans(here: JobInScenario, base_us: float) -> Iterator[PredictedGain]:
    """The gain of each legal plan among the kind's questions over an iteration without a plan."""
    error_us = abs(here.replay_error) * base_us
    for text, plan in here.job.questions(here.scenario).items():
        if here.space.refusal(plan) is not None or here.space.simplest(plan) == Plan():
            continue
        after_us = here.predict(plan).iteration_us
        gain_us = base_us - after_us
        yield PredictedGain(
            what_if=text,
            topic="plan",
            ranks=(),
            meaning=f"--set {text}",
            predicted_iteration_us=after_us,
            gain_us=gain_us,
            gain_pct=100 * gain_us / base_us if base_us > 0 else 0.0,
            certain=gain_us > error_us,
        )


def with_plans(here: JobInScenario, of_profile: ProfileDiagnosis) -> dict[str, Any]:  # Any: fields have different types
    """The fields of a diagnosis of a profile, with the gains of plans among those of changes."""
    gains = [*of_profile.gains, *gains_of_plans(here, of_profile.iteration_us)]
    return fields_of(of_profile) | {"gains": tuple(sorted(gains, key=lambda gain: -gain.gain_us))}
