"""The search itself, from the options to the result; resumable at any point."""

from __future__ import annotations

import gc
import hashlib
import math
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal, Protocol, cast, get_args

import msgspec
import numpy as np

from dpro_search._regular_files import open_regular
from dpro_search._version import __version__
from dpro_search.collect._files import write_file
from dpro_search.errors import InputError
from dpro_search.search.evaluation import Evaluations, Evaluator, InlineEvaluator
from dpro_search.search.island_processes import IslandProcesses
from dpro_search.search.islands import Island, islands_trials
from dpro_search.search.objective import Objective, Ranked, explaining_of, ranked_of, reevaluator_of, sampled_of
from dpro_search.search.result import (
    OnReevaluated,
    SearchResult,
    Stopped,
    by_quantile,
    explained,
    pareto_front,
    rank_plans,
    reevaluated_plans,
    sampled_us,
)
from dpro_search.search.run_folder import MOST_ISLANDS, Journal, RunInfo, SearchedCluster, Trial, line_of, locked_run, open_run
from dpro_search.search.samplers import SEEDLESS, Guide, sampler_for
from dpro_search.search.trials import RECORDED, journaled, own_trials, recorded_trial, shared_trials
from dpro_search.search.workers import ProcessEvaluator
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import PlanSpace

if TYPE_CHECKING:
    from dpro_search.search.shared_study import SharedStudy

