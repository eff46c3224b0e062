"""`replay` and `diagnose` of traces of MXNet jobs with parameter servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro_search.cli._jobs import ReplayRequest
    from dpro_search.collect.trace import Trace
    from dpro_search.space.kvstore_job import KvstoreJob

_KEYS = "servers, bigarray_bound, rate"
_MODEL_ERROR = 0.08  # of docs/validation.md: all eight errors of recorded and changed settings were smaller
_TOP_GAINS = 12


def replay_trace(trace: Trace, request: ReplayRequest) -> dict[str, Any]:
    """The facts that the verb `replay` prints.

    Raises
    ------
    InputError
        A change that KVStore does not have.
    """
    import time

    from dpro_search.cli._recorded import change_of, write_ops
    from dpro_search.errors import InputError
    from dpro_search.replay.evaluate import measured_iteration_us
    from dpro_search.replay.replayer import replay
    from dpro_search.space.kvstore_job import kvstore_graph, recorded_kvstore_job

    if request.plan is not None or request.compares or request.samples is not None:
        raise InputError("a job with parameter servers knows --set, --what-if, --perfetto and --timeline: leave out the others")
    graph = kvstore_graph(_with_changes(recorded_kvstore_job(trace), request.changes))
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
        "breakdown_us": {},
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
    from dpro_search.space.kvstore_job import kvstore_graph, recorded_kvstore_job

    graph = kvstore_graph(recorded_kvstore_job(trace))
    timeline = replay(graph)
    return {
        "iteration_us": timeline.iteration_us,
        "measured_iteration_us": measured_iteration_us(trace),
        "critical_path": path_facts(timeline),
        "ranks": [{"rank": rank, "host": host} for rank, host in enumerate(trace.meta.hosts)],
        "gains": [
            {
                "what_if": gain.change.text,
                "predicted_iteration_us": gain.iteration_us,
                "gain_us": gain.gain_us,
                "gain_pct": gain.gain_pct,
            }
            for gain in gains(graph)
        ],
    }


def print_diagnosis(result: dict[str, Any]) -> None:
    """Critical path and gains, for people."""
    from dpro_search.cli._output import microseconds, percent

    print(f"An iteration takes {microseconds(result['iteration_us'])} (replayed). What is on its critical path:")
    for row in result["critical_path"]:
        print(f"  {row['kind']:9} of rank {row['rank']:2}  {microseconds(row['duration_us']):>10}  {percent(row['share_pct']):>7}")
    print("What would it gain:")
    for row in result["gains"][:_TOP_GAINS]:
        print(f"  {row['what_if'][:50]:50}  {microseconds(row['gain_us']):>10}  {percent(row['gain_pct']):>7}")


def _with_changes(job: KvstoreJob, changes: Sequence[str]) -> KvstoreJob:
    from dpro_search.collect.launch.netns import parse_rate
    from dpro_search.errors import InputError
    from dpro_search.space.kvstore_job import goodput_bytes_per_us

    for change in changes:
        key, _, value = change.partition("=")
        try:
            if key == "servers":
                cores = sorted({*job.worker_core, *job.server_core})
                job = replace(job, server_core=tuple(cores[server % len(cores)] for server in range(int(value))))
            elif key == "bigarray_bound":
                job = replace(job, bound=int(value))
            elif key == "rate":
                job = replace(job, bytes_per_us=goodput_bytes_per_us(parse_rate(value)))
            else:
                raise InputError(f"--set {change}: unknown key for a job with parameter servers; known are {_KEYS}")
        except ValueError as error:
            raise (error if isinstance(error, InputError) else InputError(f"--set {change}: '{value}' is not a number")) from error
    return job
