"""Output of `collect` and `import` about the trace that they wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpro_search.cli.printing import microseconds, print_json, say, stderr_console
from dpro_search.collect.trace import EventKind, Trace


def trace_facts(trace: Trace, out: Path) -> dict[str, Any]:
    """Facts that both verbs report as JSON."""
    import numpy as np

    work = np.isin(
        trace.events.kind,
        (EventKind.OP, EventKind.KERNEL, EventKind.COPY, EventKind.COLLECTIVE, EventKind.SERVER, EventKind.UNKNOWN),
    )
    return {
        "trace": str(out),
        "ranks": trace.meta.ranks,
        "steps": int(trace.steps.traced[trace.steps.rank == 0].sum()),
        "ops": int(work.sum()),
        "tensors": len(trace.tensors),
        "clock_residual_us": max(trace.meta.clock.residual_us),
        "clock_method": trace.meta.clock.method,
        "warnings": list(trace.meta.warnings),
    }


def print_trace(facts: dict[str, Any], lines: list[str], as_json: bool) -> None:
    """One JSON object, or warnings on stderr and a few lines for people, `lines` among them."""
    if as_json:
        print_json(facts)
        return
    for warning in facts["warnings"]:
        say(stderr_console(), f"warning: {warning}", "yellow")
    ranks = f"{facts['ranks']} {'rank' if facts['ranks'] == 1 else 'ranks'}"
    print(f"{facts['steps']} profiled steps of {ranks}, {facts['ops']} ops, {facts['tensors']} communicated tensors")
    print("\n".join(lines))
    if facts["clock_method"].startswith("none"):
        print("clocks of the ranks are not aligned")
    else:
        print(f"clocks of the ranks agree within {microseconds(facts['clock_residual_us'])}")
    print(f"trace: {facts['trace']}")
