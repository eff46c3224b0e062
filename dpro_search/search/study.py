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
from contextlib import ExitStack, closing, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal, cast, get_args

import msgspec
import numpy as np

from dpro_search._regular_files import open_regular
from dpro_search._version import __version__
from dpro_search.collect._files import write_file
from dpro_search.errors import InputError
from dpro_search.search.evaluation import Evaluations, InlineEvaluator, Losses, WorkerEvaluator
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
from dpro_search.search.samplers import SEEDLESS, Guide, Sampler, sampler_for
from dpro_search.search.trials import RECORDED, journaled, own_trials, recorded_trial, shared_trials
from dpro_search.search.workers import ProcessEvaluator
from dpro_search.space.plan import Plan
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
    _check(objective, trials, workers, engine, trace, quantile)
    ranked = ranked_of(objective) if sampler == "auto" else None
    search = _Search(objective, objective.space, sampler, seed, ranked, trials=trials, out=out, workers=workers, engine=engine)
    search.sampler(seed, ranked=ranked)  # a sampler that cannot be made is refused before the folder is made
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
        islands=1 if storage is not None else search.islands_of_new_run(),
        asks_first=True,
    )
    info = open_run(out, info)
    if not info.asks_first:
        search.space = search.space.asking_first(())
    earlier = _lines_of(search.journal)  # trials that the folder listed
    with frozen_heap(), _deferred_interrupt() as interrupted:
        deadline_s = math.inf if timeout_s is None else started_s + timeout_s
        ends = _Ends(trials=trials, deadline_s=deadline_s, until_settled=until_settled, interrupted=interrupted)
        with ExitStack() as stack:
            if storage is not None:
                finished_trials, known = search.shared_trials(stack, storage, info)
            elif info.islands > 1:
                finished_trials, known = search.island_trials(stack, info.islands)
            else:
                finished_trials, known = search.own_trials(stack)
            finished, stopped = _until(ends, finished_trials, on_trial)
            if stopped == "exhausted" and ranked is not None and not getattr(ranked, "estimates", False):
                stopped = "complete"
            listed = len(known) if storage is None else min(len(known), max(trials, earlier))  # others may store more
            finished += [known[number] for number in range(len(finished), listed)]
            result = _result(str(out), objective, finished, stopped, search.losses.workers, quantile, started_s, on_reevaluated)
        if storage is not None:
            write_file(search.journal, b"".join(map(line_of, finished)))
        result.save()
    return result


def _lines_of(journal: Path) -> int:
    if not journal.is_file():
        return 0
    with open_regular(journal) as file:
        return sum(1 for _ in file)


def _check(objective: Objective, trials: int, workers: int, engine: Engine, trace: str, quantile: float | None) -> None:
    """Raise `InputError` for arguments with which no search is possible."""
    if trials < 1:
        raise InputError(f"--trials must be at least 1, not {trials}")
    if workers < 1:
        raise InputError(f"--workers must be at least 1, not {workers}")
    if engine not in get_args(Engine):
        raise InputError(f"--engine {engine} is unknown (known: {', '.join(get_args(Engine))})")
    if not objective.tensors and ranked_of(objective) is None:
        raise InputError(f"{trace or 'trace'}: no tensor is communicated, so there is nothing to search; record a distributed job")
    if quantile is not None:
        if not 0 < quantile < 1:
            raise InputError(f"--quantile must be between 0 and 1, not {quantile}")
        sampled_of(objective).sampled(Plan(), samples=1)  # raises if durations cannot be resampled


Trials = tuple[Iterator[Trial], Sequence[Trial]]


