"""Names of things that are made here for the hosts of a job. They name the process that made them, and go with it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

_PREFIX = "dps"
TAG_PATTERN = rf"{_PREFIX}\d+"


def own_tag() -> str:
    """The prefix of the names of this process's things."""
    return f"{_PREFIX}{os.getpid()}"


def dead_tags(names: Iterable[str]) -> list[str]:
    """The tags among names whose process has ended."""
    tags = {match[0] for name in names if (match := re.match(TAG_PATTERN, name))}
    return [tag for tag in sorted(tags) if not Path(f"/proc/{tag[len(_PREFIX) :]}").exists()]


def kill(pids: Iterable[str]) -> None:
    """Kill processes that may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


class MadeHere:
    """A context manager: makes something when its block begins, and removes it at the end, or where it cannot be made.

    A subclass makes it in `_make`, and gives `_made` what removes it. Meanwhile SIGTERM and SIGHUP raise `SystemExit`.
    """

    def __init__(self) -> None:
        self._made = contextlib.ExitStack()

    def _make(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self._made.enter_context(_ended_in_order())
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove what was made; processes that still run in it are killed."""
        self._made.close()


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """While the block runs, SIGTERM and SIGHUP raise `SystemExit`, so that what was made is removed."""
    old: dict[signal.Signals, Any] = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(ValueError):  # not in the main thread: the caller's own handling stays
            old[number] = signal.signal(number, _raise_exit)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
