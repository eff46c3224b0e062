"""Trials of a shared study have named parameters, so that Optuna's own tools can use them."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from bus_objective import BusObjective, tensors_of

from dpro_search.collect.sample import sample_trace_path
from dpro_search.collect.trace import CommSettings, Trace
from dpro_search.kinds import job_of, searchable
from dpro_search.search import run_search, shared_study
from dpro_search.search.shared_study import PlanParams
from dpro_search.space.plan import Plan
from dpro_search.space.transformations import PlanSpace

RECORDED = CommSettings(fusion_threshold_bytes=2**20, cycle_time_us=5_000.0)
OBJECTIVE = BusObjective(tensors_of([40_000] * 8), RECORDED)


def searched(folder: Path, kind: str, trials: int = 40, run: str = "run") -> bytes:
    storage = f"{kind}:///{folder / 'study'}"
    run_search(OBJECTIVE, trials=trials, sampler="mcmc", out=folder / run, trace_digest="bus", storage=storage)
    return (folder / run / "trials.jsonl").read_bytes()


def opened(folder: Path, kind: str) -> optuna.Study:
    if kind == "sqlite":
        storage: optuna.storages.BaseStorage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'study'}")
    else:
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "study")))
    (summary,) = optuna.get_all_study_summaries(storage)
    return optuna.load_study(study_name=summary.study_name, storage=storage)


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_optuna_ranks_the_importance_of_what_plans_change(kind: str, tmp_path: Path) -> None:
    searched(tmp_path, kind)
    study = opened(tmp_path, kind)
    names = set(OBJECTIVE.space.fields)
    assert all(set(trial.params) == set(trial.distributions) == names for trial in study.trials)
    importances = optuna.importance.get_param_importances(study, evaluator=optuna.importance.PedAnovaImportanceEvaluator())
    assert set(importances) == names


def test_parameters_are_the_plans_values_or_the_recorded_ones(tmp_path: Path) -> None:
    searched(tmp_path, "journal")
    first, *others = opened(tmp_path, "journal").trials
    assert first.params["fusion_threshold_bytes"] == RECORDED.fusion_threshold_bytes
    assert first.params["cycle_time_us"] == RECORDED.cycle_time_us
    assert first.params["tensor_groups"] == 0
    grouped = [trial for trial in others if trial.user_attrs["trial"]["plan"].get("tensor_groups")]
    assert grouped
    assert all(trial.params["tensor_groups"] == len(trial.user_attrs["trial"]["plan"]["tensor_groups"]) for trial in grouped)


def test_a_study_without_parameters_is_continued_with_equal_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions wrote none."""

    class Earlier(shared_study.SharedStudy):
        def __init__(self, url: str, name: str, run: str, space: PlanSpace | None = None) -> None:
            super().__init__(url, name, run)

    with monkeypatch.context() as before:
        before.setattr(shared_study, "SharedStudy", Earlier)
        short = searched(tmp_path, "sqlite", trials=15)
    assert searched(tmp_path, "sqlite").startswith(short)
    assert [bool(trial.params) for trial in opened(tmp_path, "sqlite").trials] == [False] * 15 + [True] * 25


@pytest.mark.parametrize("name", ["bert_kvstore_500mbit", "resnet50_2ranks_2gbit"])
def test_every_proposal_of_a_real_job_fits_the_parameters(name: str) -> None:
    space = searchable(job_of(Trace.load(sample_trace_path(name)))).space
    params = PlanParams(space)
    for plan in (Plan(), *space.starts(20)):
        values = params.of(plan)
        optuna.trial.create_trial(params=values, distributions=dict(params.distributions), value=1.0)
        shown = {name: value for name, value in plan.settings.items() if not isinstance(value, tuple)}
        assert shown.items() <= values.items()
