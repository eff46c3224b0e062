"""Several samplers of a search: what they find depends on the seed and their number, not on where they run or who is killed."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import pytest
from bus_objective import DEFAULT_SETTINGS, BusObjective, KnobObjective, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_workers import ShuffledPricer

from dpro_search.errors import DproSearchError, InputError, MissingCapabilityError
from dpro_search.replay.exchanges import Exchange
from dpro_search.search import Objective, SearchResult, Trial, run_search
from dpro_search.search.evaluation import Evaluations, InlineEvaluator
from dpro_search.search.islands import ROUND, Island, Result, islands_trials
from dpro_search.search.run_folder import Journal, line_of, read_run
from dpro_search.search.samplers import SAMPLERS, SEEDLESS, Proposal, Sampler, sampler_for
from dpro_search.search.trials import journaled, recorded_trial
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import horovod_space

OBJECTIVE = BusObjective(tensors_of([40_000] * 8))
SPACE = horovod_space(OBJECTIVE.tensors, OBJECTIVE.recorded)
SHARED = sorted(set(SAMPLERS) - SEEDLESS)
TRIALS = 5 * ROUND  # two islands hear of each other


def driven(journal: Path, sampler: str, islands: int, *, trials: int = TRIALS, order: int = 0) -> tuple[list[Trial], list[Plan]]:
    """Trials of islands in this process, whose results come in some order, and the evaluated plans."""
    evaluator = ShuffledPricer(np.random.default_rng(order))
    with Journal(journal) as book:
        known, first = book.trials, recorded_trial(OBJECTIVE.predict(Plan()), book)
        later = islands_trials(
            Evaluations(evaluator),
            {n: Island(sampler_for(SPACE, sampler, (5, n), OBJECTIVE, island=n), first.prediction) for n in range(islands)},
            lambda number: known[number] if number < len(known) else None,
            book,
            trials,
            count=islands,
            await_round=lambda _: book.flush(),
        )
        return list(journaled(chain([first], later), book)), evaluator.evaluated


@functools.cache
def uninterrupted(sampler: str) -> tuple[list[Trial], bytes]:
    """Trials of two islands in this process that nobody stopped, and the bytes of their journal."""
    with tempfile.TemporaryDirectory() as folder:
        trials, _ = driven(Path(folder) / "whole", sampler, islands=2)
        return trials, (Path(folder) / "whole").read_bytes()


def search(
    out: Path, *, workers: int, trials: int = TRIALS, sampler: str = "mcmc", objective: Objective = OBJECTIVE
) -> tuple[SearchResult, bytes]:
    result = run_search(objective, trials=trials, sampler=sampler, seed=5, out=out, trace_digest="bus", workers=workers)
    return result, (out / "trials.jsonl").read_bytes()


def prediction_of(iteration_us: float) -> Prediction:
    return Prediction(
        iteration_us=iteration_us,
        interval_us=(iteration_us, iteration_us),
        breakdown_us={},
        peak_memory_bytes=None,
        source="extrapolated",
    )


def trial(number: int, iteration_us: float) -> Trial:
    return Trial(number=number, origin="mcmc", plan=Plan.of(cycle_time_us=float(number)), prediction=prediction_of(iteration_us))


@pytest.mark.parametrize("sampler", SHARED)
@given(islands=st.integers(2, 3), orders=st.tuples(st.integers(0, 99), st.integers(0, 99)))
@settings(max_examples=2, deadline=None)
def test_the_order_in_which_prices_come_changes_nothing(sampler: str, islands: int, orders: tuple[int, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (one, evaluated), (other, _) = (driven(Path(folder) / f"{n}", sampler, islands, order=o) for n, o in enumerate(orders))
    assert one == other
    assert [trial.number for trial in one] == list(range(TRIALS))
    assert len(evaluated) == len(set(evaluated)), "a plan was evaluated twice"


@pytest.mark.parametrize("sampler", SHARED)
def test_processes_find_what_islands_in_one_process_find(sampler: str, tmp_path: Path) -> None:
    result, in_processes = search(tmp_path / "run", workers=2, sampler=sampler)
    assert in_processes == uninterrupted(sampler)[1]
    assert (result.trials, result.workers_lost) == (TRIALS, 0)


@pytest.mark.parametrize("sampler", SHARED)
@given(cuts=st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.integers(2, TRIALS)), min_size=1, max_size=3))
@settings(max_examples=2, deadline=None)
def test_a_search_that_was_cut_anywhere_ends_as_if_it_had_not_been(sampler: str, cuts: list[tuple[float, bool, int]]) -> None:
    """Anywhere in a round, perhaps in the middle of a line; fewer trials are requested in between."""
    whole, raw = uninterrupted(sampler)
    with tempfile.TemporaryDirectory() as folder:
        cut = Path(folder) / "cut"
        cut.write_bytes(raw)
        for kept, torn, trials in cuts:
            end = int(kept * len(cut.read_bytes()))
            left = raw[: end if torn else raw.rfind(b"\n", 0, end) + 1]
            cut.write_bytes(left)
            evaluated_trials, evaluated = driven(cut, sampler, islands=2, trials=trials)
            assert evaluated_trials == whole[:trials]
            assert not set(evaluated) & {trial.plan for trial in whole[1 : left.count(b"\n")]}, "a trial was evaluated again"
        assert driven(cut, sampler, islands=2)[0] == whole
        assert cut.read_bytes() == raw


@pytest.mark.parametrize("workers", [(3, 2, 1), (2, 1, 4)])
def test_a_run_goes_on_with_any_number_of_workers_as_it_was_begun(workers: tuple[int, ...], tmp_path: Path) -> None:
    _, whole = search(tmp_path / "whole", workers=workers[0])
    for number, count in enumerate(workers, start=1):
        _, raw = search(tmp_path / "run", workers=count, trials=TRIALS * number // len(workers))
        assert whole.startswith(raw)
    assert raw == whole
    assert read_run(tmp_path / "run").islands == workers[0]


def test_a_run_that_was_begun_with_one_sampler_keeps_it(tmp_path: Path) -> None:
    for trials, workers in ((10, 1), (40, 2)):
        _, raw = search(tmp_path / "run", workers=workers, trials=trials)
        assert raw.count(b"\n") == trials
    assert read_run(tmp_path / "run").islands == 1


def test_there_may_be_more_workers_than_trials(tmp_path: Path) -> None:
    for trials in (1, 3, 40):
        result, raw = search(tmp_path / "run", workers=6, trials=trials)
        assert (result.trials, raw.count(b"\n")) == (trials, trials)


def test_the_result_is_that_of_its_journal(tmp_path: Path) -> None:
    """Plans are read from lines when they are looked at; ties and doubles are ranked as ever."""
    result, _ = search(tmp_path / "run", workers=2)
    again, _ = search(tmp_path / "run", workers=1)
    assert (result.plans, result.front, result.baseline) == (again.plans, again.front, again.baseline)


def test_before_a_round_an_island_reads_what_the_others_evaluated_in_the_round_before_the_last(tmp_path: Path) -> None:
    """One of two islands runs here; the trials of the other are in the journal as they are announced."""
    trials, rounds, others = 6 * ROUND + 2, list[int](), list[list[float]]()

    class Hearing(Island):
        def hear(self, results: Sequence[Result]) -> None:
            others.append([result.prediction.iteration_us for result in results])
            super().hear(results)

    with Journal(tmp_path / "trials.jsonl") as book:
        book.append(recorded_trial(prediction_of(1e6), book))
        for number in range(1, trials):
            book.append(trial(number, 1e6 - number))
        book.flush()
        sampler = Listed(*(1e4 + number for number in range(trials)))
        island_trials = islands_trials(
            Evaluations(InlineEvaluator(OBJECTIVE)),
            {1: Hearing(sampler, prediction_of(1e6))},
            lambda number: None,
            book,
            trials,
            count=2,
            await_round=rounds.append,
        )
        finished = [one.number for one in island_trials]
    assert finished == list(range(2, trials, 2))
    assert rounds == [0, 1]
    assert others == [[1e6 - (1 + 2 * place) for place in range(begun, begun + ROUND)] for begun in (0, ROUND)]


@pytest.mark.parametrize("islands", [0, 10**9])
def test_a_run_of_an_impossible_number_of_samplers_is_refused(islands: int, tmp_path: Path) -> None:
    search(tmp_path / "run", workers=2, trials=5)
    path = tmp_path / "run" / "run.json"
    path.write_bytes(path.read_bytes().replace(b'"islands": 2', b'"islands": %d' % islands))
    with pytest.raises(InputError, match="damaged"):
        search(tmp_path / "run", workers=2, trials=5)


def test_a_journal_that_the_islands_would_not_have_written_is_refused(tmp_path: Path) -> None:
    search(tmp_path / "run", workers=2, trials=20)
    path = tmp_path / "run" / "trials.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:7], line_of(trial(7, 1000.0)), *lines[8:]]))
    with pytest.raises(InputError, match=r"line 8 is not what"):
        search(tmp_path / "run", workers=2, trials=20)


class Listed(Sampler):
    """Proposes the plans of a list, and stores the results that it receives."""

    name = "listed"

    def __init__(self, *cycles_us: float) -> None:
        super().__init__(SPACE, np.random.default_rng(0))
        self.left = [Plan.of(cycle_time_us=us) for us in cycles_us]
        self.told: list[float] = []
        self.observed: list[float] = []

    def ask(self) -> Proposal:
        return Proposal(self.left.pop(0), self.name)

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        self.told.append(prediction.iteration_us)

    def observe(self, plan: Plan, prediction: Prediction) -> None:
        self.observed.append(prediction.iteration_us)


def receive(island: Island, number: int, iteration_us: float) -> None:
    """Results of the other island's first round: one trial of a given time, and slow ones."""
    trials = [trial(other, iteration_us if other == number else 5000.0) for other in range(1, 2 * ROUND, 2)]
    island.hear([msgspec.json.decode(line_of(one), type=Result) for one in trials])


