"""`dpro-search validate`: runs the best plans for real and compares with the predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpro_search._text import without_secrets
from dpro_search.cli.options import HostChangeOption, HostCpusOption, JsonOption, TrainingOption

if TYPE_CHECKING:
    from rich.console import Console

    from dpro_search.collect.launch.step_times import StepTimes
    from dpro_search.deploy.validate import MeasuredPlan, Validation


def validate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a search.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- CMD...", help="The training command (the recorded one: --run-recorded-command)."),
    ] = None,
    run_recorded_command: Annotated[
        bool, typer.Option("--run-recorded-command", help="Run the command that the trace names: only for a trace that you trust.")
    ] = False,
    top: Annotated[int, typer.Option("--top", metavar="K", min=1, help="How many of the best plans to run.")] = 3,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="TRACE", help="Path of the search's trace, if it has moved.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", help="Minimum number of rounds; runs are interleaved.")] = 2,
    most_rounds: Annotated[
        int | None,
        typer.Option(
            "--most-rounds",
            metavar="N",
            help="Maximum number of rounds, run until all medians are known to 2 %.",
            show_default="--rounds",
        ),
    ] = None,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps to skip at the start of each run.")] = 5,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            metavar="SECONDS",
            help="Stop a run that takes longer.",
            show_default="an hour; for a plan 5 times the recorded time, at least 300",
        ),
    ] = None,
    paced: Annotated[
        bool,
        typer.Option("--paced", help="Ranks of a parallel job wait for recorded times in place of computing."),
    ] = False,
    show_next: Annotated[
        bool, typer.Option("--next", help="Run nothing: name the plan whose run helps most, and its cost.")
    ] = False,
    training: TrainingOption = None,
    host_cpus: HostCpusOption = None,
    host_change: HostChangeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the recorded setting and the best plans for real, interleaved, and compare with the predictions.

    The job runs on hosts, links and cores like the recorded ones. If a plan needs a change of the script, DPRO_SEARCH_PLAN names
    the folder with the plan's files (see 'dpro-search export'). If the script prints losses, these are compared: no speed-up is
    reported for a plan whose losses differ, or with a failed run. The other plans are still measured.

    Example: dpro-search validate runs/mine --top 3 -- python train.py
    """
    import shlex

    from dpro_search._text import visible
    from dpro_search.cli.printing import microseconds, print_json, say, stderr_console, warn
    from dpro_search.cli.printing.progress import JobProgress, RunClock
    from dpro_search.collect.launch.host_limits import HostLimits
    from dpro_search.errors import JobError
    from dpro_search.kinds._real_runs import real_runs
    from dpro_search.space.plan_json import by_setting

    console = stderr_console()
    if show_next:
        _print_next(run, trace, training, as_json=as_json)
        return

    def show(name: str, found: StepTimes | JobError) -> None:
        outcome = f"failed: {visible(str(found))}" if isinstance(found, JobError) else microseconds(found.median_us)
        console.print(f"{name}: {outcome}", markup=False, soft_wrap=True)

    at, kept, clock = "before the first run", 0, RunClock()

    def begin(name: str, done: int, total: int) -> None:
        nonlocal at
        at = f"in run {done + 1} of {total}"
        progress.begin(f"run {done + 1} of {total}, {name}", left_s=clock.left_s(done, total))

    def keep(finished: int) -> None:
        nonlocal kept
        kept = finished
        if finished and at == "before the first run":
            say(console, f"counting {_rounds(finished)} of an interrupted call; remove {run / 'rounds.jsonl'} to measure again")

    progress = JobProgress(console)
    limits = HostLimits.parse(host_cpus, host_change or ())
    runs = real_runs(run, trace, command or (), paced=paced, limits=limits, watch=progress.show)
    warn(runs.doubt)
    if runs.job.command_from_trace and run_recorded_command:
        say(console, f"running the command of the trace: {shlex.join(without_secrets(runs.job.spec.command))}")
    try:
        with progress:
            validation, calibration = runs.validate(
                top=top,
                rounds=rounds,
                most_rounds=most_rounds,
                warmup=warmup,
                timeout_s=timeout,
                run_recorded_command=run_recorded_command,
                on_start=begin,
                on_run=show,
                on_kept=keep,
            )
    except KeyboardInterrupt:
        earlier = "; validation.json of an earlier call is unchanged" if (run / "validation.json").is_file() else ""
        left = f"; {_rounds(kept)} kept: the same command continues" if kept else ", and its measurements are not kept"
        raise KeyboardInterrupt(f"interrupted {at}: the job was ended{left}{earlier}") from None
    if as_json:
        print_json(by_setting(validation) | {"recording_doubt": runs.doubt})
    else:
        learns = runs.predicted.job.learns_speeds
        _print(run, validation, "it learns speeds of devices and links from these runs." if learns else calibration.summary)


