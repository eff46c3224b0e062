"""`dpro-search export`: the files with which a real job follows a plan."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Target(StrEnum):
    """Systems that a plan can be exported to."""

    HOROVOD = "horovod"


def export(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_PLAN", help="Folder of a search, or one plan's JSON file.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; must not exist.")],
    target: Annotated[Target, typer.Option("--target", help="What will run the plan.")] = Target.HOROVOD,
    plan: Annotated[int | None, typer.Option("--plan", metavar="N", min=0, help="Plan of the run; 0: the best.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write the files with which a real job follows a plan.

    Example: dpro-search export runs/sample --target horovod --out tuned
    """
    from dpro_search.cli._output import print_json
    from dpro_search.deploy.horovod import export_horovod
    from dpro_search.errors import InputError
    from dpro_search.space.plan import Plan

    if source.is_dir():
        path = source / "plans" / f"plan-{plan or 0}.json"
        if not path.is_file():
            known = len(list((source / "plans").glob("plan-*.json")))
            raise InputError(f"{path}: no such plan; {source} holds {known} plans (0 is the best); choose one with --plan")
    elif plan is not None:
        raise InputError(f"--plan {plan}: only with the folder of a search, and {source} is not a folder")
    else:
        path = source
    exporters = {Target.HOROVOD: export_horovod}
    exported = exporters[target](Plan.load(path), out)
    files = [str(out / name) for name in exported.files]
    if as_json:
        print_json({"files": files, "usage": exported.usage})
    else:
        print("\n".join([*files, "", exported.usage]))
