"""What `replay` and `diagnose` print of every job with parameter servers: KVStore's and BytePS's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dpro_search.cli._jobs import ReplayRequest
    from dpro_search.collect.trace import Trace
    from dpro_search.replay.store_plans import StorePlans
    from dpro_search.space.plan import Plan

    _Plans = TypeVar("_Plans", bound=StorePlans[Any])

WORTH_PCT = 1.0  # of an iteration; a smaller gain is not told
PLACEMENTS = {
    "servers_on_workers=1": "Servers on the workers' hosts (DPRO_SEARCH_SERVER_HOSTS=workers)",
    "servers_on_workers=0": "Servers on hosts of their own (DPRO_SEARCH_SERVER_HOSTS=own)",
}
_NAME_LENGTH, _TOP_GAINS = 50, 12


def replayed(trace: Trace, request: ReplayRequest, plans: _Plans) -> dict[str, Any]:
    """The facts of the contract.

    Parameters
    ----------
    plans
        Prices of the plans of the trace's job.

    Raises
    ------
    InputError
        The request has an option that such a job does not know.
    """
    import time

    from dpro_search.cli._facts import changed, plan_knobs
    from dpro_search.cli._recorded import change_of, write_ops
    from dpro_search.errors import InputError
    from dpro_search.quantities import parse_rate_bps
    from dpro_search.replay.evaluate import measured_iteration_us
    from dpro_search.replay.replayer import replay
    from dpro_search.space.plan import Plan

    job = plans.space.job.name
    if request.compares or request.samples is not None:
        raise InputError(f"{job} knows --plan, --set, --what-if, --perfetto and --timeline: leave out the others")

    def rate(state: tuple[_Plans, Plan], value: str) -> tuple[_Plans, Plan]:
        return state[0].at_rate(parse_rate_bps(value)), state[1]

    plan = Plan() if request.plan is None else Plan.load(request.plan)
    plans, plan = changed((plans, plan), request.changes, {**plan_knobs(plans.space.fields), "rate": rate}, job)
    for text in request.what_ifs:
        plans = plans.asked(change_of(text, trace.meta.ranks))
    graph = plans.graph(plan)
    started = time.perf_counter()
    found = replay(graph)
    seconds = time.perf_counter() - started
    write_ops(found, request.perfetto, request.timeline)
    one, prediction = plans.priced(found, plan), plans.judged(plan)
    measured = None if request.changed else measured_iteration_us(trace)
    return {
        "measured_iteration_us": measured,
        "predicted_iteration_us": prediction.iteration_us,
        "error_pct": None if measured is None else (prediction.iteration_us / measured - 1) * 100,
        "interval_us": prediction.interval_us,
        "breakdown_us": {part: us * prediction.iteration_us / one.iteration_us for part, us in one.breakdown_us.items()},
        "peak_memory_bytes": prediction.peak_memory_bytes,
        "ops": len(graph),
        "replay_seconds": seconds,
        "settled": one.settled,
        "unplaced": {},
    }


def placement_question(plans: StorePlans[Any]) -> dict[str, Plan]:
    """The other hosts for the servers, by what that is called; empty where links have no limit."""
    from dpro_search.space.plan import Plan

    if plans.recorded_job.bytes_per_us is None:
        return {}
    other = not plans.space.job.values["servers_on_workers"]
    return {f"servers_on_workers={int(other)}": Plan(servers_on_workers=other)}


def knob_rows(
    plans: StorePlans[Any], iteration_us: float, asked: Mapping[str, Plan], iterations: int | None
) -> list[dict[str, Any]]:
    """What other values of the knobs would gain, by name of the change.

    Parameters
    ----------
    iteration_us
        As recorded.
    asked
        Plans by what they are called.
    iterations
        That are replayed; None: until they settle.
    """
    from dpro_search.replay.replayer import replay

    rows = []
    for change, plan in asked.items():
        us = replay(plans.graph(plan), iterations=iterations).iteration_us
        gain_us = iteration_us - us
        rows.append({"what_if": change, "predicted_iteration_us": us, "gain_us": gain_us, "gain_pct": gain_us / iteration_us * 100})
    return rows


def print_diagnosis(result: dict[str, Any], own: tuple[str, Sequence[str], Sequence[Sequence[str]]]) -> None:
    """Findings, critical path, gains, and a table of the kind of job's own, for people."""
    from dpro_search._text import shortened
    from dpro_search.cli._facts import critical_table, print_tables
    from dpro_search.cli._output import microseconds, percent, say, stdout_console

    console = stdout_console()
    measured = result["measured_iteration_us"]
    shown = "" if measured is None else f", measured {microseconds(measured)}"
    console.print(f"An iteration takes {microseconds(result['iteration_us'])} (replayed{shown}).")
    for sentence in (*result["findings"], *result["warnings"]):
        say(console, f"* {sentence}")
    path = [
        (f"{row['kind'].lower()} of core {row['rank']}", microseconds(row["duration_us"]), percent(row["share_pct"]))
        for row in result["critical_path"]
    ]
    gains = [
        (shortened(row["what_if"], _NAME_LENGTH), microseconds(row["gain_us"]), percent(row["gain_pct"]))
        for row in result["gains"][:_TOP_GAINS]
    ]
    print_tables(
        [
            ("critical path", ("what", "time", "share"), path),
            critical_table(result["critical_ops"]),
            own,
            ("what would it gain", ("what if", "gain", "share"), gains),
        ]
    )
