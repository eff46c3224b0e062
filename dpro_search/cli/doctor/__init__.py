"""`dpro-search doctor`: what this machine and a trace support, what is missing and how to install it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpro_search.cli.options import JsonOption

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dpro_search.cli.doctor.checks import Check


def doctor(
    trace: Annotated[Path | None, typer.Argument(metavar="[TRACE]", help="Trace.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what this machine and a trace support, and how to install what is missing.

    For the trace it lists the verbs that can use it. Nothing that the trace names is run.

    The exit code is 1 if a requirement of every verb is missing: Python, the packages, a readable trace.

    Example: dpro-search doctor
    """
    from dpro_search.cli.doctor.checks import check_machine
    from dpro_search.cli.doctor.trace_checks import check_trace
    from dpro_search.cli.printing import print_json, stderr_console

    with stderr_console().status("checking frameworks and trace"):
        machine, recorded = list(check_machine()), list(check_trace(trace))
    checks = [*machine, *recorded]
    if as_json:
        print_json({"checks": [{"name": c.name, "ok": c.ok, "detail": c.detail, "fix": "" if c.ok else c.fix} for c in checks]})
    else:
        _print_tables([("This machine", machine), ("What can be done with the trace", recorded)])
    if any(check.needed and not check.ok for check in checks):
        raise typer.Exit(1)


def _print_tables(parts: Sequence[tuple[str, Sequence[Check]]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from dpro_search._text import visible
    from dpro_search.cli.printing import stdout_console

    console = stdout_console()
    for title, checks in parts:
        table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", show_header=False)
        for _ in range(3):
            table.add_column(overflow="fold")
        for check in checks:
            mark = Text("ok", "green") if check.ok else Text("missing", "red") if check.needed else Text("not here", "yellow")
            detail = check.detail if check.ok else f"{check.detail}\nfix: {check.fix}"
            table.add_row(mark, Text(check.name), Text("\n".join(map(visible, detail.split("\n")))))
        console.print(table)
    checks = [check for _, part in parts for check in part]
    needed = [check.name for check in checks if check.needed and not check.ok]
    absent = sum(not check.ok and not check.needed for check in checks)
    if needed:
        console.print(f"Missing, and needed by every verb: {', '.join(needed)}.", style="red")
    elif absent:
        console.print(f"What every verb needs is here; {absent} of what only some need {'is' if absent == 1 else 'are'} not.")
    else:
        console.print("All of it works here.")
