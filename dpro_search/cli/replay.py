"""`dpro-search replay`: predicts the iteration time of a trace, as recorded or changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpro_search.cli._machine import MachineOption, use_machine
from dpro_search.cli._sample import SampleOption
from dpro_search.cli._shared_options import (
    AllReduceModelOption,
    ClusterModelOption,
    ClusterOption,
    JsonOption,
    PrecisionTableOption,
)

_NOTICEABLE = 0.01  # Of all ops; fewer without a place in the graph change no prediction noticeably.


def replay(
    trace: Annotated[Path | None, typer.Argument(metavar="TRACE", help="Trace folder, profile or job.toml.")] = None,
    sample: SampleOption = None,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="A plan's JSON file.")] = None,
    cluster: ClusterOption = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="K=V",
            help="A changed setting, with units: fusion_threshold_bytes=16MiB, cycle_time_us=5ms, groups=N (Horovod); "
            "bucket_cap_bytes=25MiB, first_bucket_bytes=1MiB (DDP); prefetch=1, reshard_after_forward=0 (FSDP); "
            "servers=N, servers_on_workers=1, bigarray_bound=N, p3=1, slice_threshold=N, compression=2bit (KVStore); "
            "partition_bytes=4MB, credit=N, compression=fp16 (BytePS); ranks=N, rate=1gbit; cores=N "
            "shared by ranks (Horovod, PyTorch); synchronisation=S, speeds=1:1:2:3, delay=20ms, "
            "target_loss=0.3 (unequal workers). Facts about an iteration: tokens=8192 (of all devices), flops=2e12 and "
            "peak=312TFLOP/s (of a device), price=4.1 (USD per device-hour), power=400W.",
        ),
    ] = None,
    what_ifs: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="W",
            help="A changed cost: compute=0.9, rank1.compute=0.9, bandwidth=2, communication=0; also what --set takes.",
        ),
    ] = None,
    holdout_step: Annotated[
        int | None, typer.Option("--holdout-step", metavar="N", help="Predict profiled step N from all the others.")
    ] = None,
    own_durations: Annotated[
        bool, typer.Option("--own-durations", help="Replay each profiled step with its own durations; report the mean error.")
    ] = False,
    samples: Annotated[
        int | None,
        typer.Option("--samples", metavar="N", min=1, help="Replay N times with resampled durations and report quantiles."),
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option("--perfetto", metavar="FILE", help="Write the replay and the measured step for ui.perfetto.dev.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option("--timeline", metavar="FILE", help="Write the start and end of each op, as CSV.")
    ] = None,
    cluster_model: ClusterModelOption = None,
    precision_table: PrecisionTableOption = None,
    all_reduce_model: AllReduceModelOption = None,
    machine: MachineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the iteration time of a trace, as recorded or changed.

    Example: dpro-search replay T --set fusion_threshold_bytes=16777216 --set rate=500mbit --what-if compute=0.9
    """
    from rich.progress import Progress

    from dpro_search.cli._output import stderr_console, warn
    from dpro_search.cli._sample import folder_of
    from dpro_search.kinds import PlanOptions, load_source
    from dpro_search.kinds._replay_facts import ReplayRequest, replay_facts
    from dpro_search.space.plan import Plan

    use_machine(machine)
    source = load_source(folder_of(trace, sample))
    console = stderr_console()
    with Progress(console=console, transient=True, disable=samples is None or not console.is_terminal) as bar:
        task = bar.add_task("replaying", total=samples)
        request = ReplayRequest(
            plan=Plan() if plan is None else Plan.load(plan),
            cluster=cluster,
            changes=(*(changes or ()), *(what_ifs or ())),
            holdout_step=holdout_step,
            own_durations=own_durations,
            samples=samples,
            perfetto=perfetto,
            timeline=timeline,
            options=PlanOptions(cluster_model=cluster_model, precision_table=precision_table, all_reduce_model=all_reduce_model),
            on_sample=lambda: bar.advance(task),
        )
        facts = replay_facts(source, request)
    warn(facts["recording_doubt"])
    _print(facts, as_json)


def _print(result: dict[str, Any], as_json: bool) -> None:
    from dpro_search.cli._output import microseconds, percent, print_json, say, stdout_console
    from dpro_search.kinds._efficiency import sentences
    from dpro_search.replay.sentences import differs_from_median

    if as_json:
        print_json(result)
        return
    low, high = result["interval_us"]
    print(f"predicted iteration  {microseconds(result['predicted_iteration_us'])}  ({microseconds(low)} - {microseconds(high)})")
    if "quantiles_us" in result:
        shown = "  ".join(f"{name} {microseconds(value_us)}" for name, value_us in result["quantiles_us"].items())
        print(f"  of samples           {shown}")
    own = result.get("steps", ())
    if result["measured_iteration_us"] is not None:
        error = "" if own else f"  error {percent(result['error_pct'])}"
        print(f"measured iteration   {microseconds(result['measured_iteration_us'])}{error}")
    for what in ("predicted", "measured"):
        mean_us, median_us = result.get(f"{what}_mean_us"), result[f"{what}_iteration_us"]
        if mean_us is not None and median_us is not None and differs_from_median(mean_us, median_us):
            print(f"{what + ' mean':20} {microseconds(mean_us)}  (some steps stall: the iteration is the median of the steps)")
    for row in own:
        what = f"step {row['step']}" if result["measured_iteration_us"] is not None else "the recorded window"
        times = (microseconds(row["measured_us"]), microseconds(row["replayed_us"]), percent(row["error_pct"]))
        print(f"{what}, with its own durations: measured {times[0]}, replayed {times[1]}, error {times[2]}")
    for name, value_us in result["breakdown_us"].items():
        print(f"  {name.replace('_', ' '):22} {microseconds(value_us)}")
    for sentence in (*sentences(result), *result.get("notes", ())):
        print(sentence)
    if "cluster" in result:
        print(f"on {result['cluster']['name']}")
        for sentence in result["cluster"]["left_out"]:
            print(f"  assumed: {sentence}")
    for sentence in result.get("assumed", ()):
        print(f"assumed: {sentence}")
    if (calibration := result["calibration"]) is not None:
        say(stdout_console(), f"interval: {calibration['text']}")
    if not result["settled"]:
        print("the replay did not settle: the iteration time is not a steady state")
    if (unplaced := len(result["unplaced"])) > _NOTICEABLE * result["ops"]:
        print(f"{unplaced} of {result['ops']} ops have no place in the graph or no time (--json lists them): record the job again")
