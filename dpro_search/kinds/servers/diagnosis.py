"""Facts of `diagnose` that all jobs with parameter servers have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from dpro_search.graph.measured import measured_iteration_us
from dpro_search.kinds._diagnosis import Diagnosis, PredictedGain, RankFacts, Table, critical_ops, critical_table, gain_table
from dpro_search.kinds._job import JobInScenario
from dpro_search.kinds.servers.job import ParameterServerJob
from dpro_search.quantities import percent_text, time_text
from dpro_search.replay.path.segments import path_totals
from dpro_search.replay.replayer import replay
from dpro_search.replay.sensitivity import Change, OpScaled, gains, questions
from dpro_search.replay.server_replay import breakdown_us
from dpro_search.replay.timeline import Timeline
from dpro_search.space.plan import Plan
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.servers.placement import on_workers
from dpro_search.space.servers.store_job import StoreJob

_WORTH_PCT = 1.0  # of an iteration; smaller gains are not reported
_PLACEMENTS = {
    "servers_on_workers=1": "Servers on the workers' hosts (DPRO_SEARCH_SERVER_HOSTS=workers)",
    "servers_on_workers=0": "Servers on hosts of their own (DPRO_SEARCH_SERVER_HOSTS=own)",
}


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter server: its number, and the bytes that it holds or sums, also as a share of all servers'."""

    server: int
    size_bytes: float = msgspec.field(name="bytes")
    share_pct: float


class ServerDiagnosis(Diagnosis, frozen=True, kw_only=True, omit_defaults=True):
    """The diagnosis of a job with parameter servers; `breakdown_us` has parts of the iteration of the slowest rank."""

    breakdown_us: Mapping[str, float]
    servers: tuple[ServerFacts, ...]

    @property
    def tables(self) -> Sequence[Table]:
        path = [
            (f"{row.kind.lower()} of core {row.rank}", time_text(row.duration_us), percent_text(row.share_pct))
            for row in self.critical_path
        ]
        return (
            Table(title="critical path", columns=("what", "time", "share"), rows=path),
            critical_table(self.critical_ops),
            self.server_table,
            gain_table(self.gains, self.iteration_us),
        )

    @property
    def server_table(self) -> Table:
        """The table of what each server has or does."""
        raise NotImplementedError


class KindFacts(NamedTuple):
    """Facts of a diagnosis that one kind of servers has."""

    ranks: tuple[RankFacts, ...]
    servers: tuple[ServerFacts, ...]
    findings: list[str]


def diagnosis_of_servers(
    job: ParameterServerJob[Any],
    here: JobInScenario,
    diagnosis_type: type[ServerDiagnosis],
    kind_facts: Callable[[Timeline, Sequence[PredictedGain]], KindFacts],
    iterations: int | None = None,
) -> ServerDiagnosis:
    """The diagnosis of a job with parameter servers.

    Parameters
    ----------
    kind_facts
        Facts from the replay and from what the kind's plans would gain.
    iterations
        Number of iterations of each replay; None: until it settles.
    """
    replayed = partial(replay, iterations=iterations)
    recorded = job.replay_of(here.scenario)
    graph, folded = recorded.graph, recorded.folded_ranks
    timeline = replayed(graph)
    changes = [change for change in questions(graph, replay=replayed) if not folded.intersection(_ranks_of(change, graph))]
    plan_gains = [
        _gain(
            text, timeline.iteration_us, replayed(job.replay_of(dataclasses.replace(here.scenario, plan=plan)).graph).iteration_us
        )
        for text, plan in job.questions(here.scenario).items()
        if here.space.refusal(plan) is None
    ]
    graph_gains = (
        _gain(gain.change.text, timeline.iteration_us, gain.iteration_us) for gain in gains(graph, changes, replay=replayed)
    )
    ranks, servers, findings = kind_facts(timeline, plan_gains)
    return diagnosis_type(
        iteration_us=timeline.iteration_us,
        measured_iteration_us=measured_iteration_us(job.trace),
        breakdown_us=breakdown_us(timeline),
        critical_path=path_totals(timeline),
        critical_ops=critical_ops(timeline),
        ranks=ranks,
        servers=servers,
        gains=tuple(sorted([*graph_gains, *plan_gains], key=lambda gain: -gain.gain_us)),
        findings=tuple(findings),
        warnings=job.trace.meta.warnings,
    )


def knob_finding(knobs: Sequence[PredictedGain], named: Callable[[str], str]) -> list[str]:
    """The change that gains most, if it is worth one, by the name that the framework has for it."""
    best = max(knobs, key=lambda gain: gain.gain_us)
    if best.gain_pct is UNSET or best.gain_pct < _WORTH_PCT:
        return []
    name = _PLACEMENTS.get(best.what_if) or named(best.what_if)
    return [f"{name} would save {time_text(best.gain_us)} ({percent_text(best.gain_pct)}) an iteration."]


def spread_finding(servers: Sequence[ServerFacts], does: str, remedy: str) -> list[str]:
    """The server with most bytes, if that is much more than its share."""
    heaviest = max(servers, key=lambda row: row.size_bytes)
    fair_pct = 100 / len(servers)
    if heaviest.share_pct <= 1.1 * fair_pct:
        return []
    return [
        f"Server {heaviest.server} {does} {heaviest.share_pct:.0f} % of the bytes, {fair_pct:.0f} % would be even: "
        f"{remedy} spread them."
    ]


def _ranks_of(change: Change, graph: ReplayGraph) -> tuple[int, ...]:
    """The single rank that a change is about; empty for a change of all ranks."""
    if isinstance(change, OpScaled):
        return (int(graph.rank_of_op[change.op]),)
    rank = getattr(change, "rank", None)
    return () if rank is None else (rank,)


def other_placement(job: StoreJob) -> dict[str, Plan]:
    """The plan that puts servers on other hosts, by how it is written; empty where links have no limit."""
    if job.bytes_per_us is None:
        return {}
    other = not on_workers(len(job.workers), job.server_host)
    return {f"servers_on_workers={int(other)}": Plan(servers_on_workers=other)}


def _gain(change: str, recorded_us: float, changed_us: float) -> PredictedGain:
    gain_us = recorded_us - changed_us
    return PredictedGain(what_if=change, predicted_iteration_us=changed_us, gain_us=gain_us, gain_pct=gain_us / recorded_us * 100)