Engine = Literal["local", "ray"]
_SETTLED_EVERY = 16  # trials between two checks of the stopping criterion
_SETTLED_FROM = 64  # feasible trials


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
    on_reevaluated: OnReevaluated | None = None,
    timeout_s: float | None = None,
    workers: int = 1,
    engine: Engine = "local",
    storage: str | None = None,
    options: Mapping[str, str] | None = None,
    cluster: SearchedCluster | None = None,
    until_settled: bool = False,
    quantile: float | None = None,
) -> SearchResult:
    """Evaluate plans and keep the best.

    A folder with a search of the same trace, sampler and seed is continued: the sampler proposes from the beginning, and receives
    the results of the journal. So an interrupted search finds what it would have found without the interruption, and a search can
    be continued with more trials, and with any number of workers. Ctrl-C ends the search after the current trial, a second one at
    once; in both cases it can be continued. All trials of the folder count for the result, also those that a shorter search does
    not reach.

    With several local workers a new search has as many samplers, which share the trials and exchange results after rounds (see
    `islands.py`). One sampler remains if its first plans do not depend on its seed, if the workers are tasks of a cluster, or if
    the folder was begun with one. Then workers evaluate a window of twice as many plans, and the sampler receives results in the
    order of its proposals. In both cases the plans found depend on the seed and on the initial number of workers, not on the
    speed or the end of workers.

    With a storage, searches on several machines share the trials. Each has a sampler of its own, which receives better plans of
    other searches. They end when they have the requested trials together. The plans found then depend on timing.

    Parameters
    ----------
    trials
        How many plans to evaluate, the recorded setting included; at least 1. None are evaluated if the folder has as many. With a
        storage: of all searches that share it.
    sampler
        One of `dpro_search.search.samplers.SAMPLERS`.
    out
        The run folder.
    trace_digest, trace
        The trace of the objective: the digest of its content, and its path.
    on_trial
        Called after each finished trial, also of an earlier search and of other searches.
    on_reevaluated
        Called after each plan that the objective re-evaluates at the end (`Reevaluator`), first the recorded setting, with the
        number of plans done, and of all, and the new prediction.
    timeout_s
        End after this time with the trials finished by then (at least the recorded setting).
    workers, engine
        How many plans are evaluated at a time: "local", by processes on this machine; "ray", by tasks of a running Ray cluster. A
        folder may be continued with any number of either.
    storage
        An address that `SharedStudy` knows; None: the journal in the run folder.
    options
        What predictions depend on beside the trace, by name: a folder with other options belongs to another search.
    cluster
        Where the objective's predictions hold, which the folder keeps; the options name it as well. None: on the recorded cluster.
    until_settled
        End when the expected further gain is below the prediction error (see `is_settled`).
    quantile
        Re-rank the listed plans by this quantile of their iteration times over resampled durations; None: by the predicted
        iteration time.

    Raises
    ------
    InputError
        The folder belongs to another search, or there is nothing to search.
    MissingCapabilityError
        The disk cannot take the results, the storage cannot be reached, or no worker is left.
    """
    started_s = time.monotonic()
    _check(objective, trials, workers, engine, trace)
    if quantile is not None:
        _check_quantile(objective, quantile)
    space, guide = objective.space, guide_of(objective)
    ranked = ranked_of(objective) if sampler == "auto" else None
    chooser = sampler_for(space, sampler, seed, guide, ranked=ranked)
    info = RunInfo(
        sampler=sampler,
        seed=seed,
        trace=trace,
        trace_digest=trace_digest,
        recorded=objective.recorded,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        storage=None if storage is None else _without_password(storage),
        id=uuid.uuid4().hex,
        options=dict(options or {}),
        cluster=cluster,
        islands=_islands_of(sampler, workers, engine, storage, ranked),
        asks_first=True,
    )
    info = open_run(out, info)
    if not info.asks_first:
        space = space.asking_first(())
        chooser = sampler_for(space, sampler, seed, guide, ranked=ranked)

    def island(number: int, recorded: Prediction) -> Island:
        return Island(sampler_for(space, sampler, (seed, number), guide, island=number), recorded)

    window = 1 if workers == 1 else 2 * workers
    book = out / "trials.jsonl"
    earlier = _lines_of(book)
    finished_trials: Iterator[Trial]
    known: Sequence[Trial]  # trials of the folder or the storage, which an earlier end of this search does not lose
    with frozen_heap(), _deferred_interrupt() as interrupted:
        with ExitStack() as stack:
            pool: WorkerPool
            if storage is None and info.islands > 1:
                pool, finished_trials, known = _by_islands(stack, objective, island, out, trials, info.islands, workers, engine)
            elif storage is None:
                pool, evaluations = _evaluation(stack, objective, workers, engine)
                journal = stack.enter_context(Journal(book))
                finished_trials = journaled(own_trials(evaluations, chooser, journal, trials, window), journal)
                known = journal.trials
            else:
                pool, evaluations = _evaluation(stack, objective, workers, engine)
                stack.enter_context(locked_run(out))
                local_sampler = sampler_for(space, sampler, (seed, int(info.id, 16)), guide, ranked=ranked)
                study = stack.enter_context(_shared_study(storage, info, space))
                finished_trials, known = shared_trials(evaluations, local_sampler, study, trials, window), study.trials
            deadline_s = math.inf if timeout_s is None else started_s + timeout_s
            counted = None if storage is None else max(trials, earlier)  # others may store more than all of them are to have
            ends = _Ends(trials=trials, deadline_s=deadline_s, until_settled=until_settled, interrupted=interrupted)
            finished, stopped = _until(ends, finished_trials, on_trial)
            if stopped == "exhausted" and ranked is not None:
                stopped = "complete"
            most = len(known) if counted is None else min(counted, len(known))
            finished += [known[number] for number in range(len(finished), most)]
            result = _result(str(out), objective, finished, stopped, pool.lost, quantile, started_s, on_reevaluated)
        if storage is not None:
            write_file(book, b"".join(map(line_of, finished)))
        result.save()
    return result


def _lines_of(journal: Path) -> int:
    if not journal.is_file():
        return 0
    with open_regular(journal) as file:
        return sum(1 for _ in file)


