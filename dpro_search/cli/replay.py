"""`dpro-search replay`: predicts the iteration time of a trace, as recorded or changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpro_search.cli.options import (
    AllReduceModelOption,
    ClusterModelOption,
    ClusterOption,
    JsonOption,
    MachineOption,
    PrecisionTableOption,
    use_machine,
)
from dpro_search.cli.options.sample import SampleOption

if TYPE_CHECKING:
    from dpro_search.analysis.predict import Replay

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

    from dpro_search.analysis.predict import ReplayRequest
    from dpro_search.analysis.predict import replay as answer_of
    from dpro_search.cli.options.sample import folder_of
    from dpro_search.cli.printing import print_json, stderr_console, warn
    from dpro_search.kinds import PlanOptions, job_of, load_source
    from dpro_search.space.plan import Plan

    use_machine(machine)
    models = PlanOptions(cluster_model=cluster_model, precision_table=precision_table, all_reduce_model=all_reduce_model)
    job = job_of(load_source(folder_of(trace, sample)), models)
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
            on_sample=lambda: bar.advance(task),
        )
        answer = answer_of(job, request)
    warn(answer.recording_doubt or None)
    if as_json:
        print_json(answer)
    else:
        _print(answer)


def _print(answer: Replay) -> None:
    from msgspec import UNSET
    from msgspec.structs import asdict

    from dpro_search.analysis.efficiency import efficiency_in, sentences
    from dpro_search.cli.printing import microseconds, percent, say, stdout_console
    from dpro_search.replay.sentences import differs_from_median

    low_us, high_us = answer.interval_us
    print(f"predicted iteration  {microseconds(answer.iteration_us)}  ({microseconds(low_us)} - {microseconds(high_us)})")
    if answer.quantiles_us is not None:
        quantiles = "  ".join(f"{name} {microseconds(value_us)}" for name, value_us in asdict(answer.quantiles_us).items())
        print(f"  of samples           {quantiles}")
    if answer.measured_us is not None:
        error = f"  error {percent(answer.error_pct)}" if answer.error_pct is not None and not answer.steps else ""
        print(f"measured iteration   {microseconds(answer.measured_us)}{error}")
    means = (("predicted", answer.mean_us, answer.iteration_us), ("measured", answer.measured_mean_us, answer.measured_us))
    for side, mean_us, median_us in means:
        if mean_us is not None and mean_us is not UNSET and median_us is not None and differs_from_median(mean_us, median_us):
            print(f"{side + ' mean':20} {microseconds(mean_us)}  (some steps stall: the iteration is the median of the steps)")
    for row in answer.steps:
        step = f"step {row.step}" if answer.measured_us is not None else "the recorded window"
        times = f"measured {microseconds(row.measured_us)}, replayed {microseconds(row.replayed_us)}"
        print(f"{step}, with its own durations: {times}, error {percent(row.error_pct)}")
    for name, value_us in answer.breakdown_us.items():
        print(f"  {name.replace('_', ' '):22} {microseconds(value_us)}")
    for sentence in (*sentences(efficiency_in(answer)), *answer.notes):
        print(sentence)
    if answer.cluster is not None:
        print(f"on {answer.cluster.name}")
        for sentence in answer.cluster.left_out:
            print(f"  assumed: {sentence}")
    for sentence in answer.assumed:
        print(f"assumed: {sentence}")
    if answer.calibration is not None:
        say(stdout_console(), f"interval: {answer.calibration.text}")
    if not answer.settled:
        print("the replay did not settle: the iteration time is not a steady state")
    if (unplaced := len(answer.unplaced)) > _NOTICEABLE * answer.ops:
        print(f"{unplaced} of {answer.ops} ops have no place in the graph or no time (--json lists them): record the job again")
