"""`dpro-search validate`: runs the best plans for real and compares with the predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dpro_search.deploy.validate import Validation


def validate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a search.")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- CMD...", help="The training command; left out: the recorded one.")
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="K", min=1, help="How many of the best plans to run.")] = 3,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="TRACE", help="The search's trace, if it has moved.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", help="Times that everything runs, in turn.")] = 2,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps of each run to leave out.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the recorded setting and the best plans for real, in turn, and compare with the predictions.

    The job runs on hosts, links and cores like the recorded ones. A script that follows exact groups takes them from the folder
    that DPRO_SEARCH_PLAN names (see 'dpro-search export').

    Example: dpro-search validate runs/mine --top 3 -- python train.py
    """
    import msgspec

    from dpro_search.cli._output import microseconds, print_json, stderr_console
    from dpro_search.collect._files import write_file
    from dpro_search.collect.launch.ranks import JobSpec
    from dpro_search.collect.trace import Trace
    from dpro_search.deploy import validate as deploy
    from dpro_search.errors import InputError
    from dpro_search.search import SearchResult
    from dpro_search.search.run_folder import read_run
    from dpro_search.space.plan import Plan

    result = SearchResult.load(run)
    recorded = Trace.load(trace or Path(read_run(run).trace))
    meta, knobs = recorded.meta, recorded.horovod_settings
    chosen = tuple(command or meta.command)
    if not chosen:
        raise InputError("the trace does not tell the job's command: write it after '--', like '-- python train.py'")
    plans = [(ranked.plan, ranked.prediction) for ranked in result.plans if ranked.plan != Plan()][:top]
    shaped = len(set(meta.hosts)) > 1
    spec = JobSpec(
        command=chosen,
        ranks=meta.ranks,
        cores=meta.cores if min(meta.cores) >= 0 else (),
        env={
            "HOROVOD_FUSION_THRESHOLD": str(knobs.fusion_threshold_bytes),
            "HOROVOD_CYCLE_TIME": f"{knobs.cycle_time_us / 1000:.6g}",
        },
    )
    console = stderr_console()
    with console.status(f"{rounds} rounds of {len(plans) + 2} runs"):
        validation = deploy.validate(
            spec,
            result.baseline,
            plans,
            rate_bps=meta.rate_bps,
            shaped=shaped,
            rounds=rounds,
            warmup=warmup,
            on_run=lambda name, times: console.print(f"{name}: {microseconds(times.median_us)}"),
        )
    write_file(run / "validation.json", msgspec.json.format(msgspec.json.encode(validation), indent=1) + b"\n")
    if as_json:
        print_json(msgspec.to_builtins(validation))
    else:
        _print(validation)


def _print(validation: Validation) -> None:
    from rich import box
    from rich.table import Table

    from dpro_search.cli._output import microseconds, percent, stdout_console
    from dpro_search.cli.run import describe

    table = Table(box=box.SIMPLE, title="measured on real runs", title_justify="left")
    table.add_column("plan", ratio=1)
    for title in ("predicted", "measured", "error", "speed-up", "95 %"):
        table.add_column(title, justify="right", no_wrap=True)
    base = validation
    table.add_row(
        "as recorded",
        microseconds(base.baseline_predicted_us),
        microseconds(base.baseline_us),
        percent(base.baseline_error_pct),
        "1.00x",
        "",
    )
    for plan in validation.plans:
        low, high = plan.speedup_interval
        table.add_row(
            describe(plan.plan),
            microseconds(plan.predicted_us),
            microseconds(plan.measured_us),
            percent(plan.error_pct),
            f"{plan.speedup_measured:.2f}x" + ("" if plan.beyond_noise else " ?"),
            f"{low:.2f}-{high:.2f}",
        )
    console = stdout_console()
    console.print(table)
    console.print(f"Noise floor: {percent(validation.noise_pct)} (the recorded setting against itself).")
    if not any(plan.beyond_noise and plan.speedup_measured > 1 for plan in validation.plans):
        console.print("No plan is faster by more than the noise.")
    elif any(not plan.beyond_noise for plan in validation.plans):
        console.print("? = within the noise: no difference is proved.")
