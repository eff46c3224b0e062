"""How `collect` and `validate` show a running job: one live line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from dpro_search._text import shortened, visible
from dpro_search.cli.printing import say

if TYPE_CHECKING:
    from rich.console import Console

    from dpro_search.collect.launch.while_running import JobState
    from dpro_search.search import Trial
    from dpro_search.space.plan import Prediction

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


class SearchBar(NamedTuple):
    """Callbacks of a progress bar: a finished trial; a re-evaluated plan, as `run_search` tells it."""

    trial: Callable[[Trial], None]
    reevaluated: Callable[[int, int, Prediction], None]


@contextmanager
def progress(console: Console, trials: int, *, shown: bool) -> Iterator[SearchBar]:
    """A bar with rate and best plan so far, on a terminal only; it disappears at the end of the block.

    The best plan is the one that the result would list first, so that its last time is that of the table.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from dpro_search.cli.printing import microseconds
    from dpro_search.search.result import BestPlan

    columns = (
        *(TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")),
        *(TimeRemainingColumn(compact=True), TextColumn("best {task.fields[best]}")),
    )
    shown = shown and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("searching", total=trials, rate="", best="-")
        best, shown_us = BestPlan(), math.inf

        def advance(trial: Trial) -> None:
            best.add(trial)
            speed = bar.tasks[task].speed
            bar.update(
                task,
                advance=1,
                best="-" if best.trial is None else microseconds(best.trial.prediction.iteration_us),
                rate=f"{speed:.0f}/s" if speed else "",
            )

        def reevaluated(done: int, plans: int, prediction: Prediction) -> None:
            nonlocal shown_us
            if done > 1 and prediction.infeasible is None:  # the first is the recorded setting
                shown_us = min(shown_us, prediction.iteration_us)
            text = microseconds(shown_us) if shown_us < math.inf else "-"
            bar.update(task, description="re-evaluating", completed=done, total=plans, rate="", best=text)

        yield SearchBar(advance, reevaluated)
