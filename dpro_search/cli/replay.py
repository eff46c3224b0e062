"""`dpro-search replay`: predicts the iteration time of a trace, as recorded or changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dpro_search.collect.trace import Trace
    from dpro_search.replay import Predictor
    from dpro_search.space.cluster import ClusterSpec
    from dpro_search.space.plan import Plan


def replay(
    trace: Annotated[
        Path | None, typer.Argument(metavar="TRACE", help="Folder made by 'collect'; left out: the bundled sample.")
    ] = None,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="A plan's JSON file.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="K=V",
            help="fusion_threshold_bytes=N, cycle_time_us=N, groups=N (Horovod); bucket_cap_bytes=N (DDP); "
            "servers=N, bigarray_bound=N (KVStore); ranks=N, cores=N (that the ranks share), rate=1gbit.",
        ),
    ] = None,
    what_ifs: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if", metavar="W", help="compute=0.9, rank1.compute=0.9, bandwidth=2, communication=0; may be repeated."
        ),
    ] = None,
    holdout_step: Annotated[
        int | None, typer.Option("--holdout-step", metavar="N", help="Predict profiled step N from all the others.")
    ] = None,
    own_durations: Annotated[
        bool, typer.Option("--own-durations", help="Replay each profiled step from its own durations; the error is their mean.")
    ] = False,
    samples: Annotated[
        int | None, typer.Option("--samples", metavar="N", min=1, help="Replay N times with durations drawn anew, for quantiles.")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option("--perfetto", metavar="FILE", help="Write prediction and measurement for ui.perfetto.dev.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option("--timeline", metavar="FILE", help="Write when each op runs in the replay, as CSV.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Predict the iteration time of a trace, as recorded or changed.

    Example: dpro-search replay T --set fusion_threshold_bytes=16777216 --set rate=500mbit --what-if compute=0.9
    """
    import time

    from dpro_search.cli._ddp import replay_ddp_trace
    from dpro_search.cli._kvstore import replay_kvstore_trace
    from dpro_search.collect._files import write_file
    from dpro_search.collect.sample import sample_trace_path
    from dpro_search.collect.trace import Trace
    from dpro_search.errors import InputError
    from dpro_search.replay import Predictor
    from dpro_search.replay.evaluate import held_out, measured_iteration_us, with_own_durations
    from dpro_search.replay.horovod.perfetto import perfetto_json as horovod_json
    from dpro_search.replay.what_if import asked, parse_question
    from dpro_search.space.plan import Plan

    compares = holdout_step is not None or own_durations
    if compares and (plan is not None or changes or what_ifs):
        raise InputError("--holdout-step and --own-durations compare with the recording: leave out --plan, --set and --what-if")
    if holdout_step is not None and own_durations:
        raise InputError("--holdout-step and --own-durations ask different questions: give one of them")
    recorded = Trace.load(sample_trace_path() if trace is None else trace)
    if recorded.meta.format == "pytorch-ddp":
        if perfetto is not None or timeline is not None:
            raise InputError("--perfetto and --timeline do not know DistributedDataParallel jobs yet: leave them out")
        facts = replay_ddp_trace(
            recorded,
            plan=plan,
            changes=changes or [],
            what_ifs=what_ifs or [],
            holdout_step=holdout_step,
            own_durations=own_durations,
            samples=samples,
        )
        _print(facts, as_json)
        return
    if recorded.meta.format == "mxnet-kvstore":
        if plan is not None or compares or samples is not None:
            raise InputError("a job with parameter servers knows --set, --what-if, --perfetto and --timeline: leave out the others")
        facts = replay_kvstore_trace(recorded, changes=changes or [], what_ifs=what_ifs or [], perfetto=perfetto, timeline=timeline)
        _print(facts, as_json)
        return
    if recorded.meta.settings is None:
        _replay_recorded(recorded, plan, changes, what_ifs, holdout_step, own_durations, samples, perfetto, timeline, as_json)
        return
    chosen = Plan() if plan is None else Plan.load(plan)
    changed = bool(chosen != Plan() or changes or what_ifs)
    if timeline is not None and changed:
        raise InputError("--timeline has the ops of the recorded setting: leave out --plan, --set and --what-if")
    measured: float | None
    error: float | None
    if holdout_step is not None:
        predictor, measured, error = held_out(recorded, holdout_step)
    elif own_durations:
        predictor, measured, error = with_own_durations(recorded)
    else:
        predictor, measured, error = Predictor.from_trace(recorded), measured_iteration_us(recorded), None
        chosen, cluster = _with_changes(predictor, chosen, changes or [])
        predictor = predictor.at(cluster=cluster)
        for text in what_ifs or []:
            predictor = asked(predictor, parse_question(text))
    predictor.predict(chosen)  # compiles the simulator the first time
    started = time.perf_counter()
    prediction = predictor.predict(chosen)
    seconds = time.perf_counter() - started
    if changed:
        measured = None
    elif error is None and measured is not None:
        error = (prediction.iteration_us / measured - 1) * 100
    drawn_us = None if samples is None else _drawn_us(predictor, chosen, samples)
    if perfetto is not None and changed:
        write_file(perfetto, horovod_json(recorded, predictor, chosen))
    if (perfetto is not None and not changed) or timeline is not None:
        _write_ops(recorded, predictor, None if changed else perfetto, timeline)
    _print(
        {
            "measured_iteration_us": measured,
            "predicted_iteration_us": prediction.iteration_us,
            "error_pct": error,
            "interval_us": prediction.interval_us,
            "breakdown_us": prediction.breakdown_us,
            "peak_memory_bytes": prediction.peak_memory_bytes,
            "ops": len(predictor.graph),
            "replay_seconds": seconds,
            "settled": prediction.settled,
            "unplaced": dict(predictor.graph.unplaced),
        }
        | ({} if drawn_us is None else {"quantiles_us": drawn_us}),
        as_json,
    )


