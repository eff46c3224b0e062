"""`replay` and `diagnose` of traces of MXNet jobs with BytePS."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro_search.cli._jobs import ReplayRequest
    from dpro_search.collect.trace import Trace
    from dpro_search.space.byteps_job import BytepsJob

_KEYS = "partition_bytes, credit, servers, rate"
_MODEL_ERROR = 0.1
_TOP_GAINS = 12
_WORTH_PCT = 1.0
_ASKED_ITERATIONS = 16  # of a replay that answers one of many questions


def replay_trace(trace: Trace, request: ReplayRequest) -> dict[str, Any]:
    """The facts that the verb `replay` prints.

    Raises
    ------
    InputError
        A change that BytePS does not have.
    """
    import time

    from dpro_search.cli._recorded import change_of, path_facts, write_ops
    from dpro_search.errors import InputError
    from dpro_search.replay.evaluate import measured_iteration_us
    from dpro_search.replay.replayer import replay
    from dpro_search.space.byteps_job import byteps_graph
    from dpro_search.space.byteps_recorded import recorded_byteps_job

    if request.plan is not None or request.compares or request.samples is not None:
        raise InputError("a job with BytePS knows --set, --what-if, --perfetto and --timeline: leave out the others")
    graph = byteps_graph(_with_changes(recorded_byteps_job(trace), request.changes))
    for text in request.what_ifs:
        graph = change_of(text, trace.meta.ranks).apply(graph)
    started = time.perf_counter()
    found = replay(graph)
    seconds = time.perf_counter() - started
    write_ops(found, request.perfetto, request.timeline)
    predicted = found.iteration_us
    measured = None if request.changed else measured_iteration_us(trace)
    breakdown: dict[str, float] = defaultdict(float)
    for row in path_facts(found):
        breakdown[f"{row['kind'].lower()}_on_the_path"] += row["duration_us"]
    return {
        "measured_iteration_us": measured,
        "predicted_iteration_us": predicted,
        "error_pct": None if measured is None else (predicted / measured - 1) * 100,
        "interval_us": (predicted * (1 - _MODEL_ERROR), predicted * (1 + _MODEL_ERROR)),
        "breakdown_us": dict(breakdown),
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
    from dpro_search.space.byteps_job import byteps_graph
    from dpro_search.space.byteps_recorded import recorded_byteps_job

    job = recorded_byteps_job(trace)
    graph = byteps_graph(job)
    asked = partial(replay, iterations=_ASKED_ITERATIONS)
    timeline = asked(graph)
    found = [
        {
            "what_if": gain.change.text,
            "predicted_iteration_us": gain.iteration_us,
            "gain_us": gain.gain_us,
            "gain_pct": gain.gain_pct,
        }
        for gain in gains(graph, replay=asked)
    ]
    knobs = _knob_gains(job, timeline.iteration_us)
    return {
        "iteration_us": timeline.iteration_us,
        "measured_iteration_us": measured_iteration_us(trace),
        "critical_path": path_facts(timeline),
        "ranks": [{"rank": rank, "host": host} for rank, host in enumerate(trace.meta.hosts)],
        "servers": _server_facts(job),
        "gains": sorted([*found, *knobs], key=lambda row: -float(row["gain_us"])),
        "findings": _findings(job, knobs),
    }


def print_diagnosis(result: dict[str, Any]) -> None:
    """Findings, critical path, servers and gains, for people."""
    from dpro_search.cli._output import microseconds, percent

    print(f"An iteration takes {microseconds(result['iteration_us'])} (replayed).")
    for sentence in result["findings"]:
        print(f"  {sentence}")
    print("What is on its critical path:")
    for row in result["critical_path"]:
        print(f"  {row['kind']:9} of core {row['rank']:2}  {microseconds(row['duration_us']):>10}  {percent(row['share_pct']):>7}")
    print("What the servers sum:")
    for row in result["servers"]:
        share = percent(row["share_pct"])
        print(f"  server {row['server']:2}  {row['partitions']:5} partitions  {row['bytes'] / 1e6:8.2f} MB  {share:>7}")
    print("What would it gain:")
    for row in result["gains"][:_TOP_GAINS]:
        print(f"  {row['what_if'][:50]:50}  {microseconds(row['gain_us']):>10}  {percent(row['gain_pct']):>7}")


def _server_facts(job: BytepsJob) -> list[dict[str, Any]]:
    """Load of each server, by the partitions that are hashed to it."""
    parts = [part for tensor in range(len(job.tensor_bytes)) for part in job.parts(tensor)]
    total = float(job.tensor_bytes.sum())
    rows = []
    for server in range(len(job.server_core)):
        mine = [part.size_bytes for part in parts if part.server == server]
        rows.append({"server": server, "partitions": len(mine), "bytes": sum(mine), "share_pct": sum(mine) / total * 100})
    return rows


def _knob_gains(job: BytepsJob, iteration_us: float) -> list[dict[str, Any]]:
    """What other values of the knobs would gain, by name of the change."""
    from dpro_search.replay.replayer import replay
    from dpro_search.space.byteps_job import byteps_graph

    rows = []
    for change in (
        f"servers={len(job.server_core) + 1}",
        f"partition_bytes={job.partition_bytes // 4}",
        f"partition_bytes={job.partition_bytes * 4}",
    ):
        other = replay(byteps_graph(_with_changes(job, [change])), iterations=_ASKED_ITERATIONS).iteration_us
        gain_us = iteration_us - other
        rows.append(
            {"what_if": change, "predicted_iteration_us": other, "gain_us": gain_us, "gain_pct": gain_us / iteration_us * 100}
        )
    return rows


def _findings(job: BytepsJob, knobs: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences with numbers and the knob to turn."""
    found = []
    variable = {"servers": "DMLC_NUM_SERVER", "partition_bytes": "BYTEPS_PARTITION_BYTES"}
    best = max(knobs, key=lambda row: float(row["gain_us"]))
    if best["gain_pct"] >= _WORTH_PCT:
        key, _, value = best["what_if"].partition("=")
        found.append(f"{variable[key]}={value} would save {best['gain_us'] / 1e3:.1f} ms ({best['gain_pct']:.1f} %) an iteration.")
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


def _with_changes(job: BytepsJob, changes: Sequence[str]) -> BytepsJob:
    from dpro_search.collect.launch.netns import parse_rate
    from dpro_search.errors import InputError
    from dpro_search.space.kvstore_job import goodput_bytes_per_us

    cores = sorted({*job.worker_core, *job.server_core})
    known: dict[str, Callable[[str], dict[str, Any]]] = {
        "partition_bytes": lambda text: {"partition_bytes": int(text)},
        "credit": lambda text: {"credit": int(text)},
        "servers": lambda text: {"server_core": tuple(cores[server % len(cores)] for server in range(int(text)))},
        "rate": lambda text: {"bytes_per_us": goodput_bytes_per_us(parse_rate(text))},
    }
    for change in changes:
        key, _, value = change.partition("=")
        if key not in known:
            raise InputError(f"--set {change}: unknown key for a job with BytePS; known are {_KEYS}")
        try:
            job = replace(job, **known[key](value))
        except ValueError as error:
            raise (error if isinstance(error, InputError) else InputError(f"--set {change}: '{value}' is not a number")) from error
    return job
