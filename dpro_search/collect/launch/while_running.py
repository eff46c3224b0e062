"""Threads beside a running job: `watched` tells its progress (duration, step, last line), `changing` changes its hosts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpro_search.collect.launch.host_limits import HostChange
from dpro_search.errors import DproSearchError

_EVERY_S = 0.5
_TAIL_BYTES = 4096


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Call `work` from a thread with an event that is set when the block ends; the block's end waits for it to return."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@dataclass(frozen=True, kw_only=True)
class JobState:
    """A running job."""

    elapsed_s: float  # Since its start.
    steps: int | None  # Steps that rank 0 has begun; None: none yet, or not known.
    last_line: str  # Of rank 0's output; empty: it has printed nothing yet.

    @staticmethod
    def of(folder: Path, elapsed_s: float) -> JobState:
        """The state of the job whose raw files are in a folder."""
        rank = folder / "rank0"
        return JobState(elapsed_s=elapsed_s, steps=_steps(rank / "progress"), last_line=_last_line(rank / "log"))


Watch = Callable[[JobState], None]


@contextlib.contextmanager
def watched(folder: Path, watch: Watch | None) -> Iterator[None]:
    """Call `watch` twice a second, from a thread, while the block runs."""
    if watch is None:
        yield
        return
    started = time.monotonic()

    def look(ended: threading.Event) -> None:
        while not ended.wait(_EVERY_S):
            watch(JobState.of(folder, time.monotonic() - started))

    with beside(look):
        yield


def _steps(path: Path) -> int | None:
    """The number that the recorder writes now and then."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _last_line(path: Path) -> str:
    try:
        with path.open("rb") as log:
            log.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
            lines = log.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    # A progress bar of the job's own overwrites its line.
    return next((last for line in reversed(lines) if (last := line.rstrip("\r").rpartition("\r")[2].strip())), "")


@contextlib.contextmanager
def changing(changes: Sequence[HostChange], apply: Callable[[HostChange], None]) -> Iterator[None]:
    """Apply each change at its time, from a thread, while the block runs; a change that fails raises at the block's end."""
    if not changes:
        yield
        return
    failed: list[Exception] = []
    begun = time.monotonic()

    def apply_all(ended: threading.Event) -> None:
        for change in changes:
            if ended.wait(max(begun + change.after_s - time.monotonic(), 0.0)):
                return
            try:
                apply(change)
            except (DproSearchError, OSError) as error:
                failed.append(error)
                return

    with beside(apply_all):
        yield
    if failed:
        raise failed[0]
