"""Run folders and plans that the first version wrote, before a `Plan` knew FSDP's switches, are loaded, used and continued.

``tests/data/run_v1.zip`` is what ``dpro-search run --trials 12 --sampler optuna --seed 3`` wrote of the bundled sample then.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import msgspec
import pytest

from dpro_search import load_run
from dpro_search.errors import InputError
from dpro_search.space.plan import Plan
from tests.faults.processes import fails_in_one_line, succeeds
from tests.sample import HOROVOD_SAMPLE, horovod_trace_path

ARCHIVE = Path(__file__).parents[1] / "data" / "run_v1.zip"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    return tmp_path / "run"


def test_its_plans_are_loaded(run: Path) -> None:
    result = load_run(run).result
    assert result.trials == 12
    for number, ranked in enumerate(result.plans):
        assert Plan.load(run / "plans" / f"plan-{number}.json") == ranked.plan


def test_a_plan_is_exported_and_replayed(run: Path, tmp_path: Path) -> None:
    succeeds("export", run, "--plan", 2, "--out", tmp_path / "tuned", "--target", "horovod")
    assert (tmp_path / "tuned" / "groups.json").is_file()
    result = json.loads((run / "result.json").read_text())
    replayed = json.loads(succeeds("replay", "--sample", HOROVOD_SAMPLE, "--plan", run / "plans" / "plan-1.json", "--json"))
    assert replayed["predicted_iteration_us"] == pytest.approx(result["plans"][1]["prediction"]["iteration_us"], rel=1e-9)


def test_it_is_reported_where_its_trace_is_named(run: Path, tmp_path: Path) -> None:
    succeeds("report", run, "--trace", horovod_trace_path(), "--out", tmp_path / "run.html")
    assert "12 trials" in (tmp_path / "run.html").read_text()


def test_it_is_continued_as_if_nothing_had_changed(run: Path) -> None:
    before = (run / "trials.jsonl").read_bytes()
    found = json.loads(
        succeeds("run", "--sample", HOROVOD_SAMPLE, "--trials", 14, "--sampler", "optuna", "--seed", 3, "--out", run, "--json")
    )
    assert found["trials"] == 14
    assert (run / "trials.jsonl").read_bytes().startswith(before)


def test_a_plan_of_a_later_version_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"version": 2, "cycle_time_us": 1000.0}')
    assert "plan version 2, this program reads 1" in fails_in_one_line(2, "replay", "--plan", tmp_path / "plan.json")


def test_a_run_of_a_later_version_is_one_line(run: Path) -> None:
    info = msgspec.json.decode((run / "run.json").read_bytes()) | {"version": 99}
    (run / "run.json").write_bytes(msgspec.json.encode(info))
    with pytest.raises(InputError, match=r"run\.json: version 99 of run folders, this program reads 1"):
        load_run(run)