def _replay_recorded(
    trace: Trace,
    plan: Path | None,
    changes: list[str] | None,
    what_ifs: list[str] | None,
    holdout_step: int | None,
    own_durations: bool,
    samples: int | None,
    perfetto: Path | None,
    timeline: Path | None,
    as_json: bool,
) -> None:
    """A trace of another kind than Horovod's: its own ops and dependencies are replayed."""
    from dpro_search.cli._recorded import replay_recorded
    from dpro_search.errors import InputError

    if plan is not None or changes:
        raise InputError(
            f"--plan and --set change the knobs of a Horovod job; this trace ({trace.meta.format}) is none: use --what-if"
        )
    result = replay_recorded(
        trace,
        what_ifs=what_ifs or [],
        holdout_step=holdout_step,
        own_durations=own_durations,
        samples=samples,
        perfetto=perfetto,
        timeline=timeline,
    )
    _print(result, as_json)


def _drawn_us(predictor: Predictor, plan: Plan, samples: int) -> dict[str, float]:
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


def _write_ops(trace: Trace, predictor: Predictor, perfetto: Path | None, table: Path | None) -> None:
    """The recorded setting, replayed op by op: its last iteration beside the measured step, and all iterations as a table."""
    from dpro_search.collect._files import write_file
    from dpro_search.replay.outputs import measured_ops, perfetto_json, write_csv
    from dpro_search.replay.replayer import replay as replay_ops
    from dpro_search.space.op_level import op_level, typical_step

    step = typical_step(trace, predictor.graph)
    timeline = replay_ops(op_level(trace, predictor.graph, predictor.costs, step=step))
    if perfetto is not None:
        measured = measured_ops(trace, step)
        write_file(perfetto, perfetto_json(timeline, measured=measured, first_iteration=timeline.iterations - 1))
    if table is not None:
        write_csv(timeline, table)


def _with_changes(predictor: Predictor, plan: Plan, changes: list[str]) -> tuple[Plan, ClusterSpec]:
    """Plan and cluster after the ``--set`` options, in order."""
    import msgspec

    from dpro_search.collect.launch.netns import parse_rate
    from dpro_search.errors import InputError
    from dpro_search.space.moves import contiguous_groups

    cluster = predictor.cluster
    for change in changes:
        key, _, value = change.partition("=")
        try:
            if key == "fusion_threshold_bytes":
                plan = msgspec.structs.replace(plan, fusion_threshold_bytes=int(value))
            elif key == "cycle_time_us":
                plan = msgspec.structs.replace(plan, cycle_time_us=float(value))
            elif key == "groups":
                plan = msgspec.structs.replace(plan, tensor_groups=contiguous_groups(predictor.tensors, int(value)))
            elif key == "ranks":
                cluster = cluster.with_ranks(int(value))
            elif key == "cores":
                cluster = cluster.with_ranks(cluster.ranks, int(value))
            elif key == "rate":
                cluster = msgspec.structs.replace(cluster, rate_bps=parse_rate(value))
            else:
                raise InputError(
                    f"--set {change}: unknown key; known are fusion_threshold_bytes, cycle_time_us, groups, ranks, cores, rate"
                )
        except ValueError as error:
            raise (error if isinstance(error, InputError) else InputError(f"--set {change}: '{value}' is not a number")) from error
    return plan, cluster


def _print(result: dict[str, Any], as_json: bool) -> None:
    from dpro_search.cli._output import microseconds, percent, print_json

    if as_json:
        print_json(result)
        return
    low, high = result["interval_us"]
    print(f"predicted iteration  {microseconds(result['predicted_iteration_us'])}  ({microseconds(low)} - {microseconds(high)})")
    if "quantiles_us" in result:
        shown = "  ".join(f"{name} {microseconds(value_us)}" for name, value_us in result["quantiles_us"].items())
        print(f"  of samples           {shown}")
    if result["measured_iteration_us"] is not None:
        print(f"measured iteration   {microseconds(result['measured_iteration_us'])}  error {percent(result['error_pct'])}")
    for name, value_us in result["breakdown_us"].items():
        print(f"  {name.replace('_', ' '):22} {microseconds(value_us)}")
    if not result["settled"]:
        print("the replay did not settle: the iteration time is not a steady state")
    if result["unplaced"]:
        print(f"{len(result['unplaced'])} ops have no place in the graph or no time; --json lists them")
