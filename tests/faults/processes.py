"""The command line as processes that can be cut off."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).parents[2]
RAW = ROOT / "tests" / "data" / "ddp_mlp"  # what a recorded job of two ranks left
SEARCH = ("run", "--sampler", "mcmc", "--seed", "5", "--trials")
_MARK = "DPRO_SEARCH_TEST"
_PATIENCE_S = 30.0


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "dpro_search.cli", *map(str, args)]


def dpro(*args: object, cwd: Path | None = None, timeout: float = 600, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command, with variables on top of this process's."""
    options = {"cwd": cwd, "timeout": timeout, "env": {**os.environ, **env}}
    return subprocess.run(command(*args), capture_output=True, text=True, check=False, **options)


def succeeds(*args: object, cwd: Path | None = None) -> str:
    done = dpro(*args, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fails_in_one_line(code: int, *args: object, cwd: Path | None = None) -> str:
    """The line of the error."""
    done = dpro(*args, cwd=cwd)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("dpro-search: error: ")
    return line


def killed_after(seconds: float, *args: object, cwd: Path | None = None) -> bool:
    """Start a command and end it with SIGKILL after a time; its children must follow it. Whether it was not done by then."""
    mark = str(uuid.uuid4())
    with subprocess.Popen(
        command(*args), cwd=cwd, env={**os.environ, _MARK: mark}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)
        killed = process.poll() is None
        process.kill()
    deadline = time.monotonic() + _PATIENCE_S
    while processes_of(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(mark) == [], "children outlive the command"
    return killed


def processes_of(mark: str) -> list[int]:
    """Those that inherited the mark in their environment."""
    collected = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                collected.append(int(path.parent.name))
    return collected


def shown(folder: Path) -> list[str]:
    """What lies in a folder, without the hidden names that a killed process leaves."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
