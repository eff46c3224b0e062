"""`dpro-search import`: converts raw files to a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpro_search.cli.options import JsonOption


def _communication_lines(matched: int, unmatched: int, ranks: int) -> list[str]:
    """How much communication was recorded, and whether its parts on different ranks are known to belong together."""
    if not matched and not unmatched:
        return ["communication: no operation of a known library was recorded"]
    parts = f"{unmatched} {'operation' if unmatched == 1 else 'operations'} of one rank"
    if ranks == 1:
        return [f"communication: {parts}; no other rank was recorded, so that waiting for other ranks is part of their time"]
    known = f"{matched} {'collective' if matched == 1 else 'collectives'} of several ranks"
    return [f"communication: {known}" + (f", and {parts} whose counterparts are not known" if unmatched else "")]


def import_(
    sources: Annotated[list[Path], typer.Argument(metavar="SRC...", help="Files or folders of one job, gzip or not.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Trace folder to write; must not exist.")],
    parameters: Annotated[
        Path | None,
        typer.Option("--parameters", metavar="FILE", help="Names and sizes of parameters, for a profile without shapes."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Convert raw files to a trace: profiles of other tools, or the folder of 'collect --keep-raw'.

    The format is recognised by the files' content. Files of several ranks are matched, and the ranks' clocks are aligned.

    Example: dpro-search import rank0.json.gz rank1.json.gz --out T
    """
    import numpy as np

    from dpro_search.cli.printing import microseconds
    from dpro_search.cli.printing.trace import print_trace, trace_facts
    from dpro_search.collect._files import require_new, what_is
    from dpro_search.collect.readers.importers import import_trace
    from dpro_search.collect.readers.parameters import with_parameters
    from dpro_search.collect.trace import EventKind
    from dpro_search.errors import InputError
    from dpro_search.kinds import assemble_raw, described_in
    from dpro_search.space.recorded.step_graph import iterations_us, unmeasured_steps, unmeasured_text

    require_new(out)
    for source in sources:
        if (what := what_is(source)) in ("a trace", "the folder of a search", "an exported plan"):
            raise InputError(f"{source}: {what}, and no raw files; 'replay' and 'run' take a trace, 'report' and 'export' a search")
        if described_in(source) is not None:
            raise InputError(f"{source}: needs no import: 'replay', 'run' and 'diagnose' take it as it is")
    is_recording_folder = len(sources) == 1 and (sources[0] / "job.json").is_file()
    trace = assemble_raw(sources[0]) if is_recording_folder else import_trace(sources)
    if parameters is not None:
        trace = with_parameters(trace, parameters)
    trace.save(out)
    parts = trace.events.select(np.isin(trace.events.kind, (EventKind.COMM, EventKind.COLLECTIVE)))
    matched, unmatched = len(np.unique(parts.collective[parts.collective >= 0])), int((parts.collective < 0).sum())
    facts = trace_facts(trace, out) | {
        "format": trace.meta.format,
        "dropped": dict(trace.meta.dropped),
        "collectives": {"matched": matched, "unmatched": unmatched},
    }
    lines = [f"format {trace.meta.format}", *_communication_lines(matched, unmatched, trace.meta.ranks)]
    lines += [f"left out: {number} {reason}" for reason, number in trace.meta.dropped.items()]
    if len(trace.dependencies) and len(trace.steps):
        measured_us = list(iterations_us(trace).values())
        lines.append(
            f"an iteration takes {microseconds(float(np.median(measured_us)))} (median of {len(measured_us)})"
            if measured_us
            else "how long an iteration takes was not measured: record more than one whole step"
        )
        if trace.meta.unprofiled_us is not None:
            lines.append(f"a step without the profiler took {microseconds(trace.meta.unprofiled_us)}")
        facts["steps_left_out"] = {str(step): why for step, why in unmeasured_steps(trace).items()}
        lines += filter(None, [unmeasured_text(trace)])
    print_trace(facts, lines, as_json)