def test_what_another_island_has_had_priced_costs_no_trial() -> None:
    sampler = Listed(3.0, 4.0, 3.0)
    island = Island(sampler, prediction_of(2000.0))
    receive(island, number=3, iteration_us=1500.0)
    proposal = island.ask()
    assert (proposal.plan.get("cycle_time_us"), sampler.told) == (4.0, [1500.0]), "3.0 was known"
    island.tell(proposal, prediction_of(1700.0))
    again = island.ask()
    assert again.plan.get("cycle_time_us") == 3.0, "a second proposal is a trial, so that a sampler without new plans ends"
    assert island.known[again.plan].iteration_us == 1500.0, "but it is not evaluated again"


def test_an_island_is_shown_what_is_better_than_all_it_knows() -> None:
    sampler = Listed(4.0)
    island = Island(sampler, prediction_of(2000.0))
    receive(island, number=3, iteration_us=2100.0)
    receive(island, number=3, iteration_us=1500.0)
    receive(island, number=5, iteration_us=1600.0)
    assert sampler.observed == [2000.0, 1500.0], "the recorded setting, and what beat it"


def test_islands_that_want_the_same_find_more_than_one_would(tmp_path: Path) -> None:
    """A job with few plans, which every sampler proposes: they are not all evaluated twice."""
    search(tmp_path / "run", workers=2, trials=6 * ROUND, sampler="auto", objective=KnobObjective())
    with Journal(tmp_path / "run" / "trials.jsonl") as journal:
        plans = [trial.plan for trial in journal.trials]
    search(tmp_path / "alone", workers=1, trials=6 * ROUND, sampler="auto", objective=KnobObjective())
    with Journal(tmp_path / "alone" / "trials.jsonl") as journal:
        alone = [trial.plan for trial in journal.trials]
    assert len(set(plans)) >= 0.8 * len(set(alone))


