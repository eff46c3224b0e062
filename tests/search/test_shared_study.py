"""Searches that share a storage see the same trials, each plan once, whoever does what when."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from bus_objective import BusObjective, KnobObjective, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.errors import InputError, MissingCapabilityError
from dpro_search.search import SearchResult, Trial, run_search
from dpro_search.search.evaluation import Evaluations, InlineEvaluator
from dpro_search.search.run_folder import locked_run, read_run
from dpro_search.search.samplers import SAMPLERS, Proposal, sampler_for
from dpro_search.search.shared_study import SharedStudy, without_password
from dpro_search.search.trials import shared_trials
from dpro_search.space.plan import Plan

OBJECTIVE = BusObjective(tensors_of([40_000] * 8))


def url_of(folder: Path, kind: str = "journal") -> str:
    return f"{kind}:///{folder / 'study'}"


def driven(study: SharedStudy, sampler: str, seed: int, trials: int, window: int = 1) -> Iterator[Trial]:
    chooser = sampler_for(OBJECTIVE.space, sampler, seed, OBJECTIVE)
    return shared_trials(Evaluations(InlineEvaluator(OBJECTIVE)), chooser, study, trials, window)


def rows(url: str, name: str) -> list[optuna.trial.FrozenTrial]:
    backend = optuna.storages.journal.JournalFileBackend(url.removeprefix("journal:///"))
    return optuna.load_study(study_name=name, storage=optuna.storages.JournalStorage(backend)).trials


def states(url: str) -> list[str]:
    return [row.state.name for row in rows(url, "s")]


@given(steps=st.lists(st.integers(0, 2), max_size=60), windows=st.tuples(*[st.integers(1, 4)] * 3))
@settings(max_examples=10, deadline=None)
def test_however_searches_interleave_or_die_each_plan_counts_once(steps: list[int], windows: tuple[int, int, int]) -> None:
    """In each step one of three searches runs its next trial; one without further steps was killed. The last one finishes."""
    with tempfile.TemporaryDirectory() as folder:
        url = url_of(Path(folder))
        searches = [driven(SharedStudy(url, "s", f"run{i}"), "mcmc", i, 40, windows[i]) for i in range(3)]
        for step in steps:
            next(searches[step], None)
        for search in searches:
            search.close()
        with SharedStudy(url, "s", "the last") as study:
            evaluated_trials = list(driven(study, "mcmc", 3, 40))
        assert [trial.number for trial in evaluated_trials] == list(range(40))
        assert len({trial.plan for trial in evaluated_trials}) == 40
        assert all(trial.prediction == OBJECTIVE.predict(trial.plan) for trial in evaluated_trials)
        everywhere = SharedStudy(url, "s", "a reader").news()
        assert [trial for trial, _ in everywhere][:40] == evaluated_trials
        assert states(url).count("COMPLETE") == len(everywhere)


def test_of_two_searches_with_one_plan_the_first_to_write_counts(tmp_path: Path) -> None:
    url, plan = url_of(tmp_path), Plan.of(cycle_time_us=2000.0)
    first, second = (SharedStudy(url, "s", name) for name in ("first", "second"))
    prediction = OBJECTIVE.predict(plan)
    assert [news.own for news in first.add(Proposal(plan, "mcmc"), prediction)] == [True]
    assert [news.own for news in second.add(Proposal(plan, "optuna"), prediction)] == [False]
    assert len(first) == len(second) == 1
    assert states(url) == ["COMPLETE", "FAIL"]


def test_a_search_killed_between_row_and_state_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, plan = url_of(tmp_path), Plan.of(cycle_time_us=2000.0)
    killed = SharedStudy(url, "s", "killed")
    with monkeypatch.context() as cut:
        cut.setattr(SharedStudy, "_settle", lambda *_: None)
        killed.add(Proposal(plan, "mcmc"), OBJECTIVE.predict(plan))
    assert states(url) == ["RUNNING"]
    with SharedStudy(url, "s", "other") as other:
        assert [trial.plan for trial, _ in other.news()] == [plan]
    assert states(url) == ["COMPLETE"]


@pytest.mark.parametrize("kind", ["journal", "sqlite"])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_same_command_continues_and_prices_nothing_again(kind: str, workers: int, tmp_path: Path) -> None:
    url = url_of(tmp_path, kind)

    def search(trials: int, run: str) -> bytes:
        run_search(OBJECTIVE, trials=trials, sampler="mcmc", out=tmp_path / run, trace_digest="bus", storage=url, workers=workers)
        return (tmp_path / run / "trials.jsonl").read_bytes()

    short, long = search(15, "one"), search(30, "one")
    assert long.startswith(short)
    assert search(30, "two") == long, "a search that joins later finds the trials there"
    assert search(30, "one") == long
    assert long.count(b"\n") == 30


def test_a_shorter_search_keeps_what_the_storage_has(tmp_path: Path) -> None:
    def search(trials: int) -> SearchResult:
        url = url_of(tmp_path)
        return run_search(OBJECTIVE, trials=trials, sampler="mcmc", out=tmp_path / "run", trace_digest="bus", storage=url)

    whole = search(40)
    before = (tmp_path / "run" / "trials.jsonl").read_bytes()
    short = search(10)
    assert (short.trials, short.plans) == (whole.trials, whole.plans)
    assert (tmp_path / "run" / "trials.jsonl").read_bytes() == before


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A folder with the study of a search of 60 trials, and the best time that it found, in microseconds."""
    folder = tmp_path_factory.mktemp("begun")
    trials = list(driven(SharedStudy(url_of(folder), "s", "first"), "auto", 0, 60))
    return folder, min(trial.prediction.iteration_us for trial in trials)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_others_found_is_built_upon(sampler: str, begun: tuple[Path, float], tmp_path: Path) -> None:
    folder, best_us = begun
    copy = shutil.copytree(folder, tmp_path / "copy")
    joined = list(driven(SharedStudy(url_of(copy), "s", "second"), sampler, 1, 80))
    assert len(joined) == 80
    assert min(trial.prediction.iteration_us for trial in joined) <= best_us


