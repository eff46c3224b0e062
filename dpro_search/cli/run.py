"""`dpro-search run`: searches the fastest plans for a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from dpro_search.cli._machine import MachineOption, use_machine

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dpro_search.deploy.parts.part import Servers
    from dpro_search.machine import Calibration
    from dpro_search.search import FinishedTrial, SearchResult
    from dpro_search.space.plan import Plan, Prediction


class SamplerName(StrEnum):
    """The samplers."""

    AUTO = "auto"
    CRITICAL_PATH = "critical-path"
    MCMC = "mcmc"
    NSGA2 = "nsga2"
    OPTUNA = "optuna"


class EngineName(StrEnum):
    """Where the workers run."""

    LOCAL = "local"
    RAY = "ray"


class ComputeName(StrEnum):
    """Transformations of compute, searched on request."""

    OP_FUSION = "op-fusion"
    PRECISION = "precision"
    RECOMPUTATION = "recomputation"
    ACCUMULATION = "accumulation"


def run(
    trace: Annotated[
        Path | None,
        typer.Argument(metavar="TRACE", help="Folder made by 'collect' or 'import' (default: the bundled sample)."),
    ] = None,
    trials: Annotated[
        int,
        typer.Option("--trials", metavar="N", min=1, help="Number of plans to evaluate; with --storage, of all searches together."),
    ] = 500,
    sampler: Annotated[SamplerName, typer.Option("--sampler", help="What proposes the next plan.")] = SamplerName.AUTO,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed; equal seeds give equal plans.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="RUN", help="Run folder; an existing one is continued.", show_default="in runs/"),
    ] = None,
    compute: Annotated[
        list[ComputeName] | None,
        typer.Option(
            "--with",
            help="Also search this change of compute (TensorFlow with Horovod; DDP: precision, recomputation).",
        ),
    ] = None,
    allow_lossy: Annotated[
        bool,
        typer.Option(
            "--allow-lossy",
            help="Also search lossy changes: gradients in fp16 (Horovod, DDP, BytePS), by PowerSGD (DDP), in 2 bits (KVStore).",
        ),
    ] = False,
    memory_limit: Annotated[
        int | None,
        typer.Option(
            "--memory-limit",
            metavar="BYTES",
            min=1,
            help="Memory limit of a rank; also searches recomputation and gradient accumulation.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="C", help="What the job runs on: 16xhgx-h100, or a TOML file."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="K=V", help="Changed cluster or speeds: ranks=64, rate=1gbit, compute=0.9."),
    ] = None,
    cluster_model: Annotated[
        Path | None,
        typer.Option("--cluster-model", metavar="DIR", help="Model of fused ops' durations, from 'fit' (default: bundled)."),
    ] = None,
    precision_table: Annotated[
        Path | None,
        typer.Option("--precision-table", metavar="FILE", help="Table of op durations in bfloat16, for --with precision."),
    ] = None,
    all_reduce_model: Annotated[
        Path | None,
        typer.Option(
            "--all-reduce-model",
            metavar="DIR",
            help="Model of Open MPI's all-reduce algorithms, from 'fit'; also searches the algorithm by size (Horovod on MPI).",
        ),
    ] = None,
    machine: MachineOption = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate", metavar="RUN", help="Correct predictions by the measurements of 'validate' in that run folder."
        ),
    ] = None,
    quantile: Annotated[
        float | None,
        typer.Option(
            "--quantile", metavar="Q", help="Re-rank the best plans by this quantile over resampled durations, for example 0.9."
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=1, help="Number of search processes, each with its own sampler.")
    ] = 1,
    engine: Annotated[
        EngineName, typer.Option("--engine", help="Run workers on this machine, or as tasks of a Ray cluster (RAY_ADDRESS).")
    ] = EngineName.LOCAL,
    storage: Annotated[
        str | None,
        typer.Option("--storage", metavar="URL", help="Share trials with other searches: postgresql://..., journal:///..."),
    ] = None,
    timeout: Annotated[float | None, typer.Option("--timeout", metavar="SECONDS", min=0, help="Stop after this time.")] = None,
    until_settled: Annotated[
        bool, typer.Option("--until-settled", help="Stop when the expected further gain is below the prediction error.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Search the fastest plans for a trace: predict many plans and keep the best ten.

    Ctrl-C stops the search and keeps its results. The same command continues it, also with more trials.

    On a cluster, give every search the same --storage and its own RUN: they share one study and end together.

    Example: dpro-search run --trials 500 --seed 1 --workers 2
    """
    from dpro_search.cli._output import print_json, stderr_console, stdout_console, warn
    from dpro_search.collect.sample import sample_trace_path
    from dpro_search.kinds import PlanOptions, files_of, job_of, kind_of, load_source, searchable
    from dpro_search.kinds._elsewhere import elsewhere
    from dpro_search.search import run_search
    from dpro_search.search.request import SearchRequest, usual_run

    use_machine(machine)
    folder = sample_trace_path() if trace is None else trace
    if storage is not None:
        _warn_of_slow_storage(stderr_console(), storage)
    options = PlanOptions(
        compute=frozenset(name.value for name in compute or ()),
        allow_lossy=allow_lossy,
        memory_limit_bytes=memory_limit,
        cluster_model=cluster_model,
        precision_table=precision_table,
        all_reduce_model=all_reduce_model,
    )
    source = load_source(folder)
    recorded = job_of(source, options)
    doubt = recorded.recording_doubt
    job, named, place = elsewhere(recorded, cluster, changes or (), verb="run")
    request = SearchRequest.of(folder, searchable(job), options.named | named | files_of(source), calibrate)
    if request.note and not quiet:
        stderr_console().print(request.note, soft_wrap=True)
    with progress(stderr_console(), trials, shown=not (quiet or as_json)) as bar:
        result = run_search(
            request.objective,
            trials=trials,
            sampler=sampler.value,
            seed=seed,
            out=usual_run(folder, sampler.value, seed) if out is None else out,
            trace=request.trace,
            trace_digest=request.trace_digest,
            on_trial=bar.trial,
            on_reevaluated=bar.reevaluated,
            timeout_s=timeout,
            workers=workers,
            engine=engine.value,
            storage=storage,
            options=request.options,
            cluster=place,
            until_settled=until_settled,
            quantile=quantile,
        )
    warn(doubt)
    servers, calibration = kind_of(source).servers(source), job.calibration
    if as_json:
        facts = result_facts(result, servers)
        facts |= {"calibration": None if calibration is None else calibration.facts, "recording_doubt": doubt}
        print_json(facts | ({} if place is None else {"cluster": place.facts}))
    else:
        if place is not None:
            stdout_console().print(f"Predicted for {place.name}, {place.ranks} ranks.", soft_wrap=True)
        print_result(stdout_console(), result, servers, calibration, "described" if job.trace is None else "recorded")
    if result.stopped == "interrupted":
        raise KeyboardInterrupt(f"interrupted after {result.trials} of {trials} trials; the same command continues {result.run}")


