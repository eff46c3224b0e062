"""`dpro-search describe`: prints the file of a parallel job."""

from __future__ import annotations

from typing import Annotated

import typer

from dpro_search.cli._shared_options import JsonOption


def describe(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A built-in model, like llama3-8b, or a config.json of Hugging Face.")
    ],
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="C", help="What the job runs on: 16xhgx-h100, 512xh100, or a TOML file.")
    ],
    global_batch: Annotated[
        int | None,
        typer.Option("--global-batch", metavar="N", min=1, help="Sequences of a step.", show_default="4 a device"),
    ] = None,
    sequence: Annotated[
        int | None,
        typer.Option("--seq-len", metavar="N", min=1, help="Tokens of a sequence.", show_default="the model's, at most 4096"),
    ] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", metavar="P", help="Of matmuls and attention.", show_default="bf16")
    ] = None,
    framework: Annotated[
        str | None, typer.Option("--framework", metavar="F", help="What trains it.", show_default="megatron-core")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print a commented job.toml of a model on a cluster, with a legal strategy. Every verb takes the file as TRACE.

    Example: dpro-search describe llama3-8b --cluster 4xhgx-h100 --global-batch 512 --seq-len 8192 > job.toml
    """
    from dpro_search.cli._output import print_json
    from dpro_search.kinds import Wanted, description_text

    wanted = Wanted(
        model=model, cluster=cluster, global_batch=global_batch, sequence=sequence, precision=precision, framework=framework
    )
    text = description_text(wanted)
    if as_json:
        print_json({"job": text})
    else:
        print(text, end="")