def _check(objective: Objective, trials: int, workers: int, engine: Engine, trace: str) -> None:
    """Raise `InputError` for arguments with which no search is possible."""
    if trials < 1:
        raise InputError(f"--trials must be at least 1, not {trials}")
    if workers < 1:
        raise InputError(f"--workers must be at least 1, not {workers}")
    if engine not in get_args(Engine):
        raise InputError(f"--engine {engine} is unknown (known: {', '.join(get_args(Engine))})")
    if not objective.tensors:
        raise InputError(f"{trace or 'trace'}: no tensor is communicated, so there is nothing to search; record a distributed job")


def _check_quantile(objective: Objective, quantile: float) -> None:
    """Raise `InputError` before a search if the quantile is out of range, or the objective cannot resample durations."""
    if not 0 < quantile < 1:
        raise InputError(f"--quantile must be between 0 and 1, not {quantile}")
    sampled_of(objective).sampled(Plan(), samples=1)


@dataclass(frozen=True, kw_only=True)
class _Ends:
    """When a search ends; options as those of `run_search`."""

    trials: int
    deadline_s: float  # of the monotonic clock
    until_settled: bool
    interrupted: threading.Event

    def reached(self, finished: Sequence[Trial]) -> Stopped | None:
        """The first criterion that holds after these trials; None: none."""
        if len(finished) == self.trials:
            return "finished"
        if self.interrupted.is_set():
            return "interrupted"
        if self.until_settled and len(finished) % _SETTLED_EVERY == 0 and is_settled(finished):
            return "settled"
        return "timeout" if time.monotonic() > self.deadline_s else None


def expected_gain(costs_us: Sequence[float]) -> float:
    """Expected gain of as many further trials as the later half of these, relative to the best: the gain of that half.

    The gain per trial falls in the course of a search, so the gain of the later half is an upper bound.
    """
    half = len(costs_us) // 2
    best = min(costs_us)
    return (min(costs_us[:half]) - best) / best


def is_settled(trials: Sequence[Trial]) -> bool:
    """Whether the expected further gain is below the prediction error: half the width of the best plan's interval."""
    feasible = [trial.prediction for trial in trials if trial.prediction.infeasible is None]
    if len(feasible) < _SETTLED_FROM:
        return False
    best = min(feasible, key=lambda prediction: prediction.iteration_us)
    low, high = best.interval_us
    return expected_gain([prediction.iteration_us for prediction in feasible]) < (high - low) / 2 / best.iteration_us


def _until(ends: _Ends, trials: Iterable[Trial], on_trial: Callable[[Trial], None] | None) -> tuple[list[Trial], Stopped]:
    """The trials until the end of a search, and why it ended."""
    finished: list[Trial] = []
    for trial in trials:
        finished.append(trial)
        if on_trial is not None:
            on_trial(trial)
        if (stopped := ends.reached(finished)) is not None:
            return finished, stopped
    return finished, "exhausted"


def _result(
    run: str,
    objective: Objective,
    finished: Sequence[Trial],
    stopped: Stopped,
    workers_lost: int,
    quantile: float | None,
    started_s: float,
    on_reevaluated: OnReevaluated | None,
) -> SearchResult:
    baseline = finished[0].prediction
    explaining = explaining_of(objective)
    plans, shares = rank_plans(finished, baseline, None if explaining is None else explaining.family), np.zeros((0, 0))
    if (reevaluator := reevaluator_of(objective)) is not None:
        baseline, plans = reevaluated_plans(plans, reevaluator, on_reevaluated)
    if quantile is not None:
        times_us = sampled_us(sampled_of(objective), [*(ranked.plan for ranked in plans), Plan()])
        plans, shares = by_quantile(plans, times_us, quantile)
    front = pareto_front(finished, baseline)
    if explaining is not None:
        plans, front = explained(plans, explaining), explained(front, explaining)
    return SearchResult(
        run=run,
        trials=len(finished),
        seconds=time.monotonic() - started_s,
        stopped=stopped,
        baseline=baseline,
        plans=plans,
        workers_lost=workers_lost,
        front=front,
        beats=tuple(tuple(row) for row in shares.tolist()),
    )


