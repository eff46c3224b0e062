"""Record a job that its command launches itself, with torchrun, srun, mpirun and the like: `record_launched`.

Variables of the environment carry the recorder (`runtime.record`) into every rank; all ranks write to one folder, which has to be
on a file system that they share, and find the package's files under the path that they have here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dpro_search.collect._files import require_new
from dpro_search.collect.launch.ranks import end_process
from dpro_search.collect.launch.step_times import StepSchedule
from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError, JobError, MissingCapabilityError
from dpro_search.runtime import HOOKS
from dpro_search.runtime.record.schedule import RecordSchedule

_LAUNCHERS = ("torchrun", "srun", "mpirun", "mpiexec", "accelerate", "deepspeed")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher.runner")
_GRACE_S = 40  # torchrun itself waits 30 s for its ranks to end
_WARMUP_STEPS = 2  # in which the profiler runs and its records are dropped


def launches_ranks(command: Sequence[str]) -> bool:
    """Whether a command starts the ranks of a job, by its first words: torchrun, or ``python -m torch.distributed.run``."""
    if not command:
        return False
    is_module = "python" in Path(command[0]).name and "-m" in command[:4]
    return Path(command[0]).name in _LAUNCHERS or (is_module and command[command.index("-m") + 1 :][:1] in [[m] for m in _MODULES])


def record_launched(
    command: Sequence[str], out: Path, schedule: StepSchedule, *, keep_raw: Path | None = None, timeout_s: float | None = None
) -> Trace:
    """Run a command to its end and write the trace of its ranks to the new folder `out`.

    Parameters
    ----------
    schedule
        The traced steps of the schedule are one window of the recorder.
    keep_raw
        New folder for the recorder's files; None: they are beside `out` until the trace is written.
    timeout_s
        The command is ended after this time; None: never.

    Raises
    ------
    InputError
        `out` exists already.
    JobError
        The command failed, took too long, or no rank recorded a window. What was recorded until then is kept.
    """
    for folder in filter(None, (out, keep_raw)):
        require_new(folder)
    recording = (keep_raw or out.with_name(f"{out.name}.recording")).resolve()
    if keep_raw is None and recording.exists():
        raise InputError(f"{recording}: left by an earlier command; import it with 'dpro-search import', or remove it")
    first = schedule.warmup + schedule.untraced
    windows = RecordSchedule.checked(wait=max(first, _WARMUP_STEPS), warmup=_WARMUP_STEPS, steps=schedule.traced, windows=1)
    path = os.pathsep.join(filter(None, (str(HOOKS), os.environ.get("PYTHONPATH"))))
    variables = {"PYTHONPATH": path, "DPRO_SEARCH_RECORD_TO": str(recording), "DPRO_SEARCH_RECORD_SCHEDULE": windows.to_text()}
    failure = _run(command, variables, timeout_s)
    if not any(recording.glob("window*/*.job.json")):
        raise JobError(
            f"{command[0]}: {failure or 'no rank recorded a window'}: it needs {first + schedule.traced} steps of an optimizer of "
            "torch.optim, on ranks that see this environment and this file system"
        )
    if failure:
        raise JobError(f"{command[0]}: {failure}; 'dpro-search import {recording}' reads what was recorded until then")
    trace = import_trace([recording])
    trace.save(out)
    if keep_raw is None:
        shutil.rmtree(recording, ignore_errors=True)
    return trace


def _run(command: Sequence[str], variables: dict[str, str], timeout_s: float | None) -> str:
    """Run a command, whose output is this process's error output; return how it failed ("": it did not)."""
    try:
        process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=sys.stderr.fileno(), start_new_session=True)
    except OSError as error:
        raise MissingCapabilityError(f"{command[0]}: cannot be run ({error.strerror})") from error
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return f"the job took longer than {timeout_s:.0f} s (--timeout) and was ended"
    finally:
        _end(process)
    return f"ended with code {code}" if code else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that still runs, which gets time to end its ranks: they may be of other process groups, and on other hosts."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    end_process(process)
