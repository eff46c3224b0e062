"""`dpro-search diff`: what changed between two recordings, descriptions or compiled programs of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpro_search.cli.options import JsonOption

if TYPE_CHECKING:
    from dpro_search.analysis.difference import CauseOfDifference, Difference

_MOST_CAUSES = 15
_MOST_RANKS = 8
_NAME_LENGTH = 30  # of an op in a table of 80 columns


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="Trace, profile, job.toml or compiled program: before a change.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The same after it.")],
    max_regression: Annotated[
        str | None,
        typer.Option(
            "--max-regression",
            metavar="PCT",
            help="Exit with 1 if B takes longer than A by more than this (3%) and by more than equal jobs differ.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show which ops, collectives and idle times explain the change of the iteration time between recordings or programs of a job.

    The causes add up to the change. Each is the time that ops of one name have on the critical path of an iteration.

    Example: dpro-search diff yesterday today --max-regression 3%
    """
    from dpro_search.analysis.difference import difference
    from dpro_search.cli.options.sample import imported
    from dpro_search.cli.printing import print_json
    from dpro_search.collect.trace import Trace
    from dpro_search.kinds import described_in, job_of
    from dpro_search.quantities import parse_percent

    limit_pct = None if max_regression is None else parse_percent(max_regression)
    jobs = [job_of(described_in(path) or Trace.load(imported(path))) for path in (before, after)]
    answer = difference(jobs[0], jobs[1], limit_pct)
    if as_json:
        print_json(answer)
    else:
        _print(answer)
        if limit_pct is not None:
            print(_verdict(answer, limit_pct))
    if answer.exceeded:
        raise typer.Exit(1)


def _verdict(answer: Difference, limit_pct: float) -> str:
    """How the change compares with the allowed regression and with the noise."""
    if answer.regression_pct > limit_pct and not answer.exceeded:
        return (
            f"more than the allowed regression of {limit_pct:g} %, but no more than equal jobs differ by "
            f"({answer.noise_pct:.1f} %): record more steps to tell them apart"
        )
    unknown = "; by how much equal jobs differ is not known: record at least two steps of each" if answer.noise_pct is None else ""
    return f"{'more' if answer.exceeded else 'not more'} than the allowed regression of {limit_pct:g} %{unknown}"


def _print(answer: Difference) -> None:
    from dpro_search.cli.printing import print_table, say, stdout_console
    from dpro_search.kinds._diagnosis import op_texts
    from dpro_search.quantities import percent_text, time_text

    console = stdout_console()
    first, second = map(time_text, answer.iteration_us)
    how = "measured" if answer.measured else "replayed"
    noise = "" if answer.noise_pct is None else f"; equal jobs differ by up to {percent_text(answer.noise_pct)}"
    say(console, f"An iteration takes {second}, before {first} ({how}): {answer.regression_pct:+.1f} %{noise}.")
    for warning in answer.warnings:
        say(console, f"* {warning}")
    shown, rest = answer.causes[:_MOST_CAUSES], answer.causes[_MOST_CAUSES:]
    names = op_texts([cause.name for cause in shown], _NAME_LENGTH)
    rows = [(name, cause.part, *map(time_text, _times_us([cause]))) for name, cause in zip(names, shown, strict=True)]
    if rest:
        rows.append((f"{len(rest)} smaller causes", "", *map(time_text, _times_us(rest))))
    print_table(console, "what explains the change", ("op", "part", "before", "after", "change"), rows)
    if len(answer.ranks) > 1:
        parts = tuple(answer.ranks[0].change_us)
        by_rank = [(str(row.rank), *(time_text(row.change_us[part]) for part in parts)) for row in answer.ranks[:_MOST_RANKS]]
        ranks = "each rank" if len(answer.ranks) <= _MOST_RANKS else f"{_MOST_RANKS} of {len(answer.ranks)} ranks"
        print_table(console, f"change on {ranks}", ("rank", *(part.replace("_", " ") for part in parts)), by_rank)


def _times_us(causes: Sequence[CauseOfDifference]) -> tuple[float, float, float]:
    """The sums of several causes: before, after, and the change."""
    return (
        sum(cause.before_us for cause in causes),
        sum(cause.after_us for cause in causes),
        sum(cause.change_us for cause in causes),
    )
