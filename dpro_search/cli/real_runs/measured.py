"""`dpro-search measured`: stores what somebody measured of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpro_search.cli.options import JsonOption, TrainingOption


def measured(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the search whose plan was run.")],
    plan: Annotated[int | None, typer.Option("--plan", metavar="N", min=0, help="The plan; 0: the setting without a plan.")] = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="The recorded or described setting: plan 0.")] = False,
    step_time: Annotated[str | None, typer.Option("--step-time", metavar="TIME", help="Time of a step, like 12.4s.")] = None,
    memory: Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="The most memory of a device, like 71GiB.")] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log",
            metavar="FILE",
            help="In place of --step-time: output of torchtitan, Megatron-LM, DeepSpeed, NeMo, MaxText or HF Trainer.",
        ),
    ] = None,
    training: TrainingOption = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="TRACE", help="Path of the search's trace, if it has moved.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Store a real step time of a plan that ran elsewhere, compare it with the prediction, and name the run to make next.

    Several measurements of one plan are kept with their dates. `report`, `expect RUN`, `export` and `run --calibrate RUN` use them.

    Example: dpro-search measured runs/mine --plan 1 --log train.log
    """
    from dpro_search.analysis.measured import record
    from dpro_search.cli.printing import print_json, say, stdout_console
    from dpro_search.errors import InputError
    from dpro_search.quantities import parse_us

    if (plan is None) != baseline:
        raise InputError("name what was measured: --plan N, or --baseline for the setting without a plan")
    answer = record(
        run,
        plan or 0,
        step_time=step_time,
        memory=memory,
        log=log,
        trace=trace,
        training_us=None if training is None else parse_us(training),
    )
    if as_json:
        print_json(answer)
    else:
        for line in answer.lines():
            say(stdout_console(), line)
