"""Checks of `dpro-search doctor` on a trace: the verbs that can use it. Nothing that the trace names is run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dpro_search._text import without_secrets
from dpro_search.cli.doctor.checks import Check, missing_for_shaped_hosts
from dpro_search.collect.this_machine import load_warning
from dpro_search.errors import DproSearchError

if TYPE_CHECKING:
    from dpro_search.collect.trace import Trace
    from dpro_search.kinds import Source

_AGAIN = "record it again: dpro-search collect"
_LONGEST = 60  # characters of a command that are shown


def check_trace(folder: Path | None) -> Iterator[Check]:
    """Whether a trace can be read, and what follows from it; None: the bundled sample."""
    try:
        from dpro_search.collect.sample import sample_trace_path
        from dpro_search.kinds import Description, load_source

        folder = folder or sample_trace_path()
        source = load_source(folder)
    except (DproSearchError, ImportError, OSError) as error:
        yield Check(name="trace", ok=False, detail=str(error), fix=_AGAIN, needed=True)
        return
    if isinstance(source, Description):
        detail = ", ".join([f"{folder}: {source.framework}", *(f"{title} {value}" for title, value in source.provenance)])
    else:
        meta, events = source.meta, source.events
        detail = f"{folder}: version {meta.version}, {meta.framework} + {meta.comm}, {meta.ranks} ranks, {len(events)} events"
    yield Check(name="trace", ok=True, detail=detail, needed=True)
    replay, doubt = _replay(source)
    yield replay
    if not isinstance(source, Description):
        yield _recording(source, doubt)
    if replay.ok:
        yield _search(source)
        yield from _real_runs(source)


def _replay(source: Source) -> tuple[Check, str | None]:
    """Whether it can be replayed, and why it cannot be trusted."""
    from dpro_search.analysis.predict import ReplayRequest, replay
    from dpro_search.cli.printing import microseconds
    from dpro_search.kinds import job_of

    try:
        answer = replay(job_of(source), ReplayRequest())
    except DproSearchError as error:
        return Check(name="replay, diagnose", ok=False, detail=str(error), fix=_AGAIN), None
    beside = "no measured iteration to compare with"
    if answer.measured_us is not None and answer.error_pct is not None:
        beside = f"{microseconds(answer.measured_us)} measured, error {answer.error_pct:+.1f} %"
    detail = f"{microseconds(answer.iteration_us)} predicted, {beside}"
    return Check(name="replay, diagnose", ok=True, detail=detail), answer.recording_doubt or None


def _recording(trace: Trace, doubt: str | None) -> Check:
    """Whether the machine was left to the job, and the replay is near the measurement."""
    load = trace.meta.load
    problems = [*([doubt] if doubt else []), *([load_warning(load)] if load and load_warning(load) else [])]
    if load is None:
        detail_text = "the load of the machine was not recorded"
    else:
        detail_text = f"the job used {load.job_cores:.1f} and other work {load.other_cores:.1f} of {load.cores} cores"
    return Check(
        name="recording",
        ok=not problems,
        detail="; ".join(filter(None, problems)) or detail_text,
        fix=f"{_AGAIN}, on an idle machine",
    )


def _search(source: Source) -> Check:
    from dpro_search.kinds import job_of

    job = job_of(source)
    if job.space.fields:
        return Check(name="run", ok=True, detail=f"plans may change {', '.join(job.space.fields)}")
    fix = "'replay --what-if' predicts the gain of a faster part; to search, record the job with 'dpro-search collect'"
    return Check(name="run", ok=False, detail=job.nothing_to_search, fix=fix)


def _real_runs(source: Source) -> Iterator[Check]:
    """Whether the job can be started here, and who follows its plans."""
    from dpro_search.kinds import recorded_job, targets_of

    if targets := targets_of(source):
        yield Check(name="export", ok=True, detail=f"for {', '.join(map(str, targets))}")
    try:
        job = recorded_job(source)
        interpreter = job.spec.interpreter
    except DproSearchError as error:
        fix = "to run plans for real, record the job with 'dpro-search collect'; say its command: validate RUN -- CMD..."
        yield Check(name="validate", ok=False, detail=str(error), fix=fix)
        return
    problems = []
    if job.shaped:
        problems += [f"its hosts had links of their own, and here is {problem}" for problem in missing_for_shaped_hosts()]
    lacking = sorted(set(job.spec.cores) - os.sched_getaffinity(0))
    if lacking:
        problems.append(f"it ran on core {', '.join(map(str, lacking))}, which this process may not use")
    command = shlex.join(without_secrets(job.spec.command))
    command = command if len(command) <= _LONGEST else f"{command[: _LONGEST - 3]}..."
    would = f"would start {job.spec.ranks} ranks with {interpreter}, which must have {job.facts.framework}: {command}"
    would += " (give the command after '--', or --run-recorded-command)"
    yield Check(
        name="validate",
        ok=not problems,
        detail="; ".join(problems) or would,
        fix="run on a machine like the recorded one, as root if it had shaped hosts",
    )
