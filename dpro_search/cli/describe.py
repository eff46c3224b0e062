"""`dpro-search describe`: prints the file of a parallel job, or what it can be made of."""

from __future__ import annotations

from typing import Annotated

import typer

from dpro_search.cli.options import JsonOption
from dpro_search.errors import InputError


def describe(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A built-in model, like llama3-8b, or a config.json of Hugging Face.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="C", help="What the job runs on: 16xhgx-h100, 512xh100, or a TOML file.")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option("--global-batch", metavar="N", min=1, help="Sequences of a step.", show_default="4 a device"),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option("--seq-len", metavar="N", min=1, help="Tokens of a sequence.", show_default="the model's, at most 4096"),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", metavar="P", help="Of matmuls and attention.", show_default="bf16, or what the device has"),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            "--framework", metavar="F", help="What trains it.", show_default="megatron-core; pytorch-gloo for the cores of CPUs"
        ),
    ] = None,
    list_names: Annotated[
        bool, typer.Option("--list", help="Print the names of built-in models, clusters and frameworks instead.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print a commented job.toml of a model on a cluster, with a legal strategy. Every verb takes the file as TRACE.

    Example: dpro-search describe llama3-8b --cluster 4xhgx-h100 --global-batch 512 --seq-len 8192 > job.toml
    """
    from dpro_search.cli.printing import print_json
    from dpro_search.kinds import Wanted, description_text

    if list_names:
        _print_names(as_json)
        return
    if model is None or cluster is None:
        missing = "MODEL" if model is None else "--cluster"
        raise InputError(f"{missing} is missing; 'dpro-search describe --list' prints the names of models and clusters")
    request = Wanted(
        model=model, cluster=cluster, global_batch=global_batch, sequence=sequence, precision=precision, framework=framework
    )
    text = description_text(request)
    if as_json:
        print_json({"job": text})
    else:
        print(text, end="")


def _print_names(as_json: bool) -> None:
    from dpro_search.cli.printing import print_json
    from dpro_search.kinds import describable_names

    names = describable_names()
    if as_json:
        print_json(names)
        return
    for title, listed in names.items():
        print(f"{title}:", *(f"  {name}" for name in listed), sep="\n")