def test_a_search_without_further_plans_ends_and_says_so(tmp_path: Path) -> None:
    one_knob = KnobObjective()
    result = run_search(
        one_knob, trials=10_000, sampler="mcmc", out=tmp_path / "run", trace_digest="knob", storage=url_of(tmp_path)
    )
    assert result.stopped == "exhausted"
    assert result.trials > 20


def test_a_row_of_somebody_else_is_named(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    SharedStudy(url, "s", "run")
    backend = optuna.storages.journal.JournalFileBackend(url.removeprefix("journal:///"))
    optuna.load_study(study_name="s", storage=optuna.storages.JournalStorage(backend)).ask()
    with pytest.raises(InputError, match="trial 0 of study 's' was not written by this program"):
        SharedStudy(url, "s", "run").news()


def test_a_run_belongs_to_its_storage(tmp_path: Path) -> None:
    def search(storage: str | None) -> None:
        run_search(OBJECTIVE, trials=2, out=tmp_path / "run", trace_digest="bus", storage=storage)

    search(url_of(tmp_path))
    assert read_run(tmp_path / "run").storage == url_of(tmp_path)
    with pytest.raises(InputError, match="give the same --storage or choose another --out"):
        search(None)
    with locked_run(tmp_path / "run"), pytest.raises(InputError, match="another search is writing it"):
        search(url_of(tmp_path))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me@host/db?password=secret&sslmode=require", "postgresql://me@host/db?sslmode=require"),
    ],
)
def test_a_password_is_neither_kept_nor_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("nonsense", InputError, "not an address"),
        ("oracle9://host/db", InputError, "no such kind of storage"),
        ("journal://host/file", InputError, "three slashes"),
        ("mysql+pymysql_is_not_here://host/db", InputError, "no such kind of storage"),
        ("mysql+mysqlconnector://host/db", MissingCapabilityError, "its Python package is not installed"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_line(url: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        SharedStudy(url, "s", "run")
    assert "\n" not in str(raised.value)


def test_numbers_are_the_same_for_all() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = url_of(Path(folder))
        one, two = (SharedStudy(url, "s", name) for name in "ab")
        plans = [Plan.of(cycle_time_us=1000.0 + i) for i in (0, 1, 0, 2, 1, 3)]
        for study, plan in zip(itertools.cycle((one, two)), plans, strict=False):
            study.add(Proposal(plan, "mcmc"), OBJECTIVE.predict(plan))
        numbers = [(t.number, t.plan.get("cycle_time_us")) for t, _ in SharedStudy(url, "s", "c").news()]
        assert numbers == [(0, 1000.0), (1, 1001.0), (2, 1002.0), (3, 1003.0)]