@dataclass
class _Search:
    """The three sources of trials of a search; options as those of `run_search`.

    `own_trials`, `island_trials` and `shared_trials` are the loops of a search. Each returns the finished trials in order, and the
    trials that the folder or the storage has, which an earlier end of this search does not lose. What they open is closed with the
    stack.
    """

    objective: Objective
    space: PlanSpace
    sampler_name: str
    seed: int
    ranked: Ranked | None
    _: KW_ONLY
    trials: int
    out: Path
    workers: int
    engine: Engine
    losses: Losses = field(default_factory=Losses)

    @property
    def journal(self) -> Path:
        """The file of the trials."""
        return self.out / "trials.jsonl"

    @property
    def window(self) -> int:
        """How many plans are evaluated at a time for one sampler."""
        return 1 if self.workers == 1 else 2 * self.workers

    def sampler(self, seed: int | tuple[int, int], *, island: int = 0, ranked: Ranked | None = None) -> Sampler:
        """A sampler of this search."""
        return sampler_for(self.space, self.sampler_name, seed, guide_of(self.objective), island=island, ranked=ranked)

    def islands_of_new_run(self) -> int:
        """How many samplers a new search without a storage has."""
        has_one = self.engine != "local" or self.sampler_name in SEEDLESS or self.ranked is not None
        return 1 if has_one else min(self.workers, MOST_ISLANDS)

    def own_trials(self, stack: ExitStack) -> Trials:
        """Trials of one sampler."""
        evaluations = self._evaluations(stack, self.workers)
        journal = stack.enter_context(Journal(self.journal))
        sampler = self.sampler(self.seed, ranked=self.ranked)
        return journaled(own_trials(evaluations, sampler, journal, self.trials, self.window), journal), journal.trials

    def island_trials(self, stack: ExitStack, islands: int) -> Trials:
        """Trials of several samplers. They are in processes of their own, or here if there is one worker or another engine."""
        in_processes = self.workers > 1 and self.engine == "local"
        evaluations = self._evaluations(stack, 1 if in_processes else self.workers)
        evaluations.request(RECORDED.plan)
        recorded = evaluations.wait(RECORDED.plan)  # here, because that compiles the replay once for all processes
        journal = stack.enter_context(Journal(self.journal))
        known, first = journal.trials, recorded_trial(recorded, journal)

        def island(number: int) -> Island:
            return Island(self.sampler((self.seed, number), island=number), first.prediction)

        if in_processes:
            processes = IslandProcesses(
                self.objective, island, journal, self.trials, islands=islands, workers=self.workers, losses=self.losses
            )
            later = stack.enter_context(closing(processes)).trials()
        else:
            later = islands_trials(
                evaluations,
                {number: island(number) for number in range(islands)},
                lambda number: known[number] if number < len(known) else None,
                journal,
                self.trials,
                count=islands,
                await_round=lambda _: journal.flush(),
            )
        return journaled(chain([first], later), journal), known

    def shared_trials(self, stack: ExitStack, storage: str, info: RunInfo) -> Trials:
        """Trials of all searches that share a storage, each with one sampler."""
        evaluations = self._evaluations(stack, self.workers)
        stack.enter_context(locked_run(self.out))
        sampler = self.sampler((self.seed, int(info.id, 16)))
        study = stack.enter_context(_shared_study(storage, info, self.space))
        return shared_trials(evaluations, sampler, study, self.trials, self.window), study.trials

    def _evaluations(self, stack: ExitStack, workers: int) -> Evaluations:
        """Evaluations here or by workers. Call it before the journal is opened: a worker must not inherit the journal's lock."""
        if workers == 1 and self.engine == "local":
            return Evaluations(InlineEvaluator(self.objective))
        recorded = self.objective.predict(RECORDED.plan)  # here, because that compiles the replay once for all processes
        evaluator: WorkerEvaluator
        if self.engine == "ray":
            from dpro_search.search.ray_tasks import RayEvaluator

            evaluator = RayEvaluator(self.objective, workers, self.losses)
        else:
            evaluator = ProcessEvaluator(self.objective, workers, self.losses)
        evaluations = Evaluations(stack.enter_context(closing(evaluator)))
        evaluations.remember(RECORDED.plan, recorded)
        return evaluations


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
