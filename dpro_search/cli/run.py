"""`dpro-search run`: searches the fastest plans for a trace."""

from __future__ import annotations

import re
from enum import StrEnum
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
    SpeedsOption,
    use_machine,
)
from dpro_search.cli.options.sample import SampleOption
from dpro_search.quantities import parse_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from dpro_search.analysis.clusters import BestPlanOnCluster, ImpossibleSearch
    from dpro_search.kinds._job_on_cluster import JobOnCluster
    from dpro_search.search import SearchResult


class SamplerName(StrEnum):
    """The samplers."""

    AUTO = "auto"
    CRITICAL_PATH = "critical-path"
    MCMC = "mcmc"
    NSGA2 = "nsga2"
    OPTUNA = "optuna"


class EngineName(StrEnum):
    """The places where workers run."""

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
        typer.Argument(metavar="TRACE", help="Trace folder, profile or job.toml."),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            metavar="N",
            min=1,
            help="Number of plans to evaluate; with --storage, of all searches together.",
            show_default="500; compiled: 10",
        ),
    ] = None,
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
        str | None,
        typer.Option(
            "--memory-limit",
            metavar="SIZE",
            help="Memory limit of a rank, like 72GiB; also searches recomputation and gradient accumulation.",
        ),
    ] = None,
    sample: SampleOption = None,
    cluster: ClusterOption = None,
    changes: SpeedsOption = None,
    cluster_model: ClusterModelOption = None,
    precision_table: PrecisionTableOption = None,
    all_reduce_model: AllReduceModelOption = None,
    machine: MachineOption = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            "--calibrate", metavar="RUN", help="Correct predictions by what 'validate' and 'measured' left in that run folder."
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
    tokens_per_second: Annotated[
        float | None,
        typer.Option("--tokens-per-second", metavar="N", min=0, help="Of several clusters, name the smallest that is so fast."),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option("--global-batch", metavar="N,N", help="Of a described job: the best plan of each of several batches."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Search the fastest plans for a trace: predict many plans and keep the best ten.

    Ctrl-C stops the search and keeps its results. The same command continues it, also with more trials.

    On a cluster, give every search the same --storage and its own RUN: they share one study and end together.

    Several names in --cluster, with commas between them, are compared: the fastest, and the cheapest for a token. So are several
    batches of a described job in --global-batch.

    Example: dpro-search run --trials 500 --seed 1 --workers 2
    """
    from dpro_search.analysis.clusters import choice
    from dpro_search.analysis.search import Deployment, search_answer
    from dpro_search.cli.options.sample import folder_of, print_sample
    from dpro_search.cli.printing import print_json, say, stderr_console, stdout_console, warn
    from dpro_search.cli.printing.progress import progress
    from dpro_search.cli.printing.search import print_choice, print_result
    from dpro_search.errors import InputError
    from dpro_search.kinds import PlanOptions, files_of, job_of, load_source, searchable
    from dpro_search.kinds._job_on_cluster import job_on_cluster
    from dpro_search.kinds._measured_runs import learned_changes
    from dpro_search.quantities import parse_bytes
    from dpro_search.search import run_search
    from dpro_search.search.request import SearchRequest, usual_run

    use_machine(machine)
    folder = folder_of(trace, sample)
    if storage is not None:
        _warn_of_slow_storage(stderr_console(), storage)
    options = PlanOptions(
        compute=frozenset(name.value for name in compute or ()),
        allow_lossy=allow_lossy,
        memory_limit_bytes=None if memory_limit is None else parse_bytes(memory_limit),
        cluster_model=cluster_model,
        precision_table=precision_table,
        all_reduce_model=all_reduce_model,
    )
    source = load_source(folder)
    recorded = job_of(source, options)
    doubt = recorded.recording_doubt
    plan_count = recorded.job.usual_trials if trials is None else trials

    def searched(cluster: str | None, out: Path, batch: int | None = None) -> tuple[JobOnCluster, SearchResult]:
        learned = learned_changes(folder, calibrate, cluster)
        changed = (*learned, *(changes or ()), *(() if batch is None else (f"global_batch={batch}",)))
        on_cluster = job_on_cluster(recorded, cluster, changed, verb="run")
        request = SearchRequest.of(
            folder, searchable(on_cluster.job), options.named | on_cluster.named | files_of(source), None if learned else calibrate
        )
        if learned and not quiet:
            stderr_console().print(f"Measured plans change the times of parts of a step: {', '.join(learned)}.", soft_wrap=True)
        if request.note and not quiet:
            stderr_console().print(request.note, soft_wrap=True)
        with progress(stderr_console(), plan_count, shown=not (quiet or as_json)) as bar:
            result = run_search(
                request.objective,
                trials=plan_count,
                sampler=sampler.value,
                seed=seed,
                out=out,
                trace=request.trace,
                trace_digest=request.trace_digest,
                on_trial=bar.trial,
                on_reevaluated=bar.reevaluated,
                timeout_s=timeout,
                workers=workers,
                engine=engine.value,
                storage=storage,
                options=request.options,
                cluster=on_cluster.cluster,
                until_settled=until_settled,
                quantile=quantile,
            )
        if result.stopped == "interrupted":
            interrupted = f"interrupted after {result.trials} of {plan_count} trials; the same command continues {result.run}"
            raise KeyboardInterrupt(interrupted)
        return on_cluster, result

    folder_of_run = usual_run(folder if trace is None else trace, sampler.value, seed) if out is None else out
    origin = recorded.job.origin
    sizes = _batches_of(batches)
    if (names := _several(cluster)) or sizes:
        places: list[str | None] = [*names] or [cluster]
        of_sizes: list[int | None] = [*sizes] or [None]
        rows = [_of(name, size, searched, folder_of_run) for name in places for size in of_sizes]
        answer = choice(rows, tokens_per_second)
        if as_json:
            print_json(answer)
        else:
            print_choice(answer, tokens_per_second, origin)
        return
    if tokens_per_second is not None:
        several_of = "give several, like --cluster 4xhgx-h100,8xhgx-h100"
        raise InputError(f"--tokens-per-second chooses among clusters or batches: {several_of}")
    on_cluster, result = searched(cluster, folder_of_run)
    job, place = on_cluster.job, on_cluster.cluster
    warn(doubt)
    deployment = Deployment.of(source, result)
    summary = search_answer(job, result, deployment, cluster=None if place is None else place.facts, doubt=doubt)
    if as_json:
        print_json(summary)
    else:
        if place is not None:
            stdout_console().print(f"Predicted for {place.name}, {place.ranks} ranks.", soft_wrap=True)
        print_result(stdout_console(), result, deployment, job.calibration, origin, summary.baseline)
        for sentence in summary.reasons:
            say(stdout_console(), sentence)
        if place is None:
            print_sample(stdout_console(), folder, result)


def _of(
    cluster: str | None, batch: int | None, searched: Callable[..., tuple[JobOnCluster, SearchResult]], out: Path
) -> BestPlanOnCluster | ImpossibleSearch:
    """The best plan on one of several clusters, or with one of several batches, or why there cannot be one."""
    from msgspec import UNSET

    from dpro_search.analysis.clusters import ImpossibleSearch, best_plan
    from dpro_search.errors import InputError

    name = cluster or "as described"
    folder = _run_of(out, name) if batch is None else _run_of(out, f"{name}-batch-{batch}")
    try:
        on_cluster, result = searched(cluster, folder, batch)
    except InputError as error:
        return ImpossibleSearch(cluster=name, global_batch=UNSET if batch is None else batch, error=str(error))
    return best_plan(name, batch, on_cluster.job, result)


def _several(cluster: str | None) -> list[str]:
    """The clusters of a list with commas; empty for one."""
    names = [name.strip() for name in (cluster or "").split(",") if name.strip()]
    return names if len(names) > 1 and not Path(cluster or "").is_file() else []


def _batches_of(text: str | None) -> list[int]:
    """The batches of a list with commas; raises `InputError`."""
    return [parse_count(each.strip()) for each in text.split(",")] if text is not None else []


def _run_of(out: Path, cluster: str) -> Path:
    """The run folder of the search on one of several clusters, or with one of several batches."""
    return out / (re.sub(r"[^\w.@-]+", "-", cluster).strip("-.") or "cluster")


def _warn_of_slow_storage(console: Console, storage: str) -> None:
    from dpro_search.search.shared_study import waits_for_the_disk

    if waits_for_the_disk(storage):
        console.print(
            "warning: this --storage syncs the disk at every trial; leave it out on one machine, use a server on a cluster",
            style="yellow",
            soft_wrap=True,
        )
