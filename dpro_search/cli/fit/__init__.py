"""`dpro-search fit`: trains cost models, and measures their training data."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from dpro_search.cli.options import JsonOption
from dpro_search.cli.printing import print_json, say, stderr_console, stdout_console
from dpro_search.errors import InputError
from dpro_search.quantities import size_text, time_text


class FitSubject(StrEnum):
    """The things that can be measured for training."""

    XLA = "xla"
    COMM = "comm"
    MACHINE = "machine"
    DEVICE = "device"
    PARALLEL = "parallel"


def fit(
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[TRACE|TABLE]...",
            help="Traces or tables of collectives, for a model of communication; or tables of fused clusters, for a model of "
            "fused ops (default: the bundled table).",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="PATH",
            help="Model folder to write; with --collect, the table or file (needed but for device).",
        ),
    ] = None,
    collect: Annotated[FitSubject | None, typer.Option("--collect", help="Measure instead of training.")] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="With --collect: total number of rows in the table (xla: 3000; comm: all).")
    ] = None,
    models: Annotated[
        str | None, typer.Option("--models", metavar="A,B", help="With --collect xla: only these models of the workloads.")
    ] = None,
    workloads: Annotated[
        Path,
        typer.Option("--workloads", metavar="FILE", help="With --collect xla: Python file with a dictionary BUILDERS of models."),
    ] = Path("experiments/costmodel/models.py"),
    python: Annotated[
        str | None, typer.Option("--python", metavar="PYTHON", help="With --collect: interpreter that has the framework.")
    ] = None,
    backends: Annotated[
        str | None,
        typer.Option(
            "--backends",
            metavar="A,B",
            help="With --collect comm: only these, for example gloo,mpi:ring (default: all that are installed).",
        ),
    ] = None,
    ranks: Annotated[str, typer.Option("--ranks", metavar="N,N", help="With --collect comm: numbers of ranks.")] = "2,3,4,8",
    ranks_per_host: Annotated[
        int, typer.Option("--ranks-per-host", min=1, help="With --collect comm: ranks per host; more than one for mpi only.")
    ] = 1,
    rates: Annotated[
        str, typer.Option("--rates", metavar="R,R", help="With --collect comm: rates of the links.")
    ] = "500mbit,1gbit,2gbit",
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="With --collect comm or machine: number of repetitions of all measurements.")
    ] = 3,
    longest: Annotated[
        float | None,
        typer.Option(
            "--longest", min=0.0001, help="With --collect: leave out what takes longer, in seconds (comm: 10, device: 0.2)."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", min=1, help="With --collect comm: stop after this time; the same command continues."),
    ] = None,
    budget: Annotated[int, typer.Option("--budget", min=5, max=1000, help="With --collect device: number of ops to time.")] = 20,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="With --collect device: its name."),
    ] = None,
    specs: Annotated[
        str | None,
        typer.Option("--specs", metavar="DEVICE", help="With --collect device: file or device with its data sheet."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="TRACE", help="With --collect device: time ops of this job."),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option("--command", metavar="CMD", help="With --collect parallel: the training command."),
    ] = None,
    plans: Annotated[
        list[str] | None,
        typer.Option("--plan", metavar="K=V,...", help="With --collect parallel: a plan to time."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train cost models on traces or measured tables, or measure such tables.

    A collection may be interrupted: the same command continues it. --collect machine measures constants of this machine
    that cost models use: --machine of replay, run and diagnose. --collect device times ops of PyTorch on the GPU here
    (without one, on a core), for predictions with --cluster. --collect parallel JOB.toml times a parallel job's blocks and
    exchanges here.

    Example: dpro-search fit --collect comm --out table.jsonl; dpro-search fit table.jsonl trace --out model
    """
    from dpro_search.cli.fit import clusters, communication, device

    if collect is FitSubject.PARALLEL:
        measure_parallel(sources or [], out, command, plans or [], as_json)
        return
    if collect is not None and sources:
        raise InputError("--collect measures and takes no TRACE or TABLE; train on its table with another 'dpro-search fit'")
    if collect is FitSubject.DEVICE:
        options: dict[str, Any] = {"name": name, "python": python, "specs": specs, "trace": trace}
        device.measure_device(out, budget=budget, longest_s=longest or 0.2, as_json=as_json, **options)
        return
    if out is None:
        raise InputError("Missing option '--out': the folder, table or file to write")
    if collect is FitSubject.XLA:
        clusters.measure_clusters(out, limit or 3000, models, workloads, python, as_json)
    elif collect is FitSubject.MACHINE:
        measure_this_machine(out, rounds, as_json)
    elif collect is FitSubject.COMM:
        request = communication.request_of(
            backends,
            ranks,
            rates,
            python=python,
            limit=limit,
            seconds=seconds,
            longest_s=longest or 10.0,
            rounds=rounds,
            ranks_per_host=ranks_per_host,
        )
        communication.measure_communication(request, out, as_json)
    elif communication.are_of_communication(sources or []):
        communication.train_communication(tuple(sources or ()), out, as_json)
    else:
        clusters.train_clusters(tuple(sources or ()), out, as_json)


