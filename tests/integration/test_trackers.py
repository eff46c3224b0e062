"""A search in the experiment trackers that people use, read back by the trackers' own libraries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import dpro_search
from dpro_search.search import SearchResult
from tests.kinds.verbs import outcome, printed, refusal, verb

for package in ("mlflow", "wandb", "tensorboard"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install 'dpro-search[{package}]'")

pytestmark = [pytest.mark.integration, pytest.mark.one_core]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracked") / "mine"
    dpro_search.load().search(trials=4, sampler="mcmc", out=folder)
    us = SearchResult.load(folder).plans[0].prediction.iteration_us
    for factor in (1.1, 1.2):
        verb("measured", folder, "--plan", 1, "--step-time", f"{us * factor:.0f}us", "--memory", "1GiB")
    return folder


@pytest.mark.parametrize("store", ["sqlite:///{}/mlflow.db", "file://{}/mlruns"])
def test_mlflow_has_a_run_for_each_plan_below_that_of_the_search(run, tmp_path, monkeypatch, store):
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = store.format(tmp_path)
    assert "tracked: MLflow" in printed("report", run, "--out", tmp_path / "page.html", "--to", f"mlflow:{uri}")
    client, result = MlflowClient(uri), SearchResult.load(run)
    experiment = client.get_experiment_by_name("dpro-search")
    runs = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    assert runs.keys() == {"mine", *(f"plan-{number}" for number in range(len(result.plans) + 1))}
    plan, parent = runs["plan-1"], runs["mine"]
    assert plan.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert plan.data.params == {name: str(value) for name, value in result.plans[0].plan.settings.items()}
    us = result.plans[0].prediction.iteration_us
    assert plan.data.metrics["predicted_step_time_s"] == pytest.approx(us / 1e6)
    measured = [1.1 * us / 1e6, 1.2 * us / 1e6]
    history = client.get_metric_history(plan.info.run_id, "measured_step_time_s")
    assert [one.value for one in sorted(history, key=lambda one: one.step)] == pytest.approx(measured, rel=1e-4)
    assert [each.path for each in client.list_artifacts(parent.info.run_id)] == ["page.html"]
    assert "measured_step_time_s" not in runs["plan-0"].data.metrics


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of a file in the log format of LevelDB, which W&B's files are after a header of 7 bytes: blocks of 32 KiB, parts of
    records with checksum, length and kind (whole, first, middle, last)."""
    position, record = 7, b""
    while position + 7 <= len(data):
        left = 2**15 - position % 2**15
        if left < 7:
            position += left
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):
            yield record
            record = b""


def test_wandb_writes_offline_runs(run, tmp_path, monkeypatch):
    from wandb.proto import wandb_internal_pb2

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    verb("report", run, "--out", tmp_path / "page.html", "--to", "wandb:speed")
    names, metrics, artefacts = set(), set(), set()
    for path in tmp_path.glob("wandb/offline-run-*/*.wandb"):
        for data in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                assert (record.run.project, record.run.run_group) == ("speed", "mine")
                names.add(record.run.display_name)
            metrics |= {item.key or "/".join(item.nested_key) for item in record.history.item}
            artefacts |= {record.request.log_artifact.artifact.name, record.artifact.name}
    result = SearchResult.load(run)
    assert names == {f"mine-plan-{number}" for number in range(len(result.plans) + 1)}
    assert {"predicted_step_time_s", "measured_step_time_s", "measured_memory_gib"} <= metrics
    assert "mine-report" in artefacts


def test_tensorboard_reads_the_event_files_back(run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    answer = verb("report", run, "--out", tmp_path / "page.html", "--to", f"tensorboard:{tmp_path / 'board'}")
    assert answer["tracked"] == [f"TensorBoard, {tmp_path / 'board/mine'}; tensorboard --logdir {tmp_path / 'board'}"]
    events = EventAccumulator(str(tmp_path / "board/mine/plan-1"))
    events.Reload()
    us = SearchResult.load(run).plans[0].prediction.iteration_us
    measured = [1.1 * us / 1e6, 1.2 * us / 1e6]
    assert [one.value for one in events.Scalars("measured_step_time_s")] == pytest.approx(measured, rel=1e-4)
    assert events.Scalars("predicted_step_time_s")[0].value == pytest.approx(us / 1e6)
    assert "hparams" in events.PluginTagToContent("hparams").popitem()[0]
    assert (tmp_path / "board/mine/report.html").read_text().startswith("<!DOCTYPE html>")


def test_a_tracker_that_does_not_take_the_run_is_one_line(run, tmp_path):
    place = tmp_path / "file"
    place.write_text("")
    status, _, error = outcome("report", run, "--out", tmp_path / "page.html", "--to", f"tensorboard:{place}")
    assert status == 1
    assert "the tracker did not take the run" in error
    assert len(error.strip().splitlines()) == 1


def test_an_unknown_tracker_is_refused(run, tmp_path):
    assert "known are mlflow, wandb, tensorboard" in refusal("report", run, "--out", tmp_path / "p.html", "--to", "excel:x")
