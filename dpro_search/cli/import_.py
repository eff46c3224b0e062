"""`dpro-search import`: turns raw files into a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Raw folder that 'collect --keep-raw' left.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Trace folder to write; must not exist.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Turn the raw files of a recorded TensorFlow + Horovod job into a trace.

    Example: dpro-search import raw --out T
    """
    import numpy as np

    from dpro_search.cli._trace import print_trace, trace_facts
    from dpro_search.collect.assemble import assemble
    from dpro_search.collect.trace import EventKind

    trace = assemble(source)
    trace.save(out)
    comm = trace.events.select(trace.events.kind == EventKind.COMM)
    matched, unmatched = len(np.unique(comm.collective[comm.collective >= 0])), int((comm.collective < 0).sum())
    facts = trace_facts(trace, out) | {
        "format": "tensorflow-horovod",
        "dropped": dict(trace.meta.dropped),
        "collectives": {"matched": matched, "unmatched": unmatched},
    }
    print_trace(facts, [f"{matched} collectives, {unmatched} communication spans without one"], as_json)
