"""`fit --collect parallel`: times blocks and exchanges of a described job on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dpro_search.cli._output import print_json, say, stderr_console, stdout_console
from dpro_search.errors import InputError
from dpro_search.quantities import size_text, time_text


def measure_parallel(sources: Sequence[Path], out: Path | None, command: str | None, plans: Sequence[str], as_json: bool) -> None:
    """Write, or add to, the file of times; errors are those of `kinds.timed_job`."""
    from dpro_search.kinds import timed_job

    if len(sources) != 1:
        raise InputError("--collect parallel: name one job.toml")
    if out is None:
        raise InputError("Missing option '--out': the file of times to write, or to add to")
    if command is None:
        raise InputError("Missing option '--command': the training command, which follows parallel_plan.py")
    console = stderr_console()
    times = timed_job(sources[0], plans, shlex.split(command), out, on_start=lambda what: say(console, f"timing {what}"))
    facts: dict[str, Any] = {
        "times": str(out),
        "blocks": len(times.blocks),
        "collectives": len(times.collectives),
        "flops_per_s": times.flops_per_s,
        "memory_bytes_per_s": times.memory_bytes_per_s,
        "device": times.device or None,
        "steps": [msgspec.to_builtins(step) for step in times.steps],
    }
    if as_json:
        print_json(facts)
        return
    for step in times.steps:
        settings = ", ".join(f"{name}={value}" for name, value in step.settings.items())
        took = f"step {time_text(step.step_us + step.update_us)} without exchanges, {size_text(step.peak_bytes)}"
        stdout_console().print(f"{settings}, {step.micro_batches} micro-batches: {took}", soft_wrap=True, highlight=False)
    stdout_console().print(
        f'{out}: {len(times.blocks)} blocks, {len(times.collectives)} exchanges; name it in the job\'s file: times = "{out.name}"',
        soft_wrap=True,
    )
