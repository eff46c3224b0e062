"""`dpro-search export`: the files with which a real job follows a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpro_search.cli.options import JsonOption


def _targets() -> list[str]:
    from dpro_search.kinds import all_targets

    return [*dict.fromkeys(target.name for target in all_targets())]


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_PLAN", help="Folder of a search, or one plan's JSON file.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; must not exist.")],
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            autocompletion=_targets,
            metavar="NAME",
            help="What follows the plan: horovod, xla, tensorflow, ddp, pytorch, fsdp, synchronisation, mxnet, byteps, jax; "
            "of parallel jobs torchtitan, megatron, megatron-bridge, deepspeed, accelerate, pytorch, and nccl beside one; "
            "left out: what the plan needs.",
        ),
    ] = None,
    plan: Annotated[
        int | None,
        typer.Option(
            "--plan",
            metavar="N",
            min=1,
            help="Plan of the run; 1: the best.",
            show_default="the one that 'validate' proved fastest, else the best",
        ),
    ] = None,
    environment_only: Annotated[
        bool, typer.Option("--environment-only", help="The best plan that needs no change of the training script.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the files that a real job needs to follow a plan.

    A plan with a field that no target can express is refused, with the reason.

    Example: dpro-search export runs/sample --target horovod --out tuned
    """
    from dpro_search.cli.printing import print_json
    from dpro_search.deploy.of_run import export_from
    from dpro_search.kinds import all_targets, deployed

    exported = export_from(
        source, out, all_targets(), deployed, targets=target or (), number=plan, environment_only=environment_only
    )
    files = [str(out / name) for name in exported.files]
    if as_json:
        print_json({"files": files, "usage": exported.usage, "plan": exported.number})
    else:
        print("\n".join([*files, "", exported.usage]))
