"""`dpro-search diff`: what changed between two recordings of a job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dpro_search.cli._shared_options import JsonOption

_MOST_CAUSES = 15
_MOST_RANKS = 8
_NAME_LENGTH = 30  # of an op in a table of 80 columns


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="Trace folder or profile: yesterday, or before a change.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Trace folder or profile: today, or after it.")],
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
    """Show which ops, collectives and idle times explain the change of the iteration time between two recordings of a job.

    The causes add up to the change. Each is the time that ops of one name have on the critical path of an iteration.

    Example: dpro-search diff yesterday today --max-regression 3%
    """
    from dpro_search.cli._output import print_json
    from dpro_search.cli._sample import imported
    from dpro_search.collect.trace import Trace
    from dpro_search.kinds import difference, job_of
    from dpro_search.quantities import parse_percent

    limit_pct = None if max_regression is None else parse_percent(max_regression)
    facts = difference(job_of(Trace.load(imported(before))), job_of(Trace.load(imported(after))))
    exceeded = limit_pct is not None and facts["regression_pct"] > max(limit_pct, facts["noise_pct"] or 0.0)
    if as_json:
        print_json(facts | {"max_regression_pct": limit_pct, "exceeded": exceeded})
    else:
        _print(facts)
        if limit_pct is not None:
            print(_verdict(facts, limit_pct, exceeded=exceeded))
    if exceeded:
        raise typer.Exit(1)


def _verdict(facts: Mapping[str, Any], limit_pct: float, *, exceeded: bool) -> str:
    """How the change compares with the allowed regression and with the noise."""
    noise_pct, beyond = facts["noise_pct"], facts["regression_pct"] > limit_pct
    if beyond and not exceeded:
        return (
            f"more than the allowed regression of {limit_pct:g} %, but no more than equal jobs differ by ({noise_pct:.1f} %): "
            "record more steps to tell them apart"
        )
    unknown = "; by how much equal jobs differ is not known: record at least two steps of each" if noise_pct is None else ""
    return f"{'more' if exceeded else 'not more'} than the allowed regression of {limit_pct:g} %{unknown}"


def _print(facts: Mapping[str, Any]) -> None:
    from dpro_search.cli._output import print_table, say, stdout_console
    from dpro_search.kinds._facts import op_texts
    from dpro_search.quantities import percent_text, time_text

    console = stdout_console()
    first, second = map(time_text, facts["iteration_us"])
    how = "measured" if facts["measured"] else "replayed"
    noise = facts["noise_pct"]
    beside = "" if noise is None else f"; equal jobs differ by up to {percent_text(noise)}"
    say(console, f"An iteration takes {second}, before {first} ({how}): {facts['regression_pct']:+.1f} %{beside}.")
    for warning in facts["warnings"]:
        say(console, f"* {warning}")
    shown, rest = facts["causes"][:_MOST_CAUSES], facts["causes"][_MOST_CAUSES:]
    times = ("before_us", "after_us", "change_us")
    names = op_texts([row["name"] for row in shown], _NAME_LENGTH)
    rows = [(name, row["part"], *(time_text(row[key]) for key in times)) for name, row in zip(names, shown, strict=True)]
    if rest:
        rows.append((f"{len(rest)} smaller causes", "", *(time_text(sum(row[key] for row in rest)) for key in times)))
    print_table(console, "what explains the change", ("op", "part", "before", "after", "change"), rows)
    if len(facts["ranks"]) > 1:
        parts = tuple(facts["ranks"][0]["change_us"])
        by_rank = [
            (str(row["rank"]), *(time_text(row["change_us"][part]) for part in parts)) for row in facts["ranks"][:_MOST_RANKS]
        ]
        title = (
            "change on each rank"
            if len(facts["ranks"]) <= _MOST_RANKS
            else f"change on {_MOST_RANKS} of {len(facts['ranks'])} ranks"
        )
        print_table(console, title, ("rank", *(part.replace("_", " ") for part in parts)), by_rank)
