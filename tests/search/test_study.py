"""A search can be stopped anywhere and continued, ends the same, and writes only what is whole."""

from __future__ import annotations

import csv
import functools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from bus_objective import BusObjective, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.errors import InputError
from dpro_search.search import SearchResult, Trial, run_search
from dpro_search.search.result import rank_plans
from dpro_search.search.run_folder import Journal, line_of
from dpro_search.search.samplers import SAMPLERS
from dpro_search.space.plan import Plan, Prediction

HERE = Path(__file__).parent
OBJECTIVE = BusObjective(tensors_of([40_000] * 8))


class CountedObjective(BusObjective):
    """Counts in a list, because the class is frozen."""

    calls: list[Plan] = []  # noqa: RUF012

    def predict(self, plan: Plan) -> Prediction:
        self.calls.append(plan)
        return super().predict(plan)


def search(out: Path, *, trials: int = 40, sampler: str = "mcmc", seed: int = 5, digest: str = "bus") -> SearchResult:
    return run_search(OBJECTIVE, trials=trials, sampler=sampler, seed=seed, out=out, trace_digest=digest)


Outcome = tuple[bytes, dict[str, bytes], list[dict[str, str]]]


def outcome(run: Path) -> Outcome:
    """Everything that a search leaves, but for its folder's name, the clock, and columns of settings that no plan has."""
    plans = {path.name: path.read_bytes() for path in sorted((run / "plans").iterdir())}
    with (run / "topn.csv").open(newline="") as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    return (run / "trials.jsonl").read_bytes(), plans, rows


@functools.cache
def uninterrupted(sampler: str) -> Outcome:
    """The files of a search that nobody stopped; it is reproducible, so that all examples of a test may share them."""
    with tempfile.TemporaryDirectory() as folder:
        search(Path(folder) / "whole", sampler=sampler)
        return outcome(Path(folder) / "whole")


