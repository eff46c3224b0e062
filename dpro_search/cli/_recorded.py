"""`replay` and `diagnose` of traces whose events carry streams and dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro_search.cli._jobs import ReplayRequest
    from dpro_search.collect.trace import Trace
    from dpro_search.replay.recorded import RecordedPredictor
    from dpro_search.replay.sensitivity import Change, Gain
    from dpro_search.replay.timeline import Timeline

_NAME_LENGTH, _TOP_GAINS = 44, 12


def replay_trace(trace: Trace, request: ReplayRequest) -> dict[str, Any]:
    """The facts that the verb `replay` prints.

    Raises
    ------
    InputError
        A knob: those of a recorded job of this kind are not known.
    """
    import time

    import numpy as np

    from dpro_search.errors import InputError
    from dpro_search.replay.pipeline import recorded_predictor
    from dpro_search.replay.replayer import replay

    if request.plan is not None or request.changes:
        raise InputError(
            f"--plan and --set change the knobs of a Horovod job; this trace ({trace.meta.format}) is none: use --what-if"
        )
    predictor = recorded_predictor(trace)
    measured: float | None = None if request.what_ifs else predictor.measured_iteration_us
    more: dict[str, Any] = {}
    error = None
    if request.holdout_step is not None:
        held = predictor.held_out(request.holdout_step)
        measured, error = held.measured_us, held.error_pct
        more = {"baseline_iteration_us": held.baseline_us, "baseline_error_pct": held.baseline_error_pct}
        predictor = recorded_predictor(trace, without=(request.holdout_step,))
    changes = [change_of(text, trace.meta.ranks) for text in request.what_ifs]
    started = time.perf_counter()
    prediction = predictor.predict(changes)
    seconds = time.perf_counter() - started
    predicted = prediction.iteration_us
    if request.own_durations:
        pairs = predictor.own_durations()
        errors = {step: (replayed / true - 1) * 100 for step, (true, replayed) in pairs.items()}
        measured, predicted = (float(np.mean(column)) for column in zip(*pairs.values(), strict=True))
        error = float(np.mean(np.abs(list(errors.values()))))
        more = {"steps": [{"step": step, "error_pct": value} for step, value in errors.items()]}
    elif error is None and measured is not None:
        error = (predicted / measured - 1) * 100
    if request.samples is not None:
        found = replay(predictor.graph, samples=request.samples)
        more |= {"quantiles_us": {f"p{q}": found.quantile_us(q / 100) for q in (5, 50, 95)}}
    if request.perfetto is not None or request.timeline is not None:
        write_ops(replay(_changed(predictor, changes)), request.perfetto, request.timeline)
    return {
        "measured_iteration_us": measured,
        "predicted_iteration_us": predicted,
        "error_pct": error,
        "interval_us": prediction.interval_us,
        "breakdown_us": prediction.breakdown_us,
        "peak_memory_bytes": None,
        "ops": len(predictor.graph),
        "replay_seconds": seconds,
        "settled": prediction.settled,
        "unplaced": {},
    } | more


def diagnose_trace(trace: Trace) -> dict[str, Any]:
    """The facts that the verb `diagnose` prints."""
    import msgspec

    from dpro_search.cli._facts import critical_ops
    from dpro_search.graph.bus_bandwidth import group_speeds
    from dpro_search.graph.device_time import lateness, rank_times
    from dpro_search.replay.findings import findings
    from dpro_search.replay.pipeline import recorded_predictor
    from dpro_search.replay.replayer import replay
    from dpro_search.replay.sensitivity import gains

    predictor = recorded_predictor(trace)
    timeline = replay(predictor.graph)
    times, late, speeds = rank_times(trace), lateness(trace), group_speeds(trace)
    punctuality = {row.rank: msgspec.to_builtins(row) for row in late}
    found = gains(predictor.graph)
    return {
        "iteration_us": timeline.iteration_us,
        "measured_iteration_us": predictor.measured_iteration_us,
        "critical_path": path_facts(timeline),
        "ranks": [
            {"host": trace.meta.hosts[row.rank], "last_pct": None, "cost_us": None, "waited_us": None}
            | msgspec.to_builtins(row)
            | punctuality.get(row.rank, {})
            for row in times
        ],
        "gains": gain_rows(found),
        "critical_ops": critical_ops(timeline),
        "links": [msgspec.to_builtins(speed) for speed in speeds],
        "findings": list(findings(times, late, found, timeline.iteration_us, speeds)),
        "warnings": list(trace.meta.warnings),
    }


def print_diagnosis(result: dict[str, Any]) -> None:
    """Findings, ranks, gains and the critical path, for people."""
    from dpro_search._text import shortened
    from dpro_search.cli._facts import critical_table, print_tables
    from dpro_search.cli._output import microseconds, percent, say, stdout_console

    console = stdout_console()
    measured = result["measured_iteration_us"]
    shown = "" if measured is None else f", measured {microseconds(measured)}"
    console.print(f"An iteration takes {microseconds(result['iteration_us'])} (replayed{shown}).")
    for sentence in result["findings"]:
        say(console, f"* {sentence}")
    parts = ("compute_us", "exposed_communication_us", "waiting_for_ranks_us", "idle_us", "host_bound_us")
    ranks = [
        (
            str(row["rank"]),
            *(microseconds(row[part]) for part in parts),
            "unknown" if row["last_pct"] is None else percent(row["last_pct"]),
        )
        for row in result["ranks"]
    ]
    gains = [
        (
            shortened(row["what_if"], _NAME_LENGTH),
            microseconds(row["predicted_iteration_us"]),
            f"{microseconds(row['gain_us'])} ({percent(row['gain_pct'])})",
        )
        for row in result["gains"][:_TOP_GAINS]
    ]
    print_tables(
        [
            ("ranks, per step", ("rank", "compute", "exposed comm.", "waits", "idle", "host-bound", "last"), ranks),
            ("what would it gain", ("what if", "iteration", "gain"), gains),
            critical_table(result["critical_ops"]),
        ]
    )


def change_of(text: str, ranks: int) -> Change:
    """The change of the graph that a question asks about."""
    from dpro_search.errors import InputError
    from dpro_search.replay.sensitivity import BandwidthScaled, CommunicationScaled, ComputeScaled
    from dpro_search.replay.what_if import parse_question

    question = parse_question(text)
    if question.rank is not None and question.rank >= ranks:
        raise InputError(f"--what-if '{text}': the trace has ranks 0 to {ranks - 1}")
    if question.what == "bandwidth":
        return BandwidthScaled(factor=question.factor)
    if question.what == "communication":
        return CommunicationScaled(factor=question.factor)
    return ComputeScaled(factor=question.factor, rank=question.rank)


def _changed(predictor: RecordedPredictor, changes: list[Change]) -> Any:
    graph = predictor.graph
    for change in changes:
        graph = change.apply(graph)
    return graph


def write_ops(timeline: Timeline, perfetto: Path | None, table: Path | None) -> None:
    """Files for ui.perfetto.dev (the last iteration) and for tables, where they are asked for."""
    from dpro_search.collect._files import write_file
    from dpro_search.replay.outputs import perfetto_json, write_csv

    if perfetto is not None:
        write_file(perfetto, perfetto_json(timeline, first_iteration=timeline.iterations - 1))
    if table is not None:
        write_csv(timeline, table)


def gain_rows(gains: Sequence[Gain]) -> list[dict[str, Any]]:
    """What questions about the graph would gain."""
    return [
        {
            "what_if": gain.change.text,
            "predicted_iteration_us": gain.iteration_us,
            "gain_us": gain.gain_us,
            "gain_pct": gain.gain_pct,
        }
        for gain in gains
    ]


def path_facts(timeline: Timeline) -> list[dict[str, Any]]:
    """Shares of the critical path by rank and kind of op."""
    from dpro_search.replay.critical_path import critical_path, path_shares

    shares = path_shares(timeline, critical_path(timeline)).by_rank_and_kind
    total_us = sum(shares.values()) or 1.0
    return [
        {"rank": rank, "kind": kind, "duration_us": us / timeline.iterations, "share_pct": us / total_us * 100}
        for (rank, kind), us in shares.items()
    ]
