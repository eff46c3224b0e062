"""Facts of `diagnose` that all jobs with parameter servers have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dpro_search.graph.measured import measured_iteration_us
from dpro_search.kinds._facts import critical_ops, critical_table, gain_rows, gain_table, path_facts
from dpro_search.kinds._job import Table
from dpro_search.kinds.servers.job import ParameterServerJob
from dpro_search.quantities import percent_text, time_text
from dpro_search.replay.replayer import replay
from dpro_search.replay.sensitivity import Change, OpScaled, gains, questions
from dpro_search.replay.server_replay import breakdown_us
from dpro_search.replay.timeline import Timeline
from dpro_search.space.plan import Plan
from dpro_search.space.replay_graph import ReplayGraph

Rows = list[dict[str, Any]]
_WORTH_PCT = 1.0  # of an iteration; smaller gains are not reported
_PLACEMENTS = {
    "servers_on_workers=1": "Servers on the workers' hosts (DPRO_SEARCH_SERVER_HOSTS=workers)",
    "servers_on_workers=0": "Servers on hosts of their own (DPRO_SEARCH_SERVER_HOSTS=own)",
}


def diagnosis_of_servers(
    job: ParameterServerJob[Any],
    kind_facts: Callable[[Timeline, Rows], dict[str, Any]],
    iterations: int | None = None,
) -> dict[str, Any]:
    """The facts of `Job.diagnose`.

    Parameters
    ----------
    kind_facts
        The facts `ranks`, `servers` and `findings`, from the replay and from what those plans would gain.
    iterations
        Number of iterations of each replay; None: until it settles.
    """
    replayed = partial(replay, iterations=iterations)
    recorded = job.replay_of(job.scenario)
    graph, folded = recorded.graph, recorded.folded_ranks
    timeline = replayed(graph)
    changes = [change for change in questions(graph, replay=replayed) if not folded.intersection(_ranks_of(change, graph))]
    plan_gains = [
        _gain(text, timeline.iteration_us, replayed(job.replay_of(dataclasses.replace(job.scenario, plan=plan)).graph).iteration_us)
        for text, plan in job.questions.items()
        if job.space.refusal(plan) is None
    ]
    return {
        "iteration_us": timeline.iteration_us,
        "measured_iteration_us": measured_iteration_us(job.trace),
        "breakdown_us": breakdown_us(timeline),
        "critical_path": path_facts(timeline),
        "gains": sorted([*gain_rows(gains(graph, changes, replay=replayed)), *plan_gains], key=lambda row: -float(row["gain_us"])),
        "critical_ops": critical_ops(timeline),
        **kind_facts(timeline, plan_gains),
        "warnings": list(job.trace.meta.warnings),
    }


def diagnosis_tables(facts: Mapping[str, Any], servers: Table) -> list[Table]:
    """The facts as tables for people, with the table of servers that the kind of job makes."""
    path = [
        (f"{row['kind'].lower()} of core {row['rank']}", time_text(row["duration_us"]), percent_text(row["share_pct"]))
        for row in facts["critical_path"]
    ]
    return [
        Table(title="critical path", columns=("what", "time", "share"), rows=path),
        critical_table(facts["critical_ops"]),
        servers,
        gain_table(facts["gains"], facts["iteration_us"]),
    ]


def knob_finding(knobs: Sequence[Mapping[str, Any]], named: Callable[[str], str]) -> list[str]:
    """The change that gains most, if it is worth one, by the name that the framework has for it."""
    best = max(knobs, key=lambda row: float(row["gain_us"]))
    if best["gain_pct"] < _WORTH_PCT:
        return []
    name = _PLACEMENTS.get(best["what_if"]) or named(best["what_if"])
    return [f"{name} would save {time_text(best['gain_us'])} ({percent_text(best['gain_pct'])}) an iteration."]


def spread_finding(servers: Sequence[Mapping[str, Any]], does: str, remedy: str) -> list[str]:
    """The server with most bytes, if that is much more than its share."""
    heaviest = max(servers, key=lambda row: float(row["bytes"]))
    fair_pct = 100 / len(servers)
    if heaviest["share_pct"] <= 1.1 * fair_pct:
        return []
    return [
        f"Server {heaviest['server']} {does} {heaviest['share_pct']:.0f} % of the bytes, {fair_pct:.0f} % would be even: "
        f"{remedy} spread them."
    ]


def _ranks_of(change: Change, graph: ReplayGraph) -> tuple[int, ...]:
    """The single rank that a change is about; empty for a change of all ranks."""
    if isinstance(change, OpScaled):
        return (int(graph.rank_of_op[change.op]),)
    rank = getattr(change, "rank", None)
    return () if rank is None else (rank,)


def other_placement(job: ParameterServerJob[Any]) -> dict[str, Plan]:
    """The plan that puts servers on other hosts, by how it is written; empty where links have no limit."""
    if job.unplanned_job.bytes_per_us is None:
        return {}
    other = not job.space.job.values["servers_on_workers"]
    return {f"servers_on_workers={int(other)}": Plan(servers_on_workers=other)}


def _gain(change: str, recorded_us: float, changed_us: float) -> dict[str, Any]:
    gain_us = recorded_us - changed_us
    return {
        "what_if": change,
        "predicted_iteration_us": changed_us,
        "gain_us": gain_us,
        "gain_pct": gain_us / recorded_us * 100,
    }
