"""What `replay` and `diagnose` print of every job with parameter servers: KVStore's and BytePS's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro_search.cli._jobs import ReplayRequest
    from dpro_search.collect.trace import Trace
    from dpro_search.replay.timeline import Timeline
    from dpro_search.space.replay_graph import ReplayGraph

WORTH_PCT = 1.0  # of an iteration; a smaller gain is not told
_TOP_GAINS = 12
_PART_OF_KIND = {"FORWARD": "compute", "BACKWARD": "compute", "UPDATE": "compute", "COMM": "exposed_communication"}


def replayed(
    trace: Trace, request: ReplayRequest, graph_of: Callable[[Sequence[str]], ReplayGraph], *, job: str, model_error: float
) -> dict[str, Any]:
    """The facts of the contract.

    Parameters
    ----------
    graph_of
        The job's graph after some ``--set`` options.
    job
        What it is called.
    model_error
        Half the width of the interval, relative to the prediction.

    Raises
    ------
    InputError
        The request has an option that such a job does not know.
    """
    import time

    from dpro_search.cli._recorded import change_of, write_ops
    from dpro_search.errors import InputError
    from dpro_search.replay.evaluate import measured_iteration_us
    from dpro_search.replay.replayer import replay

    if request.plan is not None or request.compares or request.samples is not None:
        raise InputError(f"{job} knows --set, --what-if, --perfetto and --timeline: leave out the others")
    graph = graph_of(request.changes)
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
        "interval_us": (predicted * (1 - model_error), predicted * (1 + model_error)),
        "breakdown_us": breakdown_us(found),
        "peak_memory_bytes": None,
        "ops": len(graph),
        "replay_seconds": seconds,
        "settled": found.settled,
        "unplaced": {},
    }


def breakdown_us(timeline: Timeline) -> dict[str, float]:
    """An iteration by what its critical path does: compute of workers, communication that nothing hides, the servers' work."""
    from dpro_search.cli._recorded import path_facts

    found = {"compute": 0.0, "exposed_communication": 0.0, "server": 0.0}
    for row in path_facts(timeline):
        found[_PART_OF_KIND.get(row["kind"], "server")] += row["duration_us"]
    total = sum(found.values()) or 1.0
    return {part: us / total * timeline.iteration_us for part, us in found.items()}


def knob_rows(iteration_us: float, changed_us: Mapping[str, float]) -> list[dict[str, Any]]:
    """Rows of gains, from the iteration time after each change of a knob."""
    return [
        {
            "what_if": change,
            "predicted_iteration_us": us,
            "gain_us": iteration_us - us,
            "gain_pct": (iteration_us - us) / iteration_us * 100,
        }
        for change, us in changed_us.items()
    ]


def print_path(result: dict[str, Any]) -> None:
    """Iteration time, findings and critical path, for people."""
    from dpro_search.cli._output import microseconds, percent

    print(f"An iteration takes {microseconds(result['iteration_us'])} (replayed).")
    for sentence in result["findings"]:
        print(f"* {sentence}")
    print("What is on its critical path:")
    for row in result["critical_path"]:
        print(f"  {row['kind']:9} of core {row['rank']:2}  {microseconds(row['duration_us']):>10}  {percent(row['share_pct']):>7}")


def print_gains(gains: Sequence[dict[str, Any]]) -> None:
    """The largest gains, for people."""
    from dpro_search.cli._output import microseconds, percent

    print("What would it gain:")
    for row in gains[:_TOP_GAINS]:
        print(f"  {row['what_if'][:50]:50}  {microseconds(row['gain_us']):>10}  {percent(row['gain_pct']):>7}")