@pytest.mark.parametrize("sampler", SHARED)
def test_islands_find_good_plans_too(sampler: str, tmp_path: Path) -> None:
    alone, _ = search(tmp_path / "alone", workers=1, trials=150, sampler=sampler)
    together, _ = search(tmp_path / "together", workers=4, trials=150, sampler=sampler)
    assert together.plans[0].prediction.iteration_us <= 1.03 * alone.plans[0].prediction.iteration_us


SEARCH = os.getpid()


class Mortal(BusObjective):
    """A plan with exact groups ends the process that evaluates it."""

    def predict(self, plan: Plan) -> Prediction:
        if plan.tensor_groups is not None:
            self.end()
        return super().predict(plan)

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class MortalGuide(BusObjective):
    """The per-collective timeline, which a sampler requests, ends the worker."""

    def predict(self, plan: Plan) -> Prediction:
        return prediction_of(1000.0)

    def exchanges(self, plan: Plan) -> tuple[Exchange, ...]:
        if os.getpid() != SEARCH:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().exchanges(plan)


class Refusing(Mortal):
    def end(self) -> None:
        raise InputError("plan: no such tensor")


class Broken(Mortal):
    def end(self) -> None:
        raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (Mortal, MissingCapabilityError, r'2 workers were lost while evaluating one plan .*"tensor_groups":'),
        (MortalGuide, MissingCapabilityError, r"ended one after the other before a trial was finished .*killed by signal 9"),
        (Refusing, InputError, "plan: no such tensor"),
        (Broken, RuntimeError, "ZeroDivisionError"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_said_here(
    kind: Callable[..., BusObjective], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as raised:
        search(tmp_path / "run", workers=2, objective=kind(OBJECTIVE.tensors, DEFAULT_SETTINGS))
    assert "\n" not in str(raised.value) or not issubclass(error, DproSearchError)