@pytest.fixture(scope="module")
def begun_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of searches of one trial, one for each sampler."""
    runs = tmp_path_factory.mktemp("begun")
    for sampler in SAMPLERS:
        search(runs / sampler, sampler=sampler, trials=1)
    return runs


def prediction_of(iteration_us: float, half_width: float = 0.01, **fields: bool) -> Prediction:
    return Prediction(
        iteration_us=iteration_us,
        interval_us=(iteration_us * (1 - half_width), iteration_us * (1 + half_width)),
        breakdown_us={},
        peak_memory_bytes=None,
        source="extrapolated",
        **fields,
    )


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_search_is_reproducible(sampler: str, tmp_path: Path) -> None:
    search(tmp_path / "again", sampler=sampler)
    assert outcome(tmp_path / "again") == uninterrupted(sampler)


@pytest.mark.parametrize("sampler", SAMPLERS)
@given(kept=st.floats(0, 1), tear=st.booleans())
@settings(max_examples=8, deadline=None)
def test_resuming_after_any_prefix_equals_an_uninterrupted_search(begun_runs: Path, sampler: str, kept: float, tear: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cut = Path(shutil.copytree(begun_runs / sampler, Path(folder) / "cut"))
        raw, *_ = whole = uninterrupted(sampler)
        end = int(kept * len(raw))
        (cut / "trials.jsonl").write_bytes(raw[: end if tear else raw.rfind(b"\n", 0, end) + 1])
        search(cut, sampler=sampler)
        assert outcome(cut) == whole


def test_more_trials_continue_and_nothing_is_priced_twice(tmp_path: Path) -> None:
    search(tmp_path / "run", trials=15)
    CountedObjective.calls.clear()
    objective = CountedObjective(OBJECTIVE.tensors)
    run_search(objective, trials=40, sampler="mcmc", seed=5, out=tmp_path / "run", trace_digest="bus")
    assert len(objective.calls) <= 25
    assert outcome(tmp_path / "run") == uninterrupted("mcmc")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_shorter_search_keeps_what_the_folder_has(workers: int, tmp_path: Path) -> None:
    whole = run_search(OBJECTIVE, trials=40, sampler="mcmc", seed=5, out=tmp_path / "run", trace_digest="bus", workers=workers)
    before = outcome(tmp_path / "run")
    short = run_search(OBJECTIVE, trials=10, sampler="mcmc", seed=5, out=tmp_path / "run", trace_digest="bus", workers=workers)
    assert (short.trials, short.plans) == (40, whole.plans)
    assert outcome(tmp_path / "run") == before


def test_a_search_that_times_out_at_once_keeps_what_the_folder_has(tmp_path: Path) -> None:
    whole = search(tmp_path / "run")
    short = run_search(OBJECTIVE, trials=99, sampler="mcmc", seed=5, out=tmp_path / "run", trace_digest="bus", timeout_s=0.0)
    assert (short.stopped, short.trials, short.plans) == ("timeout", 40, whole.plans)


def test_the_recorded_setting_is_trial_0(tmp_path: Path) -> None:
    result = search(tmp_path / "run", trials=1)
    first = json.loads((tmp_path / "run" / "trials.jsonl").read_text())
    assert (first["number"], first["origin"], first["plan"]) == (0, "recorded", {})
    assert result.baseline == OBJECTIVE.predict(Plan())
    assert result.plans[0].plan == Plan()
    assert not result.gain_certain


def test_the_run_folder_says_everything(tmp_path: Path) -> None:
    result = search(tmp_path / "run")
    assert SearchResult.load(tmp_path / "run") == result
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["version"] == 2
    assert (info["sampler"], info["seed"], info["trace_digest"]) == ("mcmc", 5, "bus")
    assert info["recorded"] == msgspec.to_builtins(OBJECTIVE.recorded)
    with (tmp_path / "run" / "topn.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [float(row["predicted_iteration_us"]) for row in rows] == [r.prediction.iteration_us for r in result.plans]
    for row, ranked in zip(rows, result.plans, strict=True):
        assert Plan.load(tmp_path / "run" / row["file"]) == ranked.plan


def test_a_shorter_list_of_plans_leaves_no_old_file(tmp_path: Path) -> None:
    search(tmp_path / "run", trials=1)
    for number in (0, 7):  # 0: the best plan's number in folders of earlier versions
        (tmp_path / "run" / "plans" / f"plan-{number}.json").write_bytes(Plan.of(cycle_time_us=1.0).to_json())
    search(tmp_path / "run", trials=1)
    assert [path.name for path in (tmp_path / "run" / "plans").iterdir()] == ["plan-1.json"]


@pytest.mark.parametrize(
    ("change", "field"), [({"digest": "other"}, "trace"), ({"sampler": "optuna"}, "sampler"), ({"seed": 6}, "seed")]
)
def test_a_folder_of_another_search_is_refused(change: dict[str, object], field: str, tmp_path: Path) -> None:
    search(tmp_path / "run", trials=5)
    before = outcome(tmp_path / "run")
    with pytest.raises(InputError, match=f"another {field}") as refusal:
        search(tmp_path / "run", trials=5, **change)  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)
    assert outcome(tmp_path / "run") == before


def test_a_folder_that_is_no_run_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match="not a run folder"):
        search(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    search(tmp_path / "run", trials=5)
    journal = tmp_path / "run" / "trials.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], b"{]\n", *lines[3:]]))
    with pytest.raises(InputError, match=r"trials\.jsonl: line 3 is damaged"):
        search(tmp_path / "run", trials=5)


def test_a_journal_that_the_sampler_would_not_have_written_is_refused(tmp_path: Path) -> None:
    search(tmp_path / "run", trials=5)
    journal = tmp_path / "run" / "trials.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    strange = msgspec.structs.replace(msgspec.json.decode(lines[3], type=Trial), plan=Plan.of(cycle_time_us=777.0))
    journal.write_bytes(b"".join([*lines[:3], msgspec.json.encode(strange), b"\n", lines[4]]))
    with pytest.raises(InputError, match=r"line 4 is not what"):
        search(tmp_path / "run", trials=5)


def test_two_searches_cannot_write_one_folder(tmp_path: Path) -> None:
    search(tmp_path / "run", trials=5)
    with Journal(tmp_path / "run" / "trials.jsonl"), pytest.raises(InputError, match="another search is writing it"):
        search(tmp_path / "run", trials=5)


@pytest.mark.parametrize(("field", "value"), [("trials", 0), ("sampler", "grid")])
def test_wrong_usage_leaves_no_folder(field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=field):
        search(tmp_path / "run", **{field: value})  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_a_timeout_keeps_what_was_found(tmp_path: Path) -> None:
    result = run_search(OBJECTIVE, trials=10**9, sampler="mcmc", seed=5, out=tmp_path / "run", trace_digest="bus", timeout_s=0.0)
    assert result.stopped == "timeout"
    assert result.trials == 1


def test_ctrl_c_leaves_a_result_and_a_run_that_can_be_continued(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = search_process(run, 40, 12)
    assert first.stdout.split()[0] == "interrupted", first.stderr
    stopped_at = int(first.stdout.split()[1])
    assert stopped_at < 40
    assert SearchResult.load(run).trials == stopped_at
    assert search_process(run, 40).stdout.split() == ["finished", "40"]
    assert outcome(run) == uninterrupted("mcmc")


def test_a_full_disk_is_one_line_and_the_run_can_be_continued(tmp_path: Path) -> None:
    run = tmp_path / "run"
    search_process(run, 1)
    limit_bytes = (run / "trials.jsonl").stat().st_size + 1000
    full = search_process(run, 400, limit=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes)))
    assert full.returncode == 1
    assert full.stderr.count("\n") == 1
    assert "trials.jsonl: cannot be written (File too large); make room" in full.stderr
    assert search_process(run, 40).stdout.split() == ["finished", "40"]
    assert outcome(run) == uninterrupted("mcmc")


def test_near_ties_go_to_the_simpler_plan() -> None:
    grouped = Plan.of(tensor_groups=(("a",), ("b",)), cycle_time_us=2000.0)
    plans = [(Plan(), 2000.0), (grouped, 1000.0), (Plan.of(cycle_time_us=2000.0), 1009.0), (Plan.of(cycle_time_us=3000.0), 1020.0)]
    ranked = rank_plans(trials_of(plans), prediction_of(2000.0))
    assert [r.plan for r in ranked] == [Plan.of(cycle_time_us=2000.0), Plan.of(cycle_time_us=3000.0), Plan()]


@given(st.lists(st.floats(1.0, 1e7), min_size=1, max_size=60))
def test_listed_plans_are_distinct_and_sorted_and_the_first_is_best(times_us: list[float]) -> None:
    plans = [(Plan.of(cycle_time_us=float(i + 1)), time_us) for i, time_us in enumerate(times_us)]
    ranked = rank_plans(trials_of(plans), prediction_of(times_us[0]))
    listed_us = [r.prediction.iteration_us for r in ranked]
    assert listed_us == sorted(set(listed_us))
    assert listed_us[0] <= 1.01 * min(times_us)


@pytest.mark.parametrize(
    ("prediction", "certain"),
    [
        (prediction_of(900.0, 0.01), True),
        (prediction_of(985.0, 0.01), False),
        (prediction_of(900.0, 0.2), False),
        (prediction_of(900.0, 0.01, settled=False), False),
    ],
)
def test_a_gain_is_certain_when_the_intervals_are_apart(prediction: Prediction, certain: bool) -> None:
    trial = Trial(number=0, origin="mcmc", plan=Plan.of(cycle_time_us=2.0), prediction=prediction)
    assert rank_plans([trial], prediction_of(1000.0, 0.01))[0].gain_certain is certain


def trials_of(plans: list[tuple[Plan, float]]) -> list[Trial]:
    return [Trial(number=i, origin="mcmc", plan=plan, prediction=prediction_of(us)) for i, (plan, us) in enumerate(plans)]


def search_process(
    run: Path, trials: int, *interrupt_at: int, limit: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    root = HERE.parents[1]
    return subprocess.run(
        [sys.executable, str(HERE / "search_process.py"), str(run), str(trials), *map(str, interrupt_at)],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        env=os.environ | {"PYTHONPATH": str(root)},
        timeout=60,
    )


class JudgingObjective(BusObjective):
    """Knows, where it looks twice, that groups are worth less than they seem."""

    def reevaluated(self, plan: Plan) -> Prediction:
        prediction = self.predict(plan)
        share = 1.1 if plan.tensor_groups else 1.0
        return msgspec.structs.replace(prediction, iteration_us=prediction.iteration_us * share, interval_us=(0.0, 1e9))


def test_listed_plans_and_the_recorded_setting_are_judged_by_an_objective_that_can(tmp_path: Path) -> None:
    objective = JudgingObjective(OBJECTIVE.tensors)
    calls: list[tuple[int, int, Prediction]] = []
    result = run_search(
        objective,
        trials=60,
        sampler="mcmc",
        seed=5,
        out=tmp_path / "run",
        trace_digest="bus",
        on_reevaluated=lambda done, plans, found: calls.append((done, plans, found)),
    )
    assert [call[:2] for call in calls] == [(done, len(result.plans) + 1) for done in range(1, len(result.plans) + 2)]
    assert calls[0][2] == result.baseline
    assert min(found.iteration_us for _, _, found in calls[1:]) == result.plans[0].prediction.iteration_us
    plain = search(tmp_path / "plain", trials=60)
    assert {ranked.plan for ranked in result.plans} == {ranked.plan for ranked in plain.plans}
    assert [ranked.prediction for ranked in result.plans] == [objective.reevaluated(ranked.plan) for ranked in result.plans]
    assert result.baseline == objective.reevaluated(Plan())
    times_us = [ranked.prediction.iteration_us for ranked in result.plans]
    assert times_us == sorted(times_us)
    assert [ranked.speedup for ranked in result.plans] == [result.baseline.iteration_us / us for us in times_us]
    assert not result.gain_certain


def test_a_journal_is_opened_without_keeping_its_trials(tmp_path: Path) -> None:
    """Decoded, plans with many names take ten times as much memory as their lines."""
    groups = tuple((f"a_tensor_with_a_long_name.{number}#0",) for number in range(200))
    prediction = OBJECTIVE.predict(Plan())
    with (tmp_path / "trials.jsonl").open("wb") as file:
        for number in range(500):
            plan = Plan.of(tensor_groups=groups)
            file.write(line_of(Trial(number=number, origin="mcmc", plan=plan, prediction=prediction)))
    tracemalloc.start()
    with Journal(tmp_path / "trials.jsonl") as journal:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(journal.trials) == 500
        assert journal.trials[-1].number == 499
        assert [trial.number for trial in journal.trials[7:10]] == [7, 8, 9]
    assert peak_bytes < (tmp_path / "trials.jsonl").stat().st_size / 2