def _print_next(run: Path, trace: Path | None, training: str | None, *, as_json: bool) -> None:
    from dpro_search.analysis.next_run import next_run
    from dpro_search.cli.printing import print_json, say, stdout_console
    from dpro_search.kinds._measured_runs import SearchedRun
    from dpro_search.quantities import parse_us

    answer = next_run(SearchedRun.of(run, trace), None if training is None else parse_us(training))
    if as_json:
        print_json(answer)
    else:
        for line in answer.lines():
            say(stdout_console(), line)


def _rounds(count: int) -> str:
    return f"{count} finished round{'s' if count > 1 else ''}"


def _print(run: Path, validation: Validation, calibrated: str) -> None:
    from rich import box
    from rich.table import Table

    from dpro_search._text import visible
    from dpro_search.cli.printing import microseconds, percent, stdout_console
    from dpro_search.space.describe import describe

    title = "measured on paced runs: ranks waited in place of computing" if validation.paced else "measured on real runs"
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
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
    for refused in validation.refused:
        table.add_row(describe(refused.plan), microseconds(refused.predicted_us), microseconds(refused.measured_us), "", "none", "")
    for failed in validation.failed:
        measured = "" if failed.measured_us is None else microseconds(failed.measured_us)
        table.add_row(describe(failed.plan), microseconds(failed.predicted_us), measured, "", "failed", "")
    console = stdout_console()
    console.print(table)
    console.print(f"Noise floor: {percent(validation.noise_pct)} (the recorded setting against itself).")
    changed_pct = validation.changed_pct
    if changed_pct is not None and validation.recorded_us is not None:
        console.print(
            f"The recorded setting takes {percent(abs(changed_pct))} {'longer' if changed_pct > 0 else 'less'} than recorded"
            f" ({microseconds(validation.recorded_us)}): the machine or its links have changed. A calibration corrects only the"
            " gains of plans.",
            style="yellow",
        )
    if validation.paced:
        _print_splits(console, validation)
        console.print("Paced: schedules and exchanges were real, computation was its recorded time; losses mean nothing.")
    if validation.kept_rounds:
        console.print(f"{validation.kept_rounds} of {validation.rounds} rounds are of an interrupted call.")
    if not validation.stable:
        console.print("Some medians are not known to 2 %: use more --rounds or a longer job.")
    if not any(plan.beyond_noise and plan.speedup_measured > 1 for plan in validation.plans):
        console.print("No plan is faster by more than the noise.")
    elif any(not plan.beyond_noise for plan in validation.plans):
        console.print("? = within the noise: no difference is proved.")
    _print_trained(console, validation)
    for refused in validation.refused:
        console.print(f"{describe(refused.plan)}: no speed-up, it trains something else: {refused.losses.reason}.")
    for failed in validation.failed:
        failure = f"{describe(failed.plan)}: failed in run {failed.runs + 1}: {visible(failed.reason)}"
        console.print(failure, style="yellow", markup=False, soft_wrap=True)
    for sentence in dict.fromkeys(_loss_sentence(plan) for plan in validation.plans if not validation.paced):
        console.print(sentence)
    console.print(f"dpro-search run --calibrate {run}: {calibrated}", soft_wrap=True)


def _print_splits(console: Console, validation: Validation) -> None:
    """Table of the time of paced steps."""
    from dpro_search.cli.printing import print_table
    from dpro_search.deploy.step_split import PARTS
    from dpro_search.space.describe import describe

    named = [("as recorded", validation.baseline_split), *((describe(plan.plan), plan.split) for plan in validation.plans)]
    rows = [
        (name, *(f"{getattr(split.predicted, part):.1%} {getattr(split.measured, part):.1%}" for part in ("compute", *PARTS)))
        for name, split in named
        if split is not None
    ]
    if rows:
        columns = ("plan", "compute", "bubble", "exposed communication", "of it contention")
        print_table(console, "shares of the step, predicted and measured", columns, rows)


def _print_trained(console: Console, validation: Validation) -> None:
    """Runs to a target loss."""
    from dpro_search.cli.printing import print_table, size

    if not validation.trained:
        return
    columns = ("scheme", "seed", "seconds", "loss", "steps", "commits", "moved", "waiting")
    rows = [
        (
            run.synchronisation,
            str(run.seed),
            f"{run.time_s:.1f}",
            f"{run.final_loss:.3g}",
            str(run.steps),
            str(run.commits),
            size(run.bytes),
            f"{run.waiting_share:.0%}",
        )
        for run in validation.trained
    ]
    print_table(console, "trainings to the target loss", columns, rows)


def _loss_sentence(plan: MeasuredPlan) -> str:
    return "" if plan.losses is None else f"Losses: {plan.losses.reason}."
