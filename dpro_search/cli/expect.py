"""`dpro-search expect`: compares a job with what is expected of it, and ranks the causes of a difference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpro_search.cli.options import JsonOption
from dpro_search.errors import InputError

if TYPE_CHECKING:
    from dpro_search.analysis.expect import Expectation
    from dpro_search.kinds import JobInScenario, Wanted

_SHOWN_MEASUREMENTS = 3
_LIKELY = 0.03  # Causes of less probability are not printed.


def expect(
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB", help="A job.toml, or a run folder; without it --model and --cluster.")
    ] = None,
    number: Annotated[
        int | None,
        typer.Option("--plan", metavar="N", min=0, help="Of a run folder: the plan, with everything that was measured of it."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="M", help="A built-in model, or a config.json.")] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="C", help="What the job runs on: 2xdgx-a100-80, 16xh100, or a TOML file.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", metavar="N", min=1, help="Sequences of a step, with --model.")
    ] = None,
    sequence: Annotated[
        int | None, typer.Option("--seq-len", metavar="N", min=1, help="Tokens of a sequence, with --model.")
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", metavar="P", help="Of products, with --model.")] = None,
    framework: Annotated[str | None, typer.Option("--framework", metavar="F", help="What trains it, with --model.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="K=V", help="A setting of the job, like tp=4 or micro_batch=2.")
    ] = None,
    measured: Annotated[
        list[str] | None,
        typer.Option(
            "--measured",
            metavar="NAME=VALUE",
            help="What was seen: step_time=12.4s, tokens_per_second=9000, tokens_per_second_per_device, samples_per_second, "
            "mfu=38%, flops_per_device=400TFLOP/s; the same with one_host_ in front; median_step_time=12.1s, memory=71GiB, "
            "utilisation=93%, power=520W, "
            "all_reduce=180GB/s (busbw of 1 GiB), gemm=610TFLOP/s.",
        ),
    ] = None,
    also: Annotated[
        list[Path] | None, typer.Option("--also", metavar="FILE", help="A file with such numbers: lines NAME=VALUE, JSON or TOML.")
    ] = None,
    show_next: Annotated[
        bool, typer.Option("--next", help="Print the measurements that would tell most about the cause, and their commands.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether a measured job is as expected, and rank the causes that could explain a difference.

    Example: dpro-search expect job.toml --measured tokens_per_second_per_device=5200 --measured memory=61GiB --next
    """
    from dataclasses import replace

    import msgspec

    from dpro_search.analysis.expect import expect as answer_of
    from dpro_search.analysis.measured import measured_of
    from dpro_search.cli.printing import print_json
    from dpro_search.kinds import Wanted, job_of, load_source
    from dpro_search.kinds._measured_runs import SearchedRun
    from dpro_search.space.plan import Plan

    if job is not None and any((model, cluster, global_batch, sequence, precision, framework)):
        raise InputError(f"{job}: a file says model, cluster, batch and precision itself; change them with --set, or leave it out")
    assumed: tuple[str, ...] = ()
    begins_with = Plan()
    if job is not None and (job / "run.json").is_file():
        searched = SearchedRun.of(job)
        begins_with, texts = measured_of(searched, number or 0)
        recorded, measured = searched.job, [*texts, *(measured or ())]
    elif number is not None:
        raise InputError(f"--plan {number}: only of a run folder")
    elif job is not None:
        recorded = job_of(load_source(job))
    elif model is None or cluster is None:
        raise InputError("name a job.toml, or give --model and --cluster; 'dpro-search describe --list' prints names")
    else:
        recorded, assumed = _described(
            Wanted(
                model=model, cluster=cluster, global_batch=global_batch, sequence=sequence, precision=precision, framework=framework
            )
        )
    scenario = recorded.job.scenario(tuple(changes or ()))
    here, plan = recorded.under(replace(scenario, plan=begins_with.changed(**scenario.plan.settings)))
    answer = answer_of(here, measured or (), also or (), plan=plan, with_next=show_next)
    answer = msgspec.structs.replace(answer, assumptions=(*assumed, *answer.assumptions))
    if as_json:
        print_json(answer)
    else:
        _print(answer, with_next=show_next)


def _described(request: Wanted) -> tuple[JobInScenario, tuple[str, ...]]:
    """A job of which only options are given, so that its strategy is a usual one; and sentences on what was not given."""
    import tomllib
    from tempfile import TemporaryDirectory

    from dpro_search.kinds import description_text, job_of, load_source

    with TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(description_text(request).partition("\n[runs]")[0])
        values = tomllib.loads(path.read_text())
        blanks = [name for name in ("global_batch", "sequence", "precision", "framework") if getattr(request, name) is None]
        assumed = tuple(f"{name} was not given: {values[name]} is taken" for name in blanks if name in values)
        return job_of(load_source(path)), assumed


def _print(answer: Expectation, *, with_next: bool) -> None:
    from dpro_search.cli.printing import say, stdout_console

    console = stdout_console()
    for line in answer.lines():
        say(console, line)
    if not answer.causes:
        say(console, "Give what was measured, for example --measured tokens_per_second=9000, to compare it.")
    for runs in answer.comparable:
        low, middle, high = runs.mfu_pct
        say(console, f"published: {runs.source}, {runs.runs} runs on {runs.devices[0]} to {runs.devices[1]} devices, "
            f"MFU {low:.0f} to {high:.0f} %, median {middle:.0f} % (here {answer.mfu_pct or 0:.0f} %)")  # fmt: skip
    for cause in answer.causes:
        if cause.probability >= _LIKELY:
            severity = f" ({cause.severity})" if cause.severity else ""
            say(console, f"{cause.probability:4.0%}  {cause.name}: {cause.title}{severity}", "bold")
            for sentence in cause.would_also_see:
                say(console, f"        {sentence}")
    for sentence in (*answer.not_told_apart, *(f"assumed: {each}" for each in answer.assumptions)):
        say(console, f"* {sentence}")
    if with_next:
        for number, each in enumerate(answer.next[:_SHOWN_MEASUREMENTS], 1):
            worth = f"tells {each.information_bits:.2f} of {each.entropy_bits:.2f} bits, {each.device_minutes:.3g} device-minutes"
            say(console, f"next {number}: {each.words} ({worth})", "bold")
            console.print(f"  {each.command}", soft_wrap=True, highlight=False, markup=False)
        if not answer.next:
            say(console, "No further number would tell much about the cause.")
