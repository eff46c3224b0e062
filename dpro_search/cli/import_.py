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

    from dpro_search.cli._output import microseconds, print_json, stderr_console
    from dpro_search.collect.assemble import assemble
    from dpro_search.collect.trace import EventKind

    trace = assemble(source)
    trace.save(out)
    comm = trace.events.select(trace.events.kind == EventKind.COMM)
    unmatched = int((comm.collective < 0).sum())
    result = {
        "trace": str(out),
        "format": "tensorflow-horovod",
        "ranks": trace.meta.ranks,
        "steps": int(trace.steps.traced[trace.steps.rank == 0].sum()),
        "ops": int((trace.events.kind == EventKind.OP).sum()),
        "dropped": dict(trace.meta.dropped),
        "collectives": {"matched": len(np.unique(comm.collective[comm.collective >= 0])), "unmatched": unmatched},
        "clock_residual_us": max(trace.meta.clock.residual_us),
        "warnings": list(trace.meta.warnings),
    }
    if as_json:
        print_json(result)
        return
    for warning in trace.meta.warnings:
        stderr_console().print(f"warning: {warning}", style="yellow")
    print(f"{result['steps']} profiled steps of {trace.meta.ranks} ranks, {result['ops']} ops, {len(trace.tensors)} gradients")
    print(f"{len(np.unique(comm.collective))} collectives, {unmatched} spans without one")
    print(f"clocks of the ranks agree within {microseconds(max(trace.meta.clock.residual_us))}")
    print(f"trace: {out}")
