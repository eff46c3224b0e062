"""What `replay` and `diagnose` print of the kinds of jobs that a `JobPredictor` predicts; and the changes that ``--set`` makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from dpro_search.cli._jobs import ReplayRequest
    from dpro_search.collect.trace import Trace
    from dpro_search.replay.job_predictor import JobPredictor
    from dpro_search.replay.timeline import Timeline
    from dpro_search.replay.what_if import Question
    from dpro_search.space.plan import Plan, Prediction

_AFTER = {"start": "nothing", "dependency": "what it needs", "device": "its device", "collective": "other ranks"}
_NAME_LENGTH = 50  # of an op in a table of 80 columns
_LISTS = (
    "tensor_groups",
    "op_clusters",
    "bfloat16_ops",
    "recomputed_ops",
    "recomputed_modules",
    "bfloat16_modules",
)  # plan fields that no option can say

_State = TypeVar("_State")
_Predictor = TypeVar("_Predictor", bound="JobPredictor")
_Made = TypeVar("_Made", bound="JobPredictor", covariant=True)


class Plans(Protocol[_Made]):
    """Prices of plans that also change what a predictor is made of; `replay.horovod_plans.HorovodPlans` is one."""

    def predict(self, plan: Plan) -> Prediction:
        """The price of a plan."""

    def applied(self, plan: Plan) -> tuple[_Made, Plan]:
        """The predictor of what a plan makes of the job, and what is left of the plan."""


def predicted(
    trace: Trace,
    request: ReplayRequest,
    kind: type[_Predictor],
    with_changes: Callable[[_Predictor, Plan, Sequence[str]], tuple[_Predictor, Plan]],
    asked: Callable[[_Predictor, Question], _Predictor],
    plans_of: Callable[[_Predictor, Plan], Plans[_Predictor]] | None = None,
) -> tuple[_Predictor, Plan, dict[str, Any]]:
    """The predictor and plan that a request comes down to, and the facts of the contract.

    Parameters
    ----------
    kind
        Whose `from_trace` knows the trace.
    with_changes
        Predictor and plan after the ``--set`` options.
    asked
        The predictor of the job as a what-if question would have it.
    plans_of
        Who prices plans, from the predictor and the plan asked for; None: the predictor itself.
    """
    import time

    from dpro_search.replay.evaluate import held_out, measured_iteration_us, with_own_durations
    from dpro_search.replay.what_if import parse_question
    from dpro_search.space.plan import Plan

    plan = Plan() if request.plan is None else Plan.load(request.plan)
    measured: float | None
    error: float | None
    if request.holdout_step is not None:
        predictor, measured, error = held_out(trace, request.holdout_step, kind)
    elif request.own_durations:
        predictor, measured, error = with_own_durations(trace, kind)
    else:
        predictor, measured, error = kind.from_trace(trace), measured_iteration_us(trace), None
        predictor, plan = with_changes(predictor, plan, request.changes)
        for text in request.what_ifs:
            predictor = asked(predictor, parse_question(text))
    plans = None if plans_of is None else plans_of(predictor, plan)
    prices = predictor if plans is None else plans
    prices.predict(plan)  # compiles the simulator the first time
    started = time.perf_counter()
    prediction = prices.predict(plan)
    seconds = time.perf_counter() - started
    if plans is not None:
        predictor, plan = plans.applied(plan)
    if request.changed:
        measured = None
    elif error is None and measured is not None:
        error = (prediction.iteration_us / measured - 1) * 100
    facts = {
        "measured_iteration_us": measured,
        "predicted_iteration_us": prediction.iteration_us,
        "error_pct": error,
        "interval_us": prediction.interval_us,
        "breakdown_us": prediction.breakdown_us,
        "peak_memory_bytes": prediction.peak_memory_bytes,
        "ops": len(predictor.graph),
        "replay_seconds": seconds,
        "settled": prediction.settled,
        "unplaced": {},
    }
    if request.samples is not None:
        facts["quantiles_us"] = _quantiles_us(predictor, plan, request.samples)
    return predictor, plan, facts


def rank_facts(trace: Trace, rank_breakdown_us: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """What each rank does in an iteration, how often it comes last to a collective, and how long it waits for others."""
    from dpro_search.graph.arrivals import arrivals

    punctuality = {arrival.rank: arrival for arrival in arrivals(trace)}
    return [
        {
            "rank": rank,
            "host": trace.meta.hosts[rank],
            "breakdown_us": breakdown,
            "last_pct": punctuality[rank].last_pct if rank in punctuality else None,
            "waited_us": punctuality[rank].waited_us if rank in punctuality else None,
        }
        for rank, breakdown in enumerate(rank_breakdown_us)
    ]


def critical_ops(timeline: Timeline, most: int = 10) -> list[dict[str, Any]]:
    """The ops with the largest part of the critical path, and the commonest reason why they started no earlier.

    An op counts over all replayed iterations.
    """
    from collections import Counter

    from dpro_search.graph.dataflow import OpKind
    from dpro_search.replay.critical_path import critical_path, path_shares

    graph, path = timeline.graph, critical_path(timeline)
    reasons: dict[int, Counter[str]] = {}
    for step in path:
        reasons.setdefault(step.op % len(graph), Counter())[step.reason.value] += 1
    shares = path_shares(timeline, path).by_op
    total_us = sum(shares.values()) or 1.0
    return [
        {
            "op": graph.name(op),
            "rank": int(graph.rank_of_op[op]),
            "kind": OpKind(graph.op_kind[op]).name,
            "share_pct": spent_us / total_us * 100,
            "reason": reasons[op].most_common(1)[0][0],
        }
        for op, spent_us in list(shares.items())[:most]
    ]


def changed(state: _State, changes: Sequence[str], knobs: Mapping[str, Callable[[_State, str], _State]], job: str) -> _State:
    """A state after the ``--set`` options, in order; `knobs` has a function for each key.

    Raises `InputError` for a key that the job (named for people) does not have, and for a value that is no number.
    """
    from dpro_search.errors import InputError

    for change in changes:
        key, _, value = change.partition("=")
        if key not in knobs:
            raise InputError(f"--set {change}: {job} has no such knob; known are {', '.join(knobs)}")
        try:
            state = knobs[key](state, value)
        except InputError:
            raise
        except ValueError as error:
            raise InputError(f"--set {change}: '{value}' is not a number") from error
    return state


def plan_knobs(fields: Iterable[str]) -> dict[str, Callable[[tuple[_State, Plan], str], tuple[_State, Plan]]]:
    """The keys of ``--set`` that are plan fields, as functions of anything and a plan; fields that are lists are left out."""
    import msgspec

    from dpro_search.errors import InputError

    def flag(name: str, meaning: str) -> Callable[[str], bool]:
        def read(value: str) -> bool:
            if value not in ("0", "1"):
                raise InputError(f"--set {name}={value}: {meaning}")
            return value == "1"

        return read

    kinds: dict[str, Callable[[str], object]] = {
        "cycle_time_us": float,
        "p3": flag("p3", "1 for priority slices, 0 for none"),
        "servers_on_workers": flag("servers_on_workers", "1 for the workers' hosts, 0 for hosts of their own"),
        "compression": str,
    }

    def setter(name: str) -> Callable[[tuple[_State, Plan], str], tuple[_State, Plan]]:
        def put(state: tuple[_State, Plan], value: str) -> tuple[_State, Plan]:
            return state[0], msgspec.structs.replace(state[1], **{name: kinds.get(name, int)(value)})

        return put

    return {name: setter(name) for name in fields if name not in _LISTS}


def cluster_knobs(
    kind: type[_Predictor],
) -> dict[str, Callable[[tuple[_Predictor, Plan], str], tuple[_Predictor, Plan]]]:
    """The keys of ``--set`` that change the cluster of any job, as functions of a predictor of this kind and a plan."""
    import msgspec

    from dpro_search.quantities import parse_rate_bps

    def ranks(state: tuple[_Predictor, Plan], value: str) -> tuple[_Predictor, Plan]:
        return state[0].at(cluster=state[0].wanted_cluster.with_ranks(int(value))), state[1]

    def cores(state: tuple[_Predictor, Plan], value: str) -> tuple[_Predictor, Plan]:
        wanted = state[0].wanted_cluster
        return state[0].at(cluster=wanted.with_ranks(wanted.ranks, int(value))), state[1]

    def rate(state: tuple[_Predictor, Plan], value: str) -> tuple[_Predictor, Plan]:
        return state[0].at(cluster=msgspec.structs.replace(state[0].wanted_cluster, rate_bps=parse_rate_bps(value))), state[1]

    return {"ranks": ranks, "cores": cores, "rate": rate}


def print_tables(tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]) -> None:
    """Tables of (title, columns, rows) for people; only the first column may be long."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from dpro_search._text import visible
    from dpro_search.cli._output import stdout_console

    console = stdout_console()
    for title, columns, rows in tables:
        table = Table(box=box.SIMPLE, title=title, title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left")
        for cells in rows:
            table.add_row(*(Text(visible(cell)) for cell in cells))  # names from files may look like markup
        console.print(table)


def rank_table(ranks: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """The table of `rank_facts`."""
    from dpro_search.cli._output import microseconds, percent

    rows = [
        (
            str(row["rank"]),
            *(microseconds(row["breakdown_us"][key]) for key in ("compute", "contention", "exposed_communication")),
            "unknown" if row["last_pct"] is None else percent(row["last_pct"]),
            "unknown" if row["waited_us"] is None else microseconds(row["waited_us"]),
        )
        for row in ranks
    ]
    return "ranks", ("rank", "compute", "contention", "exposed comm.", "comes last", "waits for others"), rows


def critical_table(ops: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """The table of `critical_ops`."""
    from dpro_search._text import shortened
    from dpro_search.cli._output import percent

    rows = [(shortened(row["op"], _NAME_LENGTH), percent(row["share_pct"]), _AFTER[row["reason"]]) for row in ops]
    return "ops on the critical path", ("op", "share", "starts after"), rows


def gain_table(gains: Sequence[Mapping[str, Any]], iteration_us: float) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
    """The table of what-if gains."""
    from dpro_search.cli._output import microseconds, percent

    rows = [
        (
            row["what_if"],
            microseconds(row["predicted_iteration_us"]),
            f"{microseconds(row['gain_us'])} ({percent(row['gain_us'] / iteration_us * 100)})",
        )
        for row in gains
    ]
    return "what would it gain", ("what if", "iteration", "gain"), rows


def _quantiles_us(predictor: JobPredictor, plan: Plan, samples: int) -> dict[str, float]:
    """Quantiles of the iteration time over replays with durations drawn anew; a bar on stderr where that is a terminal."""
    import numpy as np
    from rich.progress import Progress

    from dpro_search.cli._output import stderr_console

    console = stderr_console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replaying", total=samples)
        found = predictor.sampled(plan, samples=samples, on_sample=lambda: bar.advance(task))
    p5, p50, p95 = np.quantile(found, (0.05, 0.5, 0.95)).tolist()
    return {"p5": p5, "p50": p50, "p95": p95}
