"""`dpro-search diagnose`: what an iteration waits for, rank by rank, and what removing it would gain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def diagnose(
    trace: Annotated[
        Path | None, typer.Argument(metavar="TRACE", help="Folder made by 'collect'; left out: the bundled sample.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what an iteration waits for, which rank comes late, what each improvement would gain, and what takes memory.

    Example: dpro-search diagnose T
    """
    from dpro_search.cli._jobs import verbs_of
    from dpro_search.cli._output import print_json
    from dpro_search.collect.sample import sample_trace_path
    from dpro_search.collect.trace import Trace

    recorded = Trace.load(sample_trace_path() if trace is None else trace)
    verbs = verbs_of(recorded)
    result = verbs.diagnose_trace(recorded)
    if as_json:
        print_json(result)
    else:
        verbs.print_diagnosis(result)