def _warn_of_slow_storage(console: Console, storage: str) -> None:
    from dpro_search.search.shared_study import waits_for_the_disk

    if waits_for_the_disk(storage):
        console.print(
            "warning: this --storage syncs the disk at every trial; leave it out on one machine, use a server on a cluster",
            style="yellow",
            soft_wrap=True,
        )


class SearchBar(NamedTuple):
    """Callbacks of a progress bar: a finished trial; the number of re-evaluated plans, and of all."""

    trial: Callable[[FinishedTrial], None]
    reevaluated: Callable[[int, int], None]


@contextmanager
def progress(console: Console, trials: int, *, shown: bool) -> Iterator[SearchBar]:
    """A bar with rate and best plan so far, on a terminal only; it disappears at the end of the block."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from dpro_search.cli._output import microseconds

    columns = (
        *(TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")),
        *(TimeRemainingColumn(compact=True), TextColumn("best {task.fields[best]}")),
    )
    shown = shown and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("searching", total=trials, rate="", best="-")
        best_us = math.inf

        def advance(trial: FinishedTrial) -> None:
            nonlocal best_us
            if trial.prediction.infeasible is None:
                best_us = min(best_us, trial.prediction.iteration_us)
            speed = bar.tasks[task].speed
            best = microseconds(best_us) if best_us < math.inf else "-"
            bar.update(task, advance=1, best=best, rate=f"{speed:.0f}/s" if speed else "")

        def reevaluated(done: int, plans: int) -> None:
            bar.update(task, description="re-evaluating", completed=done, total=plans, rate="")

        yield SearchBar(advance, reevaluated)


_NOTES = {
    "finished": "",
    "timeout": " (stopped by --timeout)",
    "interrupted": " (interrupted)",
    "exhausted": " (the sampler found no new plan)",
    "settled": " (expected further gain below the prediction error)",
}


def result_facts(result: SearchResult, servers: Servers) -> dict[str, Any]:
    """The JSON output; `servers`: parameter servers of the recorded job."""
    from dpro_search.deploy.targets import more_servers

    facts = result.summary()
    for row, ranked in zip(facts["plans"], result.plans, strict=True):
        row["more_servers"] = more_servers(ranked.plan, servers)
    return facts


def servers_note(plans: Sequence[Plan], servers: Servers) -> str:
    """A sentence on the plans that need more server hosts than were recorded; empty: there are none."""
    from dpro_search.deploy.targets import more_servers

    found = {number: more for number, plan in enumerate(plans) if (more := more_servers(plan, servers))}
    if not found:
        return ""
    needs = ", ".join(f"plan {number} ({more} more)" for number, more in found.items())
    if servers.on_workers:
        return f"Plans that need further hosts for servers: {needs}, with links like the workers'; the recorded ones shared hosts."
    return f"Plans with more than the {servers.count} recorded servers: {needs}. Each server needs a host with a link like theirs."


def print_result(
    console: Console,
    result: SearchResult,
    servers: Servers | None = None,
    calibration: Calibration | None = None,
    origin: str = "recorded",
) -> None:
    """The best plans as a table, their gain, what they need, and the run folder.

    Parameters
    ----------
    servers
        Parameter servers of the recorded job; None: it had none.
    calibration
        What the intervals were calibrated on; None: not known.
    origin
        Where the setting without a plan comes from, in a word.
    """
    from dpro_search.cli._output import microseconds

    console.print(result_table(result, origin))
    best = result.plans[0]
    if not result.feasible:
        console.print(
            f"No plan keeps the memory limit. The plan with the least memory {best.prediction.infeasible}.", style="yellow"
        )
    elif result.baseline.infeasible is not None:
        console.print(
            f"The {origin} setting {result.baseline.infeasible} MiB. Best plan that fits:"
            f" {microseconds(best.prediction.iteration_us)}, {best.speedup:.2f}x the {origin} speed."
        )
    elif result.worth_measuring:
        console.print(
            f"No gain is certain: the intervals overlap. The best plan is predicted to be {best.speedup:.2f}x as fast;"
            " measure it with `dpro-search validate`.",
            style="yellow",
        )
    elif not result.gain_certain:
        console.print(
            f"No gain found: no plan is faster than the {origin} setting by more than the prediction intervals.",
            style="yellow",
        )
    else:
        console.print(
            f"Best plan: {microseconds(best.prediction.iteration_us)} instead of"
            f" {microseconds(result.baseline.iteration_us)}, predicted speed-up {best.speedup:.2f}x."
        )
    if best.beats_recorded is not None and best.quantile_us is not None:
        console.print(
            f"Re-ranked by a quantile over resampled durations: {microseconds(best.quantile_us)};"
            f" the best plan is faster than the {origin} setting in {best.beats_recorded:.0%} of the draws."
        )
    if calibration is not None and not calibration.calibrated:
        console.print(f"Intervals: {calibration.text}.", style="yellow", soft_wrap=True)
    if servers is not None and (note := servers_note([ranked.plan for ranked in result.plans], servers)):
        console.print(note, style="yellow")
    if result.front:
        console.print(f"{len(result.front)} plans are on the Pareto front of time and memory: pareto.csv.")
    if result.workers_lost:
        console.print(f"{result.workers_lost} workers ended too early; others took over their plans.", style="yellow")
    note = _NOTES[result.stopped]
    console.print(f"{result.trials} trials in {result.seconds:.1f} s{note}. Run folder:", result.run, soft_wrap=True)


def result_table(result: SearchResult, origin: str = "recorded") -> Table:
    """Plans by predicted iteration time, the setting without a plan last; a question mark where the intervals overlap."""
    from rich import box
    from rich.table import Table

    from dpro_search.space.describe import describe
    from dpro_search.space.plan import Plan

    uncertain = any(not ranked.gain_certain and ranked.plan != Plan() for ranked in result.plans)
    caption = f"? = not certain: overlaps the interval of the {origin} setting" if uncertain else None
    table = Table(box=box.SIMPLE, caption=caption, caption_justify="left")
    table.add_column("#", justify="right")
    table.add_column("plan", ratio=1)
    for title in ("iteration", "interval", "speed-up"):
        table.add_column(title, justify="right", no_wrap=True)
    for rank, ranked in enumerate(result.plans):
        if ranked.plan == Plan():
            continue  # it is the last row
        speedup = f"{ranked.speedup:.2f}x" + ("  " if ranked.gain_certain else " ?")
        style = "green" if ranked.gain_certain else ""
        table.add_row(str(rank), describe(ranked.plan), *_times(ranked.prediction), speedup, style=style)
    table.add_row("", f"as {origin}", *_times(result.baseline), "1.00x  ")
    return table


def _times(prediction: Prediction) -> tuple[str, str]:
    from dpro_search.cli._output import microseconds

    low, high = map(microseconds, prediction.interval_us)
    low = low.removesuffix(high[high.index(" ") :])  # a common unit is printed once
    return microseconds(prediction.iteration_us), f"{low} - {high}"
