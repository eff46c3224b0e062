"""`replay` and `diagnose` of traces of MXNet jobs with parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro_search.cli._jobs import ReplayRequest
    from dpro_search.collect.trace import Trace
    from dpro_search.replay.timeline import Timeline
    from dpro_search.space.kvstore_job import KvstoreJob

_MODEL_ERROR = 0.12  # the largest error of a handful of recordings and changes judged by separate runs
_TOP_GAINS = 12
_WORTH_PCT = 1.0
_PART_OF_KIND = {"FORWARD": "compute", "BACKWARD": "compute", "UPDATE": "compute", "COMM": "exposed_communication"}


def replay_trace(trace: Trace, request: ReplayRequest) -> dict[str, Any]:
    """The facts that the verb `replay` prints.

    Raises
    ------
    InputError
        A change that KVStore does not have.
    """
    import time

    from dpro_search.cli._facts import changed
    from dpro_search.cli._recorded import change_of, write_ops
    from dpro_search.errors import InputError
    from dpro_search.replay.evaluate import measured_iteration_us
    from dpro_search.replay.replayer import replay
    from dpro_search.space.kvstore_job import kvstore_graph
    from dpro_search.space.kvstore_recorded import recorded_kvstore_job

    if request.plan is not None or request.compares or request.samples is not None:
        raise InputError("a job with parameter servers knows --set, --what-if, --perfetto and --timeline: leave out the others")
    graph = kvstore_graph(changed(recorded_kvstore_job(trace), request.changes, _knobs(), "a job with parameter servers"))
    for text in request.what_ifs:
        graph = change_of(text, trace.meta.ranks).apply(graph)
    started = time.perf_counter()
    found = replay(graph)
    seconds = time.perf_counter() - started
    write_ops(found, request.perfetto, request.timeline)
    predicted = found.iteration_us
    measured = None if request.changed else measured_iteration_us(trace)
    return {
        "measured_iteration_us": measured,
        "predicted_iteration_us": predicted,
        "error_pct": None if measured is None else (predicted / measured - 1) * 100,
        "interval_us": (predicted * (1 - _MODEL_ERROR), predicted * (1 + _MODEL_ERROR)),
        "breakdown_us": _breakdown_us(found),
        "peak_memory_bytes": None,
        "ops": len(graph),
        "replay_seconds": seconds,
        "settled": found.settled,
        "unplaced": {},
    }


def diagnose_trace(trace: Trace) -> dict[str, Any]:
    """The facts that the verb `diagnose` prints."""
    from dpro_search.cli._recorded import path_facts
    from dpro_search.replay.evaluate import measured_iteration_us
    from dpro_search.replay.replayer import replay
    from dpro_search.replay.sensitivity import gains
    from dpro_search.space.kvstore_job import kvstore_graph, process_loads
    from dpro_search.space.kvstore_recorded import recorded_kvstore_job

    job = recorded_kvstore_job(trace)
    graph = kvstore_graph(job)
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
    found = [
        {
            "what_if": gain.change.text,
            "predicted_iteration_us": gain.iteration_us,
            "gain_us": gain.gain_us,
            "gain_pct": gain.gain_pct,
        }
        for gain in gains(graph)
    ]
    knobs = _knob_gains(job, timeline.iteration_us)
    return {
        "iteration_us": timeline.iteration_us,
        "measured_iteration_us": measured_iteration_us(trace),
        "breakdown_us": _breakdown_us(timeline),
        "critical_path": path_facts(timeline),
        "ranks": facts,
        "servers": servers,
        "gains": sorted([*found, *knobs], key=lambda row: -float(row["gain_us"])),
        "findings": _findings(facts, servers, knobs, timeline.iteration_us),
    }


def print_diagnosis(result: dict[str, Any]) -> None:
    """Findings, critical path, servers and gains, for people."""
    from dpro_search.cli._output import microseconds, percent

    print(f"An iteration takes {microseconds(result['iteration_us'])} (replayed).")
    for sentence in result["findings"]:
        print(f"* {sentence}")
    print("What is on its critical path:")
    for row in result["critical_path"]:
        print(f"  {row['kind']:9} of core {row['rank']:2}  {microseconds(row['duration_us']):>10}  {percent(row['share_pct']):>7}")
    print("What the servers have:")
    for row in result["servers"]:
        link = "" if row["link_pct"] is None else f"  link {percent(row['link_pct']):>7}"
        print(
            f"  server {row['server']:2}  {row['keys']:4} keys  {row['slices']:5} slices  {row['bytes'] / 1e6:8.2f} MB"
            f"  core {microseconds(row['core_us']):>10}{link}"
        )
    print("What would it gain:")
    for row in result["gains"][:_TOP_GAINS]:
        print(f"  {row['what_if'][:50]:50}  {microseconds(row['gain_us']):>10}  {percent(row['gain_pct']):>7}")


def _breakdown_us(timeline: Timeline) -> dict[str, float]:
    """An iteration by what its critical path does: compute of workers, communication that nothing hides, the servers' work."""
    from dpro_search.cli._recorded import path_facts

    found = {"compute": 0.0, "exposed_communication": 0.0, "server": 0.0}
    for row in path_facts(timeline):
        found[_PART_OF_KIND.get(row["kind"], "server")] += row["duration_us"]
    total = sum(found.values()) or 1.0
    return {part: us / total * timeline.iteration_us for part, us in found.items()}


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


