"""`dpro-search doctor`: what this machine and a trace support, what is missing and how to get it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dpro_search.cli._checks import Check


def doctor(
    trace: Annotated[Path | None, typer.Argument(metavar="[TRACE]", help="Trace; left out: the bundled sample.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what this machine and a trace support, and how to get the rest.

    Ends with 1 if what every verb needs is missing: Python, the packages, a trace that can be read.

    Example: dpro-search doctor
    """
    from dpro_search.cli._checks import check_machine, check_trace
    from dpro_search.cli._output import print_json

    checks = [*check_machine(), check_trace(trace)]
    if as_json:
        print_json({"checks": [{"name": c.name, "ok": c.ok, "detail": c.detail, "fix": "" if c.ok else c.fix} for c in checks]})
    else:
        _print_table(checks)
    if any(check.needed and not check.ok for check in checks):
        raise typer.Exit(1)


def _print_table(checks: list[Check]) -> None:
    from rich.table import Table
    from rich.text import Text

    from dpro_search.cli._output import stdout_console

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "check", "found"):
        table.add_column(column, overflow="fold")
    for check in checks:
        mark = Text("ok", "green") if check.ok else Text("missing", "red" if check.needed else "yellow")
        table.add_row(mark, Text(check.name), Text(check.detail if check.ok else f"{check.detail}\n{check.fix}"))
    stdout_console().print(table)
