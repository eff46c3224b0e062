"""`dpro-search ranks`: names the rank, host or link that makes the others of a job wait, also while the job runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpro_search.cli.options import JsonOption

if TYPE_CHECKING:
    from dpro_search.analysis.ranks import RanksAnswer

_POLL_S = 1.0
_SLOW = 3  # exit status


def ranks(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="What CollectiveStamps wrote, NCCL's inspector, its RAS (ncclras -f json -v), or a flight recorder in JSON.",
        ),
    ],
    follow: Annotated[bool, typer.Option("--follow", help="Print a line whenever the answer changes, until the job ends.")] = False,
    since: Annotated[int, typer.Option("--since", metavar="STEP", min=0, help="Leave out the steps before this one.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Name the rank that makes the others wait, since when, by how much and why.

    Exit status: 0 no rank is slow; 3 a rank, host or link is slow, or ranks parted (for watchdogs); 1 and 2 errors.

    Example: DPRO_SEARCH_STAMPS=stamps torchrun train.py; dpro-search ranks stamps
    """
    from dpro_search.analysis.ranks import ranks as answer_of
    from dpro_search.cli.printing import print_json

    answer = _followed(folder, since, as_json=as_json) if follow else answer_of(folder, since=since)
    if as_json:
        print_json(answer)
    elif not follow:
        _print(answer)
    if answer.findings or answer.parting is not None:
        raise typer.Exit(_SLOW)


def _followed(folder: Path, since: int, *, as_json: bool) -> RanksAnswer:
    """The last answer, after the job has stamped nothing for a while; a line for each change."""
    from dpro_search.analysis.ranks.watch import Watch, feed_from, is_silent
    from dpro_search.cli.printing import say, stdout_console
    from dpro_search.collect.readers.stamps import StampFolder

    watch, stamps, shown = Watch(), StampFolder(path=folder), 0
    while True:
        fed = feed_from(watch, stamps, since)
        if not as_json and len(watch.changes) > shown:
            shown = len(watch.changes)
            answer = watch.answer()
            say(stdout_console(), f"step {answer.step}: {answer.lines()[0]}")
        if not fed and is_silent(stamps):
            return watch.answer(silent=True)
        if not fed:
            time.sleep(_POLL_S)


def _print(answer: RanksAnswer) -> None:
    from rich.table import Table

    from dpro_search.cli.printing import say, stdout_console

    console = stdout_console()
    for line in answer.lines():
        say(console, line)
    if not answer.ranks:
        return
    table = Table("rank", "host", "input ms", "compute ms", "waited ms", "arrived last")
    slow = {rank for finding in answer.findings for rank in finding.ranks}
    shown = sorted(answer.ranks, key=lambda each: (each.rank not in slow, -each.compute_us - each.input_us))[:16]
    for each in shown:
        times = (each.input_us, each.compute_us, each.waited_us)
        table.add_row(str(each.rank), each.host, *(f"{us / 1e3:.1f}" for us in times), f"{each.last_pct:.0f} %")
    console.print(table)
