"""The progress bar of `dpro-search run`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

    from dpro_search.search import FinishedTrial
    from dpro_search.space.plan import Prediction


class SearchBar(NamedTuple):
    """Callbacks of a progress bar: a finished trial; a re-evaluated plan, as `run_search` tells it."""

    trial: Callable[[FinishedTrial], None]
    reevaluated: Callable[[int, int, Prediction], None]


@contextmanager
def progress(console: Console, trials: int, *, shown: bool) -> Iterator[SearchBar]:
    """A bar with rate and best plan so far, on a terminal only; it disappears at the end of the block.

    The best plan is the one that the result would list first, so that its last time is that of the table.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from dpro_search.cli._output import microseconds
    from dpro_search.search.result import BestPlan

    columns = (
        *(TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")),
        *(TimeRemainingColumn(compact=True), TextColumn("best {task.fields[best]}")),
    )
    shown = shown and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("searching", total=trials, rate="", best="-")
        best, shown_us = BestPlan(), math.inf

        def advance(trial: FinishedTrial) -> None:
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
