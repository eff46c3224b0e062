"""`replay` and `diagnose` of traces of Horovod jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpro_search.cli._jobs import ReplayRequest
    from dpro_search.collect.trace import Trace
    from dpro_search.replay import Predictor, Timeline
    from dpro_search.replay.horovod_plans import HorovodPlans
    from dpro_search.space.plan import Plan

_TOP_BUFFERS = 5
_SCALARS = ("fusion_threshold_bytes", "cycle_time_us", "micro_batches", "compression")  # plan fields that ``--set`` knows
_COMPUTE = {
    "op_clusters": "op-fusion",
    "bfloat16_ops": "precision",
    "recomputed_ops": "recomputation",
    "micro_batches": "accumulation",
}


def replay_trace(trace: Trace, request: ReplayRequest) -> dict[str, Any]:
    """The facts that the verb `replay` prints.

    Raises
    ------
    InputError
        A change that Horovod does not have.
    """
    from functools import partial

    from dpro_search.cli._facts import predicted
    from dpro_search.collect._files import write_file
    from dpro_search.errors import InputError
    from dpro_search.replay import Predictor
    from dpro_search.replay.horovod.perfetto import perfetto_json
    from dpro_search.replay.what_if import asked

    if request.timeline is not None and request.changed:
        raise InputError("--timeline has the ops of the recorded setting: leave out --plan, --set and --what-if")
    predictor, plan, facts = predicted(trace, request, Predictor, _with_changes, asked, partial(_plans, trace, request))
    if request.perfetto is not None and request.changed:
        write_file(request.perfetto, perfetto_json(trace, predictor, plan))
    elif request.perfetto is not None or request.timeline is not None:
        _write_ops(trace, predictor, request)
    return facts | {"unplaced": dict(predictor.graph.unplaced)}


def diagnose_trace(trace: Trace) -> dict[str, Any]:
    """The facts that the verb `diagnose` prints."""
    import msgspec

    from dpro_search.cli._facts import rank_facts
    from dpro_search.graph.arrivals import arrivals
    from dpro_search.replay import Predictor
    from dpro_search.replay.evaluate import measured_iteration_us
    from dpro_search.replay.horovod.critical_path import critical_path
    from dpro_search.replay.horovod.findings import findings
    from dpro_search.replay.what_if import gains
    from dpro_search.space.plan import Plan

    predictor = Predictor.from_trace(trace)
    timeline, gained = predictor.timeline(Plan(), log=True), gains(predictor)
    path = critical_path(timeline)
    return {
        "iteration_us": timeline.iteration_us,
        "measured_iteration_us": measured_iteration_us(trace),
        "critical_path": msgspec.to_builtins(path),
        "ranks": rank_facts(trace, timeline.rank_breakdown_us),
        "gains": gained,
        "findings": list(findings(path, arrivals(trace), gained, timeline.iteration_us)),
        "warnings": list(trace.meta.warnings),
        **_op_facts(trace, predictor),
    }


def _write_ops(trace: Trace, predictor: Predictor, request: ReplayRequest) -> None:
    """The recorded setting, replayed op by op: its last iteration beside the measured step, and all iterations as a table."""
    from dpro_search.collect._files import write_file
    from dpro_search.replay.outputs import measured_ops, perfetto_json, write_csv
    from dpro_search.replay.replayer import replay as replay_ops
    from dpro_search.space.op_level import op_level, typical_step

    step = typical_step(trace, predictor.graph)
    timeline = replay_ops(op_level(trace, predictor.graph, predictor.costs, step=step))
    if request.perfetto is not None:
        measured = measured_ops(trace, step)
        write_file(request.perfetto, perfetto_json(timeline, measured=measured, first_iteration=timeline.iterations - 1))
    if request.timeline is not None:
        write_csv(timeline, request.timeline)


def _plans(trace: Trace, request: ReplayRequest, predictor: Predictor, plan: Plan) -> HorovodPlans:
    """Prices of plans that may have any field: what a plan asks for is predicted, not proposed."""
    from dpro_search.errors import InputError
    from dpro_search.replay.horovod_plans import horovod_plans
    from dpro_search.replay.plan_predictor import PlanOptions

    if plan.allreduce_algorithms is not None and request.all_reduce_model is None:
        raise InputError(
            "plan: allreduce_algorithms: give --all-reduce-model, which 'dpro-search fit' makes of all-reduces measured on Open MPI"
        )
    options = PlanOptions(
        compute=frozenset(_COMPUTE[name] for name in plan.changes if name in _COMPUTE),
        allow_lossy=any(name in plan.changes for name in ("compression", "micro_batches")),
        cluster_model=request.cluster_model,
        precision_table=request.precision_table,
        all_reduce_model=request.all_reduce_model,
    )
    return horovod_plans(trace, options, predictor)


def _with_changes(predictor: Predictor, plan: Plan, changes: Sequence[str]) -> tuple[Predictor, Plan]:
    """Predictor and plan after the ``--set`` options, in order."""
    import msgspec

    from dpro_search.cli._facts import changed, cluster_knobs, plan_knobs
    from dpro_search.space.moves import contiguous_groups

    def groups(state: tuple[Predictor, Plan], value: str) -> tuple[Predictor, Plan]:
        return state[0], msgspec.structs.replace(state[1], tensor_groups=contiguous_groups(state[0].tensors, int(value)))

    knobs: dict[str, Callable[[tuple[Predictor, Plan], str], tuple[Predictor, Plan]]] = {**plan_knobs(_SCALARS), "groups": groups}
    return changed((predictor, plan), changes, {**knobs, **cluster_knobs(type(predictor))}, "a Horovod job")


def _op_facts(trace: Trace, predictor: Predictor) -> dict[str, Any]:
    """What the replay of single ops says; an op of the path counts over all replayed iterations."""
    from dpro_search.cli._facts import critical_ops
    from dpro_search.replay import replay
    from dpro_search.space.op_level import op_level

    timeline = replay(op_level(trace, predictor.graph, predictor.costs))
    return {
        "op_level_iteration_us": timeline.iteration_us,
        "critical_ops": critical_ops(timeline),
        "slack": _slack(timeline),
        "memory": _memory(timeline),
    }


def _slack(timeline: Timeline) -> dict[str, float]:
    """How much later the ops that take time could end, in an iteration in the middle: others follow it."""
    import numpy as np

    from dpro_search.replay.slack import slack_us

    graph = timeline.graph
    middle = timeline.iterations // 2 * len(graph)
    found = slack_us(timeline)[middle : middle + len(graph)][graph.duration_us > 0]
    p10, p50, p90 = np.quantile(found, (0.1, 0.5, 0.9)).tolist()
    return {"ops": len(found), "below_1_ms_pct": float((found < 1000).mean()) * 100, "p10_us": p10, "p50_us": p50, "p90_us": p90}


def _memory(timeline: Timeline) -> list[dict[str, Any]]:
    """Peak of every rank, of what the recording knows, and what it is made of."""
    from dpro_search.replay.memory import memory

    graph = timeline.graph
    return [
        {
            "rank": found.rank,
            "peak_bytes": found.peak_bytes,
            "peak_op": graph.name(found.peak_op % len(graph)) if found.peak_op >= 0 else None,
            "buffers": [
                {"name": graph.buffer_names[number % len(graph.buffer_op)], "bytes": taken}
                for number, taken in zip(found.alive[:_TOP_BUFFERS].tolist(), found.alive_bytes.tolist(), strict=False)
            ],
        }
        for found in memory(timeline)
    ]


def print_diagnosis(result: dict[str, Any]) -> None:
    """What `diagnose_trace` found, for people."""
    from dpro_search.cli._facts import critical_table, gain_table, print_tables, rank_table
    from dpro_search.cli._output import microseconds, percent, say, size, stdout_console

    console = stdout_console()
    total_us, measured = result["iteration_us"], result["measured_iteration_us"]
    shown = "" if measured is None else f", measured {microseconds(measured)}"
    console.print(f"An iteration takes {microseconds(total_us)} (replayed{shown}).")
    for sentence in (*result["findings"], *result["warnings"]):
        say(console, f"* {sentence}")
    console.print("What it waits for, by share:")
    shares: dict[str, float] = {}
    for segment in result["critical_path"]:
        shares[segment["kind"]] = shares.get(segment["kind"], 0.0) + segment["duration_us"]
    length_us = sum(shares.values())
    for kind, spent_us in sorted(shares.items(), key=lambda item: -item[1]):
        console.print(f"  {kind:11} {microseconds(spent_us):>10}  {percent(spent_us / length_us * 100):>7}")
    print_tables(
        [
            rank_table(result["ranks"]),
            gain_table(result["gains"], total_us),
            critical_table(result["critical_ops"]),
        ]
    )
    slack = result["slack"]
    console.print(
        f"{percent(slack['below_1_ms_pct'])} of the ops have less than 1 ms to spare, half of them less than "
        f"{microseconds(slack['p50_us'])}."
    )
    for row in result["memory"]:
        largest = row["buffers"][0]
        say(
            console,
            f"Rank {row['rank']}: variables, gradients, fusion buffer take up to {size(row['peak_bytes'])}; "
            f"the largest is {largest['name']}.",
        )
