"""`dpro-search fit`: trains cost models, and measures their training data."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dpro_search.cli._shared_options import JsonOption


class Measurement(StrEnum):
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
    collect: Annotated[Measurement | None, typer.Option("--collect", help="Measure instead of training.")] = None,
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
    from dpro_search.cli import _fit_clusters, _fit_communication, _fit_device, _fit_machine, _fit_parallel
    from dpro_search.errors import InputError

    if collect is Measurement.PARALLEL:
        _fit_parallel.measure_parallel(sources or [], out, command, plans or [], as_json)
        return
    if collect is not None and sources:
        raise InputError("--collect measures and takes no TRACE or TABLE; train on its table with another 'dpro-search fit'")
    if collect is Measurement.DEVICE:
        options: dict[str, Any] = {"name": name, "python": python, "specs": specs, "trace": trace}
        _fit_device.measure_device(out, budget=budget, longest_s=longest or 0.2, as_json=as_json, **options)
        return
    if out is None:
        raise InputError("Missing option '--out': the folder, table or file to write")
    if collect is Measurement.XLA:
        _fit_clusters.measure_clusters(out, limit or 3000, models, workloads, python, as_json)
    elif collect is Measurement.MACHINE:
        _fit_machine.measure_this_machine(out, rounds, as_json)
    elif collect is Measurement.COMM:
        request = _fit_communication.request_of(
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
        _fit_communication.measure_communication(request, out, as_json)
    elif _fit_communication.are_of_communication(sources or []):
        _fit_communication.train_communication(tuple(sources or ()), out, as_json)
    else:
        _fit_clusters.train_clusters(tuple(sources or ()), out, as_json)
