"""Small file systems that are full, fill up, or are read-only."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def mount(*options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["mount", *map(str, options)], capture_output=True, text=True, check=False)


@contextmanager
def small_disk(place: Path, size: str = "8m") -> Iterator[Path]:
    """A small file system at a new folder, removed afterwards; without root the test is skipped."""
    place.mkdir()
    if not shutil.which("mount") or mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", place).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(disk: Path, *, but_bytes: int = 0) -> Path:
    """A file that leaves so much room."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            file.truncate(file.tell() - but_bytes)
    return filler
