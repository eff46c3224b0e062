"""The command line as processes that can be cut off."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RAW = ROOT / "tests" / "data" / "ddp_mlp"  # what a recorded job of two ranks left
SEARCH = ("run", "--sampler", "mcmc", "--seed", "5", "--trials")


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "dpro_search.cli", *map(str, args)]


def dpro(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*args), cwd=cwd, capture_output=True, text=True, check=False)


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


def killed_after(seconds: float, *args: object, cwd: Path | None = None) -> None:
    """Start a command, and end it with SIGKILL after a time, if it is not done by then."""
    with subprocess.Popen(command(*args), cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)
        process.kill()


def shown(folder: Path) -> list[str]:
    """What lies in a folder, without the hidden names that a killed process leaves."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
