"""`dpro-search collect`: runs a real job with recording hooks and writes its trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpro_search.cli.options import HostChangeOption, HostCpusOption, JsonOption


def _frameworks() -> list[str]:
    """Names for the completion of ``--framework``."""
    from dpro_search.kinds import launchers

    return list(dict.fromkeys(launcher.framework for launcher in launchers()))


def _comms() -> list[str]:
    """Names for the completion of ``--comm``."""
    from dpro_search.kinds import launchers

    return list(dict.fromkeys(launcher.comm for launcher in launchers()))


def collect(
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD...", help="The training command of one rank, or one that starts all.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Trace folder to write; must not exist.")],
    framework: Annotated[
        str,
        typer.Option(
            "--framework", metavar="F", autocompletion=_frameworks, help="Training framework: tensorflow, pytorch, mxnet."
        ),
    ] = "tensorflow",
    comm: Annotated[
        str,
        typer.Option(
            "--comm",
            metavar="C",
            autocompletion=_comms,
            help="Communication: horovod, ddp, fsdp, mesh (PyTorch: any), kvstore, byteps.",
        ),
    ] = "horovod",
    hosts: Annotated[int, typer.Option("--hosts", metavar="N", min=1, help="Hosts to start ranks on.")] = 2,
    ranks_per_host: Annotated[
        int, typer.Option("--ranks-per-host", metavar="N", min=1, help="Ranks per host; needs --rate, and Horovod on MPI.")
    ] = 1,
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate",
            metavar="RATE",
            help="Run each host in a network namespace with a link of this rate: 500mbit, 2gbit, unlimited (needs root).",
        ),
    ] = None,
    host_cpus: HostCpusOption = None,
    host_change: HostChangeOption = None,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps to skip at the start.")] = 5,
    untraced: Annotated[int, typer.Option("--untraced", help="Steps to time without the profiler, after the warm-up.")] = 8,
    traced: Annotated[int, typer.Option("--traced", help="Steps to profile after that; later steps are timed without it.")] = 11,
    attach: Annotated[
        bool, typer.Option("--attach", help="The command starts the ranks itself; torchrun, srun, mpirun... are known to.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="SECONDS", help="Stop the job if it takes longer; an hour, of attached jobs never."),
    ] = None,
    keep_raw: Annotated[
        Path | None, typer.Option("--keep-raw", metavar="DIR", help="Also keep the raw files in this folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a training job with recording hooks and write a trace.

    The training script stays unchanged; it must run at least warmup + untraced + traced + 2 steps. Horovod runs on Gloo, or on
    MPI with HOROVOD_CONTROLLER=mpi; with MXNet always on MPI. A command that starts the ranks of a PyTorch job runs as it is,
    on its own hosts and GPUs: a recorder enters each rank, and a step is one of the optimizer.

    Example: dpro-search collect --out T -- torchrun --nproc-per-node 8 train.py
    """
    import numpy as np

    from dpro_search.cli.printing import microseconds, percent, stderr_console
    from dpro_search.cli.printing.progress import JobProgress
    from dpro_search.cli.printing.trace import print_trace, trace_facts
    from dpro_search.collect.launch.host_limits import HostLimits
    from dpro_search.collect.launch.launched_ranks import launches_ranks, record_launched
    from dpro_search.collect.launch.ranks import JobSpec, default_cores
    from dpro_search.collect.launch.step_times import StepSchedule
    from dpro_search.errors import InputError
    from dpro_search.kinds import launcher_for
    from dpro_search.quantities import parse_rate_bps

    schedule = StepSchedule(warmup=warmup, untraced=untraced, traced=traced)
    if attach or launches_ranks(command):
        trace = record_launched(command, out, schedule, keep_raw=keep_raw, timeout_s=timeout)
        measured_us = trace.meta.unprofiled_us
        line = f"iteration {'unknown' if measured_us is None else microseconds(measured_us)} without the profiler"
        print_trace(trace_facts(trace, out) | {"measured_iteration_us": measured_us, "overhead_pct": None}, [line], as_json)
        return
    launcher = launcher_for(framework, comm)
    if ranks_per_host > 1 and rate is None:
        raise InputError(
            "--ranks-per-host: give --rate as well; without it all ranks run on this machine, and --hosts is their number"
        )
    ranks, limits = hosts * ranks_per_host, HostLimits.parse(host_cpus, host_change or ())
    spec = JobSpec(
        command=tuple(command),
        ranks=ranks,
        ranks_per_host=ranks_per_host,
        cores=default_cores(ranks, ranks_per_host, limits),
        timeout_s=3600 if timeout is None else timeout,
        limits=limits,
    )
    try:
        with JobProgress(stderr_console()) as progress:
            progress.begin(f"recording {ranks} ranks", steps=schedule.steps, announced=False)
            trace = launcher.record(
                spec,
                out,
                rate_bps=None if rate is None else parse_rate_bps(rate),
                shaped=rate is not None,
                schedule=schedule,
                keep_raw=keep_raw,
                watch=progress.show,
            )
    except KeyboardInterrupt:
        kept = "nothing is kept" if keep_raw is None else f"{keep_raw} keeps the raw files so far, which are no whole recording"
        raise KeyboardInterrupt(f"interrupted: the job was ended and {out} was not written; {kept}") from None
    untraced_us = trace.iterations_us()
    measured = float(np.median(untraced_us)) if len(untraced_us) else None
    overhead = trace.meta.overhead_pct
    iteration = "unknown" if measured is None else microseconds(measured)
    lines = [f"iteration {iteration} without the profiler, overhead {'unknown' if overhead is None else percent(overhead)}"]
    print_trace(trace_facts(trace, out) | {"measured_iteration_us": measured, "overhead_pct": overhead}, lines, as_json)
