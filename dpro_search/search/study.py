"""The search itself: ask a sampler, price its plan, write it down, tell it; resumable at any point."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal

from dpro_search.errors import InputError
from dpro_search.search.objective import CachedObjective, Objective
from dpro_search.search.result import SearchResult, rank_plans
from dpro_search.search.run_folder import Journal, RunInfo, Trial, open_run
from dpro_search.search.samplers import Proposal, Sampler, make_sampler
from dpro_search.space.plan import Plan

RECORDED = Proposal(Plan(), "recorded")  # trial 0 of every search


def run_search(
    objective: Objective,
    *,
    trials: int,
    sampler: str = "auto",
    seed: int = 0,
    out: Path,
    trace_digest: str,
    trace: str = "",
    on_trial: Callable[[Trial], None] | None = None,
    timeout_s: float | None = None,
) -> SearchResult:
    """Price plans and keep the best.

    A folder that holds a search of the same trace, sampler and seed is continued: the sampler is driven from the beginning
    again, and is answered from the journal as far as that goes. So a search that was cut short ends as if it had not been, and
    one that is asked for more trials goes on. Ctrl-C ends the search after the trial in progress, a second one at once; either
    way it can be continued.

    Parameters
    ----------
    trials
        How many plans to price, the recorded setting included; at least 1.
    sampler
        One of `dpro_search.search.samplers.SAMPLERS`.
    out
        The run folder.
    trace_digest, trace
        What the objective was made from: a digest of its content, and where it lies.
    on_trial
        Called after each finished trial, those of an earlier search included.
    timeout_s
        End after this time with what was found by then (at least the recorded setting).

    Raises
    ------
    InputError
        The folder belongs to another search, or there is nothing to search.
    MissingCapabilityError
        The disk cannot take the results.
    """
    started_s = time.monotonic()
    if trials < 1:
        raise InputError(f"--trials must be at least 1, not {trials}")
    if not objective.tensors:
        raise InputError(f"{trace or 'trace'}: no tensor is communicated, so there is nothing to search; record a distributed job")
    chooser = make_sampler(sampler, objective.tensors, objective.recorded, seed)
    info = RunInfo(
        sampler=sampler,
        seed=seed,
        trace=trace,
        trace_digest=trace_digest,
        recorded=objective.recorded,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )
    open_run(out, info)
    finished: list[Trial] = []
    stopped: Literal["finished", "timeout", "interrupted"] = "finished"
    with _deferred_interrupt() as interrupted:
        with Journal(out / "trials.jsonl") as journal:
            for trial in _trials(CachedObjective(objective), chooser, journal):
                finished.append(trial)
                if on_trial is not None:
                    on_trial(trial)
                if len(finished) == trials:
                    break
                if interrupted.is_set():
                    stopped = "interrupted"
                    break
                if timeout_s is not None and time.monotonic() - started_s > timeout_s:
                    stopped = "timeout"
                    break
        baseline = finished[0].prediction
        result = SearchResult(
            run=str(out),
            trials=len(finished),
            seconds=time.monotonic() - started_s,
            stopped=stopped,
            baseline=baseline,
            plans=rank_plans(finished, baseline),
        )
        result.save()
    return result


def _trials(objective: CachedObjective, sampler: Sampler, journal: Journal) -> Iterator[Trial]:
    """Finished trials without end, first the recorded setting. What the journal knows is not priced again."""
    number = 0
    while True:
        proposal = sampler.ask() if number else RECORDED
        if number < len(journal.trials):
            trial = journal.trials[number]
            if (trial.plan, trial.origin) != proposal:
                raise InputError(
                    f"{journal.path}: line {number + 1} is not what this version of the program and of Optuna would have tried;"
                    " choose another --out"
                )
            objective.remember(trial.plan, trial.prediction)
        else:
            prediction = objective.predict(proposal.plan)
            trial = Trial(number=number, origin=proposal.origin, plan=proposal.plan, prediction=prediction)
            journal.append(trial)
        if number:
            sampler.tell(proposal, trial.prediction)
        else:
            sampler.observe(proposal.plan, trial.prediction)
        yield trial
        number += 1


@contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Within the block the first Ctrl-C only sets the event, and the second is a `KeyboardInterrupt` (in the main thread)."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return

    def note(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, earlier)
        requested.set()

    earlier = signal.signal(signal.SIGINT, note)
    try:
        yield requested
    finally:
        signal.signal(signal.SIGINT, earlier)