def _knob_gains(job: KvstoreJob, iteration_us: float) -> list[dict[str, Any]]:
    """What other values of the knobs would gain, by name of the change."""
    from dpro_search.cli._facts import changed
    from dpro_search.replay.replayer import replay
    from dpro_search.space.kvstore_job import kvstore_graph

    servers = f"servers={len(job.server_core) + 1}"
    bound = f"bigarray_bound={max(job.slicing.bound // 10, 1)}"
    slices = [f"slice_threshold={job.slicing.slice_threshold * factor}" for factor in (10, 0.1)]
    asked = [
        (servers,),
        *(((text.split(".")[0],) for text in slices) if job.slicing.priority else ((bound,), ("p3=1", "slice_threshold=400000"))),
    ]
    rows = []
    for changes in asked:
        other = replay(kvstore_graph(changed(job, changes, _knobs(), "a job with parameter servers"))).iteration_us
        gain_us = iteration_us - other
        rows.append(
            {
                "what_if": ", ".join(changes),
                "predicted_iteration_us": other,
                "gain_us": gain_us,
                "gain_pct": gain_us / iteration_us * 100,
            }
        )
    return rows


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
    if best["gain_pct"] >= _WORTH_PCT:
        named = " and ".join(
            _VARIABLES[key] if key == "p3" else f"{_VARIABLES[key]}={value}"
            for key, _, value in (text.partition("=") for text in best["what_if"].split(", "))
        )
        found.append(f"{named} would save {best['gain_us'] / 1e3:.1f} ms ({best['gain_pct']:.1f} %) an iteration.")
    return found


def _knobs() -> dict[str, Callable[[KvstoreJob, str], KvstoreJob]]:
    """The keys of ``--set``."""
    from dpro_search.collect.launch.netns import parse_rate
    from dpro_search.errors import InputError
    from dpro_search.space.kvstore_job import store_bytes_per_us

    def servers(job: KvstoreJob, value: str) -> KvstoreJob:
        slicing = replace(job.slicing, servers=int(value))
        cores = sorted({*job.worker_core, *job.server_core})
        return replace(job, slicing=slicing, server_core=tuple(cores[server % len(cores)] for server in range(int(value))))

    def bigarray_bound(job: KvstoreJob, value: str) -> KvstoreJob:
        return replace(job, slicing=replace(job.slicing, bound=int(value)))

    def slice_threshold(job: KvstoreJob, value: str) -> KvstoreJob:
        return replace(job, slicing=replace(job.slicing, slice_threshold=int(value)))

    def p3(job: KvstoreJob, value: str) -> KvstoreJob:
        if value not in ("0", "1"):
            raise InputError(f"--set p3={value}: 1 for priority slices, 0 for none")
        return replace(job, slicing=replace(job.slicing, priority=value == "1"))

    def rate(job: KvstoreJob, value: str) -> KvstoreJob:
        return replace(job, bytes_per_us=store_bytes_per_us(parse_rate(value)))

    return {f.__name__: f for f in (servers, bigarray_bound, slice_threshold, p3, rate)}
