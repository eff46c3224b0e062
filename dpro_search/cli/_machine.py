"""The option ``--machine`` of the verbs that predict."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dpro_search.errors import InputError

MachineOption = Annotated[Path | None, typer.Option("--machine", metavar="FILE", help="Constants of the machine, from 'fit'.")]


def use_machine(file: Path | None) -> None:
    """Let this process and those that it starts predict with the constants of a machine file; None: nothing changes.

    Raises
    ------
    InputError
        It cannot be read.
    """
    from dpro_search.machine import VARIABLE, load_machine

    if file is None:
        return
    try:
        load_machine(file)
    except InputError as error:
        raise InputError(f"--machine: {error}") from error
    os.environ[VARIABLE] = str(file)
