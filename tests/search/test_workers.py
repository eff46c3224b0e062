"""Several plans of one sampler at a time: what is found depends on the seed and the window, not on who is slow, late or killed.

Searches with workers have several samplers where that is of use (see `test_islands.py`); what workers promise holds for both kinds.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from pathlib import Path

import numpy as np
import pytest
from bus_objective import BusObjective, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.errors import InputError, MissingCapabilityError
from dpro_search.search import Trial, run_search
from dpro_search.search.evaluation import Evaluations, Losses
from dpro_search.search.run_folder import Journal
from dpro_search.search.samplers import SAMPLERS, SEEDLESS, sampler_for
from dpro_search.search.trials import journaled, own_trials
from dpro_search.search.workers import ProcessEvaluator
from dpro_search.space.plan import Plan, Prediction

HERE = Path(__file__).parent
OBJECTIVE = BusObjective(tensors_of([40_000] * 8))


class ShuffledPricer:
    """Ends plans in a random order, and forgets how far it was now and then, as if a worker had been killed."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.evaluated: list[Plan] = []
        self._rng = rng
        self._waiting: list[Plan] = []

    def submit(self, plan: Plan) -> None:
        self._waiting.append(plan)

    def done(self) -> tuple[Plan, Prediction]:
        plan = self._waiting.pop(int(self._rng.integers(len(self._waiting))))
        self.evaluated.append(plan)
        return plan, OBJECTIVE.predict(plan)


def driven(journal: Path, sampler: str, trials: int, window: int, order: int) -> tuple[list[Trial], list[Plan]]:
    """Trials of a search whose results come in some order, and the evaluated plans."""
    evaluator = ShuffledPricer(np.random.default_rng(order))
    chooser = sampler_for(OBJECTIVE.space, sampler, 5, OBJECTIVE)
    with Journal(journal) as book:
        return list(journaled(own_trials(Evaluations(evaluator), chooser, book, trials, window), book)), evaluator.evaluated


def search(out: Path, *, trials: int = 40, workers: int = 2, sampler: str = "mcmc") -> bytes:
    run_search(OBJECTIVE, trials=trials, sampler=sampler, seed=5, out=out, trace_digest="bus", workers=workers)
    return (out / "trials.jsonl").read_bytes()


@functools.cache
def undisturbed(sampler: str) -> bytes:
    """The journal of a search with two workers, of which none was lost."""
    with tempfile.TemporaryDirectory() as folder:
        return search(Path(folder) / "whole", workers=2, trials=200, sampler=sampler)


def search_process(run: Path, trials: int, workers: int, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / "killed_search.py"), str(run), str(trials), str(workers)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])} | environment,
        timeout=60,
    )


