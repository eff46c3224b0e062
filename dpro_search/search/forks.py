"""Forks of the search that work for it, each with a socket of its own.

A fork shares the trace and the compiled replay, and so starts at once (a fresh interpreter needs seconds to import and to read the
trace again). The objective must therefore not need threads that the search has started. No lock is shared, and a fork owns nothing
that could be left half-done: it may be killed at any time.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, NoReturn, Self


@dataclass(eq=False)
class Fork:
    """A process, and the search's end of its socket."""

    process: ForkProcess
    connection: Connection

    @classmethod
    def start(cls, work: Callable[..., None], *arguments: Any, foreign: Sequence[int]) -> Self:
        """Call ``work(connection, *arguments)`` in a fork, which ends with it, or with the search.

        Parameters
        ----------
        foreign
            File descriptors of the search that the fork closes: sockets of other forks, which would not notice the end of the
            search otherwise, and files that the search locks.
        """
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        foreign = [*foreign, ours.fileno()]
        process = context.Process(target=_in_fork, args=(work, theirs, arguments, foreign), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours)

    def ended(self) -> str:
        """How the process has ended; its socket is closed."""
        self.connection.close()
        self.process.join()
        how = self.process.exitcode
        return f"killed by signal {-how}" if how is not None and how < 0 else f"exit code {how}"


def end_forks(forks: Sequence[Fork]) -> None:
    """Kill processes and close their sockets."""
    for fork in forks:
        fork.process.kill()
    for fork in forks:
        fork.process.join()
        fork.process.close()
        fork.connection.close()


def _in_fork(work: Callable[..., None], connection: Connection, arguments: Sequence[Any], foreign: Sequence[int]) -> NoReturn:
    """Ctrl-C is handled by the search; its end is no error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for descriptor in foreign:
        os.close(descriptor)
    gc.freeze()  # the collector skips inherited objects: visiting them would copy their pages
    try:
        with suppress(EOFError, OSError):
            work(connection, *arguments)
    finally:
        os._exit(0)  # without clean-up: inherited progress bars and files belong to the search
