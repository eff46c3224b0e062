"""Options that several verbs have: output, what the job runs on, and models of what plans change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dpro_search.errors import InputError

TrainingOption = Annotated[
    str | None,
    typer.Option("--training", metavar="TIME", help="How long the job will train, like 200h: whether a further run pays off."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ClusterOption = Annotated[
    str | None,
    typer.Option("--cluster", metavar="C", help="What the job runs on: 16xhgx-h100, or a TOML file."),
]
SpeedsOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="K=V", help="Changed cluster or speeds: ranks=64, rate=1gbit, compute=0.9; facts: tokens=8192."),
]
HostCpusOption = Annotated[
    str | None,
    typer.Option("--host-cpus", metavar="N,N", help="CPU quotas of hosts, in cores: 1,0.25 (needs root)."),
]
HostChangeOption = Annotated[
    list[str] | None,
    typer.Option("--host-change", metavar="T:H=V", help="Change a host during the job: 30s:h2.cpus=0.25 or .rate=50mbit."),
]
ClusterModelOption = Annotated[
    Path | None,
    typer.Option("--cluster-model", metavar="DIR", help="Model of fused ops' durations, from 'fit' (default: bundled)."),
]
PrecisionTableOption = Annotated[
    Path | None,
    typer.Option("--precision-table", metavar="FILE", help="Table of op durations in bfloat16, for plans with such ops."),
]
AllReduceModelOption = Annotated[
    Path | None,
    typer.Option(
        "--all-reduce-model",
        metavar="DIR",
        help="Model of Open MPI's all-reduce algorithms, from 'fit', for plans that set them; 'run' then searches them.",
    ),
]


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