@pytest.mark.parametrize("sampler", SAMPLERS)
@given(window=st.integers(1, 9), orders=st.tuples(st.integers(0, 99), st.integers(0, 99)))
@settings(max_examples=6, deadline=None)
def test_the_order_in_which_prices_come_changes_nothing(sampler: str, window: int, orders: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (one, evaluated), (other, _) = (driven(Path(folder) / f"{n}.jsonl", sampler, 40, window, o) for n, o in enumerate(orders))
        assert one == other
        assert [trial.number for trial in one] == list(range(40))
        assert len(evaluated) == len(set(evaluated)), "a plan was evaluated twice"


@pytest.mark.parametrize("sampler", SAMPLERS)
@given(kills=st.lists(st.tuples(st.integers(0, 40), st.booleans(), st.integers(1, 9)), min_size=1, max_size=4))
@settings(max_examples=8, deadline=None)
def test_however_often_a_search_is_killed_every_trial_is_there_once(sampler: str, kills: list[tuple[int, bool, int]]) -> None:
    """Killed after some trials, perhaps in the middle of a line; continued with another number of workers each time."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "trials.jsonl"
        finished: list[Trial] = []
        for trials, torn, window in [*kills, (40, False, 3)]:
            evaluated_trials, evaluated = driven(journal, sampler, trials, window, order=trials)
            assert evaluated_trials[: len(finished)] == finished[: len(evaluated_trials)], "a finished trial was lost"
            assert not set(evaluated) & {trial.plan for trial in finished}, "a finished trial was evaluated again"
            if torn:
                raw = journal.read_bytes()
                journal.write_bytes(raw[: max(len(raw) - 30, 0)])
            with Journal(journal) as book:
                finished = book.trials
        assert [trial.number for trial in finished] == list(range(40))


@given(st.integers(1, 9))
@settings(max_examples=9, deadline=None)
def test_a_proposal_knows_of_all_trials_but_those_on_their_way(window: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trials, _ = driven(Path(folder) / "trials.jsonl", "mcmc", 30, window, 0)
    for trial in trials:
        known = trial.number if trial.told is None else trial.told
        assert known == max(min(trial.number, 1), trial.number - window + 1)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_rarely_asks_for_a_plan_that_is_on_its_way(sampler: str, tmp_path: Path) -> None:
    trials, _ = driven(tmp_path / "trials.jsonl", sampler, 100, 8, 0)
    assert len({trial.plan for trial in trials}) > 90


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_several_at_a_time_find_good_plans_too(sampler: str, tmp_path: Path) -> None:
    alone, _ = driven(tmp_path / "alone.jsonl", sampler, 150, 1, 0)
    together, _ = driven(tmp_path / "together.jsonl", sampler, 150, 8, 0)
    assert best_us(together) <= 1.03 * best_us(alone)


@pytest.mark.parametrize("sampler", sorted(SEEDLESS))
def test_processes_find_what_one_process_would(sampler: str, tmp_path: Path) -> None:
    in_processes = search(tmp_path / "run", workers=2, sampler=sampler)
    driven(tmp_path / "trials.jsonl", sampler, 40, window=4, order=0)
    assert in_processes == (tmp_path / "trials.jsonl").read_bytes()


def test_a_run_may_go_on_with_more_or_fewer_workers(tmp_path: Path) -> None:
    for trials, workers in ((10, 1), (25, 3), (40, 2)):
        raw = search(tmp_path / "run", trials=trials, workers=workers)
        assert raw.count(b"\n") == trials


def test_a_run_is_continued_when_its_workers_were_killed(tmp_path: Path) -> None:
    killed = search_process(tmp_path / "killed", 60, 3, KILL_WORKER="8", SAMPLER="critical-path")
    assert killed.returncode == 1, "all three end at their eighth plan"
    ended = "all 3 worker processes have ended .the last: killed by signal 9.|2 workers were lost while evaluating one plan"
    assert re.search(ended, killed.stderr), "the second where one plan was the eighth of two"
    continued, whole = (search(tmp_path / name, trials=60, workers=3, sampler="critical-path") for name in ("killed", "whole"))
    assert continued == whole


def test_the_search_goes_on_with_the_workers_that_are_left(tmp_path: Path) -> None:
    losses = Losses()
    with closing(ProcessEvaluator(OBJECTIVE, 2, losses)) as evaluator:
        evaluations = Evaluations(evaluator)
        plans = [Plan.of(cycle_time_us=1000.0 + i) for i in range(30)]
        for plan in plans[:10]:
            evaluations.request(plan)
        evaluations.wait(plans[3])
        killed = evaluator.pids[0]
        os.kill(killed, signal.SIGKILL)
        for plan in plans[10:]:
            evaluations.request(plan)
        assert [evaluations.wait(plan) for plan in plans] == [OBJECTIVE.predict(plan) for plan in plans]
        assert losses.workers == 1
        assert killed not in evaluator.pids


def test_no_worker_is_left_behind(tmp_path: Path) -> None:
    with closing(ProcessEvaluator(OBJECTIVE, 2, Losses())) as evaluator:
        pids = evaluator.pids
    assert not any(alive(pid) for pid in pids)


def test_a_killed_search_takes_its_workers_along_and_can_be_continued_at_once(tmp_path: Path) -> None:
    first = search_process(tmp_path / "cut", 60, 2, KILL_SEARCH="30")
    assert first.returncode == -signal.SIGKILL
    continued, whole = (search(tmp_path / name, trials=60) for name in ("cut", "whole"))
    assert continued == whole


class Fragile(BusObjective):
    """One plan ends the process that evaluates it; another is refused."""

    def predict(self, plan: Plan) -> Prediction:
        if plan.get("cycle_time_us") == 666.0:
            os.kill(os.getpid(), signal.SIGKILL)
        if plan.get("cycle_time_us") == 777.0:
            raise InputError("plan: no such tensor")
        if plan.get("cycle_time_us") == 888.0:
            raise ZeroDivisionError("division by zero")
        return super().predict(plan)


@pytest.mark.parametrize(
    ("cycle_us", "error", "message"),
    [
        (666.0, MissingCapabilityError, r'2 workers were lost while evaluating one plan .*"cycle_time_us": 666.0'),
        (777.0, InputError, "plan: no such tensor"),
        (888.0, RuntimeError, "ZeroDivisionError"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_said_here(cycle_us: float, error: type[Exception], message: str) -> None:
    with closing(ProcessEvaluator(Fragile(OBJECTIVE.tensors), 4, Losses())) as evaluator:
        evaluations = Evaluations(evaluator)
        plan = Plan.of(cycle_time_us=cycle_us)
        with pytest.raises(error, match=message) as raised:
            wait_for(evaluations, plan)
    assert "\n" not in str(raised.value) or error is RuntimeError


def wait_for(evaluations: Evaluations, plan: Plan) -> None:
    evaluations.request(plan)
    evaluations.wait(plan)


@dataclass(frozen=True)
class Mortal(BusObjective):
    """Ends the worker that makes one of the evaluations `kills`, counted over all processes; a plan ends one worker at most."""

    kills: tuple[int, ...] = ()
    made: Synchronized[int] = field(default_factory=lambda: multiprocessing.Value("q", 0))
    fatal: SynchronizedArray[int] = field(default_factory=lambda: multiprocessing.Array("q", 8))  # hashes of plans

    def predict(self, plan: Plan) -> Prediction:
        with self.made.get_lock():
            self.made.value += 1
            ended = [seen for seen in self.fatal if seen]
            dies = len(ended) < len(self.kills) and self.made.value >= self.kills[len(ended)] and hash(plan) not in ended
            if dies:
                self.fatal[len(ended)] = hash(plan)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().predict(plan)


@pytest.mark.parametrize(("sampler", "kills"), [("mcmc", (10, 40, 70, 100, 160)), ("critical-path", (10,))])
def test_workers_lost_at_work_are_counted_and_change_nothing(sampler: str, kills: tuple[int, ...], tmp_path: Path) -> None:
    """Workers with a sampler each are replaced; of those that evaluate for one sampler, the others take over the plans."""
    result = run_search(
        Mortal(OBJECTIVE.tensors, kills=kills),
        trials=200,
        sampler=sampler,
        seed=5,
        out=tmp_path / "run",
        trace_digest="bus",
        workers=2,
    )
    assert result.workers_lost == len(kills)
    assert (tmp_path / "run" / "trials.jsonl").read_bytes() == undisturbed(sampler)


@pytest.mark.parametrize(("sampler", "kills"), [("mcmc", (10, 40, 70, 100, 160)), ("critical-path", (10,))])
def test_workers_killed_at_any_point_change_nothing(sampler: str, kills: tuple[int, ...], tmp_path: Path) -> None:
    """They may be at work, between two evaluations, or done: then no worker is lost."""

    def kill_one(trial: Trial) -> None:
        workers = multiprocessing.active_children()
        if trial.number in kills and workers:
            workers[0].kill()

    result = run_search(
        OBJECTIVE, trials=200, sampler=sampler, seed=5, out=tmp_path / "run", trace_digest="bus", workers=2, on_trial=kill_one
    )
    assert result.workers_lost <= len(kills)
    assert (tmp_path / "run" / "trials.jsonl").read_bytes() == undisturbed(sampler)


def best_us(trials: list[Trial]) -> float:
    return min(trial.prediction.iteration_us for trial in trials)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_journal_that_was_told_too_much_is_refused(tmp_path: Path) -> None:
    driven(tmp_path / "trials.jsonl", "mcmc", 10, 4, 0)
    path = tmp_path / "trials.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"told":5', b'"told":9'))
    with pytest.raises(InputError, match=r"line 9 is not what"):
        driven(path, "mcmc", 10, 4, 0)