def guide_of(objective: Objective) -> Guide | None:
    """The objective as a guide of samplers, if it has a per-collective timeline; else None."""
    guides = callable(getattr(objective, "exchanges", None)) and getattr(objective, "guides", True)
    return cast("Guide", objective) if guides else None


class WorkerPool(Protocol):
    """Workers that evaluate plans."""

    @property
    def lost(self) -> int:
        """Workers that ended too early; others took over their work."""


def _islands_of(sampler: str, workers: int, engine: Engine, storage: str | None, ranked: Ranked | None) -> int:
    """How many samplers a new search has."""
    alone = engine != "local" or storage is not None or sampler in SEEDLESS or ranked is not None
    return 1 if alone else min(workers, MOST_ISLANDS)


def _by_islands(
    stack: ExitStack,
    objective: Objective,
    make: Callable[[int, Prediction], Island],
    out: Path,
    trials: int,
    islands: int,
    workers: int,
    engine: Engine,
) -> tuple[WorkerPool, Iterator[Trial], Sequence[Trial]]:
    """All trials of a search by several samplers, and those that the journal has already.

    The samplers are in processes of their own, or here if there is one worker or another engine.
    """
    in_processes = workers > 1 and engine == "local"
    evaluator, evaluations = _evaluation(stack, objective, 1 if in_processes else workers, engine)
    evaluations.request(RECORDED.plan)
    recorded = evaluations.wait(RECORDED.plan)  # here, because that compiles the replay once for all processes
    journal = stack.enter_context(Journal(out / "trials.jsonl"))
    known, first = journal.trials, recorded_trial(recorded, journal)

    def made(number: int) -> Island:
        return make(number, first.prediction)

    if in_processes:
        pool = stack.enter_context(IslandProcesses(objective, made, journal, trials, islands=islands, workers=workers))
        return pool, journaled(chain([first], pool.trials()), journal), known
    later = islands_trials(
        evaluations,
        {number: made(number) for number in range(islands)},
        lambda number: known[number] if number < len(known) else None,
        journal,
        trials,
        count=islands,
        await_round=lambda _: journal.flush(),
    )
    return evaluator, journaled(chain([first], later), journal), known


def _evaluation(stack: ExitStack, objective: Objective, workers: int, engine: Engine) -> tuple[Evaluator, Evaluations]:
    """The evaluator of a search. Call it before the journal is opened, because a worker must not inherit the journal's lock."""
    if workers == 1 and engine == "local":
        evaluator: Evaluator = InlineEvaluator(objective)
        return evaluator, Evaluations(evaluator)
    recorded = objective.predict(RECORDED.plan)  # here, because that compiles the replay once for all processes
    if engine == "ray":
        from dpro_search.search.ray_tasks import RayEvaluator

        evaluator = stack.enter_context(RayEvaluator(objective, workers))
    else:
        evaluator = stack.enter_context(ProcessEvaluator(objective, workers))
    evaluations = Evaluations(evaluator)
    evaluations.remember(RECORDED.plan, recorded)
    return evaluator, evaluations


def _shared_study(storage: str, info: RunInfo, space: PlanSpace) -> SharedStudy:
    """The study of all searches with one trace, seed, set of options and version: their predictions are equal."""
    from dpro_search.search.shared_study import SharedStudy

    name = f"dpro-search-{__version__}-{info.trace_digest[:16]}-seed{info.seed}"
    if info.options:
        name += "-" + hashlib.sha256(msgspec.json.encode(sorted(info.options.items()))).hexdigest()[:16]
    return SharedStudy(storage, name, info.id, space)


def _without_password(storage: str) -> str:
    from dpro_search.search.shared_study import without_password

    return without_password(storage)


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


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Within the block, full collections skip the objects that existed at its beginning (`gc.freeze`).

    A trace, a compiled replay and the libraries are a few 100,000 objects. A full collection takes as long as some hundred
    trials, and writes to every object, which copies every page that a search shares with its workers. If the caller has frozen
    objects already, nothing is done.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
