"""How `collect` and `validate` show a running job: one live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

from dpro_search._text import shortened, visible
from dpro_search.cli._output import say

if TYPE_CHECKING:
    from rich.console import Console

    from dpro_search.collect.launch.while_running import JobState

_EVERY_S = 30.0  # between plain lines
_LONGEST_LINE = 60  # characters of the job's own output that are shown


class JobProgress(AbstractContextManager["JobProgress"]):
    """Jobs that run one after the other.

    Parameters
    ----------
    console
        Of stderr.
    """

    def __init__(self, console: Console) -> None:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        self._console, self._live = console, console.is_terminal
        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
        self._bar = Progress(SpinnerColumn(), TimeElapsedColumn(), text, console=console, transient=True, disable=not self._live)
        self._task = self._bar.add_task("", total=None)
        self._name, self._steps, self._told_s = "", 0, 0.0
        self._left_s: float | None = None

    def __enter__(self) -> JobProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def begin(self, name: str, *, steps: int = 0, left_s: float | None = None, announced: bool = True) -> None:
        """A job starts.

        Parameters
        ----------
        steps
            How many it is known to run, at least; 0: not known.
        left_s
            How long this job and all later ones are expected to take; None: not known.
        announced
            Whether a line says at once that it starts, elsewhere than on a terminal. False: a short job that fails leaves one line.
        """
        self._name, self._steps, self._left_s, self._told_s = name, steps, left_s, 0.0
        line = ", ".join([name, *([_left(left_s)] if left_s else [])])
        if self._live:
            self._bar.update(self._task, description=line)
        elif announced:
            say(self._console, line)

    def show(self, state: JobState) -> None:
        """Show the current activity of the job. The thread that watches the job calls this."""
        line = self._line(state)
        if self._live:
            self._bar.update(self._task, description=line)
        elif state.elapsed_s - self._told_s >= _EVERY_S:
            self._told_s = state.elapsed_s
            say(self._console, f"{state.elapsed_s:.0f} s: {line}")

    def _line(self, state: JobState) -> str:
        parts = [self._name]
        if state.steps is not None:
            parts.append(f"step {state.steps}" + (f" ({self._steps} needed)" if self._steps else ""))
        if (left_s := self._left(state)) is not None:
            parts.append(_left(left_s))
        return ", ".join(parts) + (f" | {shortened(visible(state.last_line), _LONGEST_LINE)}" if state.last_line else "")

    def _left(self, state: JobState) -> float | None:
        if self._left_s is not None:
            return max(self._left_s - state.elapsed_s, 0.0)
        if not self._steps or not state.steps or state.steps >= self._steps:
            return None
        return state.elapsed_s / state.steps * (self._steps - state.steps)


class RunClock:
    """Estimates how long the remaining runs of a validation take, from those that ended."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def left_s(self, done: int, total: int) -> float | None:
        """None: no run has ended yet."""
        return None if not done else (time.monotonic() - self._started_s) / done * (total - done)


def _left(seconds: float) -> str:
    return f"about {seconds:.0f} s left" if seconds < 100 else f"about {seconds / 60:.0f} min left"
