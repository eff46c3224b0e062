"""The command line, called in this process: output and exit code as of a process of its own, without its second of imports.

Where the process is the subject (it is killed, or its imports are counted), `tests.faults.processes` starts one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO
from unittest import mock

from dpro_search.cli import main
from dpro_search.collect.trace import Trace
from dpro_search.kinds._measured import MeasuredJob, MeasuredStep
from dpro_search.machine import machine_constants

_measured: dict[bytes, MeasuredStep[Any]] = {}
_measure = MeasuredJob.measured_step.__func__  # type: ignore[attr-defined]


@classmethod  # type: ignore[misc]
def _measured_once(kind: type[MeasuredJob[Any]], trace: Trace) -> MeasuredStep[Any]:
    """The measured step of a trace, which is a function of the trace and of the machine: all commands share those of equal traces.

    Most commands that tests call read the same few recordings, and would spend most of their time on this.
    """
    inputs = hashlib.sha256(pickle.dumps((kind, trace, machine_constants()))).digest()
    if inputs not in _measured:
        _measured[inputs] = _measure(kind, trace)
    return _measured[inputs]


def dpro(*args: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command, with variables on top of this process's; any other exception than an exit is the caller's to see.

    So are warnings of libraries: DPRO_SEARCH_DEBUG is set, which shows them as well.

    `doctor` looks into no framework's environment, where it would import the framework.
    """
    words, out, err = [*map(str, args)], io.StringIO(), io.StringIO()
    where = contextlib.chdir(cwd) if cwd else contextlib.nullcontext()
    with (
        where,
        mock.patch.dict(os.environ, {"DPRO_SEARCH_ENVS": "/nonexistent", "DPRO_SEARCH_DEBUG": "1", **env}),
        mock.patch.object(MeasuredJob, "measured_step", _measured_once),
        _printed(out, err),
    ):
        try:
            main(words)
        except SystemExit as ended:
            code = ended.code or 0
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def called(module: ModuleType, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the ``main`` of a module as ``python -m`` does."""
    words, out, err = [*map(str, args)], io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", [module.__name__, *words]), mock.patch.dict(os.environ, env), _printed(out, err):
        try:
            code = module.main() or 0
        except SystemExit as ended:
            code = ended.code or 0
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _printed(out: TextIO, err: TextIO) -> Iterator[None]:
    """Both streams are caught, and warnings of libraries go where a process prints them."""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.showwarning = lambda *warning: print(warnings.formatwarning(*warning[:4]), file=sys.stderr)
        warnings.simplefilter("default", RuntimeWarning)
        yield


def succeeds(*args: object, cwd: Path | None = None) -> str:
    done = dpro(*args, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.cache
def done_once(*words: str) -> tuple[Path, str]:
    """The folder in which a command ran, and what it printed: for tests that look at the same command and change nothing there."""
    _folders.append(tempfile.TemporaryDirectory())
    folder = Path(_folders[-1].name)
    return folder, succeeds(*words, cwd=folder)


_folders: list[tempfile.TemporaryDirectory[str]] = []  # of `done_once`, which stay until the process ends


def fails_in_one_line(code: int, *args: object, cwd: Path | None = None) -> str:
    """The line of the error."""
    done = dpro(*args, cwd=cwd)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("dpro-search: error: ")
    return line
