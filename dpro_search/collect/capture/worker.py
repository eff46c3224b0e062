"""`run_worker`: runs a capture in an interpreter that has the framework, shows its progress, and ends it when it takes too long."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dpro_search.errors import JobError, MissingCapabilityError

_PROGRESS = "capture: "


def run_worker(
    python: str,
    worker: Path,
    request: Mapping[str, Any],
    folder: Path,
    *,
    timeout_s: float,
    needs: str,
    say: Callable[[str], None] = lambda what: None,
) -> bytes:
    """The answer of a worker, as JSON.

    Parameters
    ----------
    worker
        A script of `runtime.capture`, which reads a request from a file and writes its answer to another.
    folder
        Where the two files are.
    needs
        What the interpreter must have, for the error when there is none: "PyTorch".
    say
        Called with what the worker does.

    Raises
    ------
    MissingCapabilityError
        The interpreter cannot be started.
    JobError
        The worker failed without an answer, or took longer than `timeout_s`.
    """
    request_file, answered = folder / "request.json", folder / "answer.json"
    request_file.write_bytes(msgspec.json.encode(request))
    try:
        process = subprocess.Popen(
            [python, str(worker), str(request_file), str(answered)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
    except OSError as error:
        raise MissingCapabilityError(f"{python}: cannot be started ({error.strerror}); name {needs}'s with --python") from error
    lines: list[str] = []
    too_late = threading.Event()

    def end() -> None:
        too_late.set()
        process.kill()

    timer = threading.Timer(timeout_s, end)
    timer.start()
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(_PROGRESS):
                say(line.removeprefix(_PROGRESS).strip())
            else:
                lines.append(line.strip())
        process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        timer.cancel()
    if too_late.is_set():
        raise JobError(f"the capture took longer than {timeout_s:g} s and was ended; give it more with --time-limit")
    if process.returncode or not answered.is_file():
        raise JobError(f"the capture ended with status {process.returncode}: {next(filter(None, reversed(lines)), 'no message')}")
    return answered.read_bytes()
