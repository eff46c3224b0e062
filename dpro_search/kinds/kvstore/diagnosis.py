"""What `diagnose` says of a job with parameter servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpro_search.graph.measured import measured_iteration_us
from dpro_search.kinds._base import Table
from dpro_search.kinds._facts import critical_ops, gain_rows, path_facts
from dpro_search.kinds._stores import PLACEMENTS, WORTH_PCT, StoreJob, breakdown_us, knob_rows, placement_question
from dpro_search.quantities import percent_text, size_text, time_text
from dpro_search.replay.replayer import replay
from dpro_search.replay.sensitivity import gains
from dpro_search.space.kvstore_job import KvstoreJob, process_loads
from dpro_search.space.plan import Plan


def diagnosis(plans: StoreJob[KvstoreJob]) -> dict[str, Any]:
    """The facts of `Job.diagnose`; also ``servers``."""
    trace = plans.trace
    job = plans.recorded_job
    graph = plans.graph(Plan())
    timeline = replay(graph)
    workers = len(job.workers)
    loads = process_loads(job)
    facts = [
        {
            "rank": rank,
            "host": host,
            "role": "worker" if rank < workers else "server",
            "core_us": load.core_us,
            "sent_bytes": load.sent_bytes,
            "received_bytes": load.received_bytes,
            "link_pct": None if load.link_us is None else load.link_us / timeline.iteration_us * 100,
        }
        for rank, (host, load) in enumerate(zip(trace.meta.hosts, loads, strict=True))
    ]
    servers = _server_facts(job)
    for row, fact in zip(servers, facts[workers:], strict=True):
        row |= {key: fact[key] for key in ("rank", "core_us", "link_pct")}
    knobs = _knob_gains(plans, timeline.iteration_us)
    return {
        "iteration_us": timeline.iteration_us,
        "measured_iteration_us": measured_iteration_us(trace),
        "breakdown_us": breakdown_us(timeline),
        "critical_path": path_facts(timeline),
        "ranks": facts,
        "servers": servers,
        "gains": sorted([*gain_rows(gains(graph)), *knobs], key=lambda row: -float(row["gain_us"])),
        "critical_ops": critical_ops(timeline),
        "findings": _findings(facts, servers, knobs, timeline.iteration_us),
        "warnings": list(trace.meta.warnings),
    }


def server_table(facts: Mapping[str, Any]) -> Table:
    """What each server has."""
    rows = [
        (
            str(row["server"]),
            str(row["keys"]),
            str(row["slices"]),
            size_text(row["bytes"]),
            time_text(row["core_us"]),
            "no limit" if row["link_pct"] is None else percent_text(row["link_pct"]),
        )
        for row in facts["servers"]
    ]
    return Table(title="what the servers have", columns=("server", "keys", "slices", "holds", "core", "link busy"), rows=rows)


def _server_facts(job: KvstoreJob) -> list[dict[str, Any]]:
    """What each server has of the parameters."""
    slices = [(tensor, *part) for tensor, row in enumerate(job.slices) for part in row]
    total = float(job.tensor_bytes.sum())
    rows = []
    for server in range(len(job.server_core)):
        mine = [(tensor, size) for tensor, owner, size in slices if owner == server]
        held = sum(size for _, size in mine)
        rows.append(
            {
                "server": server,
                "keys": len({tensor for tensor, _ in mine}),
                "slices": len(mine),
                "bytes": held,
                "share_pct": held / total * 100,
            }
        )
    return rows


def _knob_gains(plans: StoreJob[KvstoreJob], iteration_us: float) -> list[dict[str, Any]]:
    """What other values of the knobs would gain, by name of the change."""

    slicing = plans.recorded_job.slicing
    bound = max(slicing.bound // 10, 1)
    asked = {f"servers={slicing.servers + 1}": Plan(servers=slicing.servers + 1)} | placement_question(plans)
    if slicing.priority:
        sizes = [size for size in (slicing.slice_threshold * 10, slicing.slice_threshold // 10) if size]
        asked |= {f"slice_threshold={size}": Plan.of(slice_threshold=size) for size in sizes}
    else:
        asked |= {
            f"bigarray_bound={bound}": Plan.of(bigarray_bound=bound),
            "p3=1, slice_threshold=400000": Plan.of(p3=True, slice_threshold=400_000),
        }
    legal = {text: plan for text, plan in asked.items() if plans.space.refusal(plan) is None}
    return knob_rows(plans, iteration_us, legal, None)


_VARIABLES = {
    "servers": "DMLC_NUM_SERVER",
    "bigarray_bound": "MXNET_KVSTORE_BIGARRAY_BOUND",
    "slice_threshold": "MXNET_KVSTORE_SLICE_THRESHOLD",
    "p3": "DMLC_PS_VAN_TYPE=p3 with update_on_kvstore=False",
}


def _findings(
    ranks: Sequence[dict[str, Any]], servers: Sequence[dict[str, Any]], knobs: Sequence[dict[str, Any]], iteration_us: float
) -> list[str]:
    """Sentences with numbers and the knob to turn."""

    found = []
    heaviest = max(servers, key=lambda row: float(row["bytes"]))
    fair_pct = 100 / len(servers)
    if heaviest["share_pct"] > 1.1 * fair_pct:
        found.append(
            f"Server {heaviest['server']} has {heaviest['share_pct']:.0f} % of the bytes, {fair_pct:.0f} % would be even: "
            "a smaller MXNET_KVSTORE_BIGARRAY_BOUND or priority slices (P3) spread them."
        )
    links = [row for row in ranks if row["link_pct"] is not None]
    if links:
        busiest = max(links, key=lambda row: float(row["link_pct"]))
        if busiest["link_pct"] >= 50:
            found.append(
                f"The link of {busiest['role']} {busiest['host']} is busy {busiest['link_pct']:.0f} % of an iteration of "
                f"{iteration_us / 1e3:.1f} ms: more servers (DMLC_NUM_SERVER), an even spread or a faster link."
            )
    best = max(knobs, key=lambda row: float(row["gain_us"]))
    if best["gain_pct"] >= WORTH_PCT:
        named = PLACEMENTS.get(best["what_if"]) or " and ".join(
            _VARIABLES[key] if key == "p3" else f"{_VARIABLES[key]}={value}"
            for key, _, value in (text.partition("=") for text in best["what_if"].split(", "))
        )
        found.append(f"{named} would save {best['gain_us'] / 1e3:.1f} ms ({best['gain_pct']:.1f} %) an iteration.")
    return found
