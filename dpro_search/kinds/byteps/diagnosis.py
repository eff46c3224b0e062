"""What `diagnose` says of a job with BytePS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dpro_search.graph.measured import measured_iteration_us
from dpro_search.kinds._base import Table
from dpro_search.kinds._facts import critical_ops, gain_rows, path_facts
from dpro_search.kinds._stores import PLACEMENTS, WORTH_PCT, StoreJob, breakdown_us, knob_rows, placement_question
from dpro_search.quantities import percent_text, size_text
from dpro_search.replay.replayer import replay
from dpro_search.replay.sensitivity import gains
from dpro_search.space.byteps_job import BytepsJob
from dpro_search.space.plan import Plan

_ASKED_ITERATIONS = 16  # of a replay that answers one of many questions


def diagnosis(plans: StoreJob[BytepsJob]) -> dict[str, Any]:
    """The facts of `Job.diagnose`; also ``servers``."""
    trace = plans.trace
    job = plans.recorded_job
    graph = plans.graph(Plan())
    asked = partial(replay, iterations=_ASKED_ITERATIONS)
    timeline = asked(graph)
    knobs = _knob_gains(plans, timeline.iteration_us)
    return {
        "iteration_us": timeline.iteration_us,
        "measured_iteration_us": measured_iteration_us(trace),
        "breakdown_us": breakdown_us(timeline),
        "critical_path": path_facts(timeline),
        "ranks": [{"rank": rank, "host": host} for rank, host in enumerate(trace.meta.hosts)],
        "servers": _server_facts(job),
        "gains": sorted([*gain_rows(gains(graph, replay=asked)), *knobs], key=lambda row: -float(row["gain_us"])),
        "critical_ops": critical_ops(timeline),
        "findings": _findings(job, knobs),
        "warnings": list(trace.meta.warnings),
    }


def server_table(facts: Mapping[str, Any]) -> Table:
    """What each server has."""
    rows = [
        (str(row["server"]), str(row["partitions"]), size_text(row["bytes"]), percent_text(row["share_pct"]))
        for row in facts["servers"]
    ]
    return Table(title="what the servers sum", columns=("server", "partitions", "sums", "share"), rows=rows)


def _server_facts(job: BytepsJob) -> list[dict[str, Any]]:
    """Load of each server, by the partitions that are hashed to it."""
    parts = [part for tensor in range(len(job.tensor_bytes)) for part in job.parts(tensor)]
    total = float(job.tensor_bytes.sum())
    rows = []
    for server in range(len(job.server_core)):
        mine = [part.size_bytes for part in parts if part.server == server]
        rows.append({"server": server, "partitions": len(mine), "bytes": sum(mine), "share_pct": sum(mine) / total * 100})
    return rows


def _knob_gains(plans: StoreJob[BytepsJob], iteration_us: float) -> list[dict[str, Any]]:
    """What other values of the knobs would gain, by name of the change."""

    job = plans.recorded_job
    servers, sizes = len(job.server_core) + 1, (job.partition_bytes // 4, job.partition_bytes * 4)
    asked = {f"servers={servers}": Plan(servers=servers)}
    asked |= {f"partition_bytes={size}": Plan.of(partition_bytes=size) for size in sizes if size} | placement_question(plans)
    legal = {text: plan for text, plan in asked.items() if plans.space.refusal(plan) is None}
    return knob_rows(plans, iteration_us, legal, _ASKED_ITERATIONS)


def _findings(job: BytepsJob, knobs: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences with numbers and the knob to turn."""

    found = []
    variable = {"servers": "DMLC_NUM_SERVER", "partition_bytes": "BYTEPS_PARTITION_BYTES"}
    best = max(knobs, key=lambda row: float(row["gain_us"]))
    if best["gain_pct"] >= WORTH_PCT:
        key, _, value = best["what_if"].partition("=")
        named = PLACEMENTS.get(best["what_if"]) or f"{variable[key]}={value}"
        found.append(f"{named} would save {best['gain_us'] / 1e3:.1f} ms ({best['gain_pct']:.1f} %) an iteration.")
    loads = _server_facts(job)
    heaviest = max(loads, key=lambda row: float(row["bytes"]))
    fair_pct = 100 / len(loads)
    if heaviest["share_pct"] > 1.1 * fair_pct:
        found.append(
            f"Server {heaviest['server']} sums {heaviest['share_pct']:.0f} % of the bytes, {fair_pct:.0f} % would be even: "
            "smaller BYTEPS_PARTITION_BYTES or another BYTEPS_KEY_HASH_FN spread them."
        )
    if job.worker_polling > 0.05:
        found.append(
            f"Looking for work takes {job.worker_polling * 100:.0f} % of each worker's core: give BytePS a core of its own."
        )
    return found