def measure_this_machine(out: Path, rounds: int, as_json: bool) -> None:
    """Measure this machine into the file `out`, and print probes and scaled constants beside the bundled ones."""
    from dpro_search.machine import BUNDLED, load_machine
    from dpro_search.measure.machine import PROBES, measure_machine, value_of

    with stderr_console().status("starting") as status:
        constants = measure_machine(out, rounds=rounds, on_progress=status.update)
    bundled = load_machine(BUNDLED)
    names = [name for probe_name, probe in PROBES.items() for name in (f"probes.{probe_name}", *probe.scaled)]
    values = [
        {"name": name, "value": value_of(constants, name), "bundled": value_of(bundled, name), "how": constants.origins[name].how}
        for name in names
    ]
    left = sum(origin.status == "bundled" for origin in constants.origins.values())
    if as_json:
        print_json({"machine_file": str(out), "models": [], "values": values, "not_measured": left})
        return
    for row in values:
        print(f"{row['name']:30} {row['value']:<10.4g} bundled {row['bundled']:.4g}")
    print(f"{left} other constants are bundled ones, not measured here: they need a framework or recorded jobs")
    print(f"machine file: {out} (use it with --machine {out})")


def measure_parallel(sources: Sequence[Path], out: Path | None, command: str | None, plans: Sequence[str], as_json: bool) -> None:
    """Write, or add to, the file of times; errors are those of `kinds.timed_job`."""
    from dpro_search.kinds import timed_job

    if len(sources) != 1:
        raise InputError("--collect parallel: name one job.toml")
    if out is None:
        raise InputError("Missing option '--out': the file of times to write, or to add to")
    if command is None:
        raise InputError("Missing option '--command': the training command, which follows parallel_plan.py")
    console = stderr_console()
    times = timed_job(sources[0], plans, shlex.split(command), out, on_start=lambda what: say(console, f"timing {what}"))
    facts: dict[str, Any] = {
        "times": str(out),
        "blocks": len(times.blocks),
        "collectives": len(times.collectives),
        "flops_per_s": times.flops_per_s,
        "memory_bytes_per_s": times.memory_bytes_per_s,
        "device": times.device or None,
        "steps": [msgspec.to_builtins(step) for step in times.steps],
    }
    if as_json:
        print_json(facts)
        return
    for step in times.steps:
        settings = ", ".join(f"{name}={value}" for name, value in step.settings.items())
        took = f"step {time_text(step.step_us + step.update_us)} without exchanges, {size_text(step.peak_bytes)}"
        stdout_console().print(f"{settings}, {step.micro_batches} micro-batches: {took}", soft_wrap=True, highlight=False)
    stdout_console().print(
        f'{out}: {len(times.blocks)} blocks, {len(times.collectives)} exchanges; name it in the job\'s file: times = "{out.name}"',
        soft_wrap=True,
    )
