"""Run folders and plans that version 1 wrote, which had all settings as fields of a plan, are loaded, used and continued.

``tests/data/run_v1.zip`` is what ``dpro-search run --trials 12 --sampler optuna --seed 3`` wrote of the bundled sample then.
``runs_v1.zip`` has searches of the small jobs in ``tests/data`` (``--sampler mcmc --seed 3``): one of each scheme, one in a journal
that several searches share, and one with calibrated predictions (``calibration.json`` has made-up measurements).
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import msgspec
import pytest

from dpro_search import __version__, load, load_run
from dpro_search.errors import InputError
from dpro_search.search.calibration import Calibration
from dpro_search.search.run_folder import read_run
from dpro_search.space.plan import Plan
from dpro_search.space.schemes import BytepsSettings, DdpSettings, FsdpSettings, KvstoreSettings, SchemeSettings
from tests.every_case import every_case
from tests.in_process import fails_in_one_line, succeeds
from tests.sample import HOROVOD_SAMPLE, horovod_trace_path

DATA = Path(__file__).parents[1] / "data"
TRACES = {name: DATA / "traces_v1" / f"{name}_mlp" for name in ("ddp", "fsdp", "byteps")} | {"kvstore": DATA / "kvstore_mlp"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with zipfile.ZipFile(DATA / "run_v1.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path / "run"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    with zipfile.ZipFile(DATA / "runs_v1.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path / "runs"


@every_case(
    ("fields", "plan"),
    [
        ({"fusion_threshold_bytes": 0, "tensor_groups": [["a"]]}, Plan.of(fusion_threshold_bytes=0, tensor_groups=(("a",),))),
        ({"allreduce_algorithms": [[0, "ring"]]}, Plan.of(allreduce_algorithms=((0, "ring"),))),
        ({"bucket_cap_bytes": 9, "compression": "fp16"}, Plan.of(bucket_cap_bytes=9, compression="fp16")),
        ({"prefetch": True, "reshard_after_forward": False}, Plan.of(prefetch=True, reshard_after_forward=False)),
        ({"servers": 2, "bigarray_bound": 9, "p3": False}, Plan.of(servers=2, bigarray_bound=9, p3=False)),
        ({"servers": 2, "partition_bytes": 9, "credit": 0}, Plan.of(servers=2, partition_bytes=9, credit=0)),
        ({"servers": 2, "servers_on_workers": True}, Plan(servers=2, servers_on_workers=True)),
        ({"p3": True, "credit": None, "micro_batches": None}, Plan.of(p3=True)),
    ],
)
def test_a_plan_file_of_every_scheme_is_loaded(fields: dict[str, object], plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"version": 1, **fields}))
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("name", "scheme"), [("ddp", DdpSettings), ("fsdp", FsdpSettings), ("kvstore", KvstoreSettings), ("byteps", BytepsSettings)]
)
def test_a_search_of_every_scheme_is_continued(name: str, scheme: type[SchemeSettings], runs: Path, tmp_path: Path) -> None:
    folder, before = runs / name, (runs / name / "trials.jsonl").read_bytes()
    old = load_run(folder).result
    assert {type(ranked.plan.scheme) for ranked in old.plans} - {type(None)} == {scheme}
    assert [Plan.load(folder / "plans" / f"plan-{rank}.json") for rank in range(len(old.plans))] == [x.plan for x in old.plans]
    options = {"trials": 14, "sampler": "mcmc", "seed": 3, "allow_lossy": name == "kvstore"}
    searched_run = load(TRACES[name]).search(out=folder, **options)
    anew = load(TRACES[name]).search(out=tmp_path / "anew", **options)
    assert [(ranked.trial, ranked.plan) for ranked in searched_run.result.plans] == [(x.trial, x.plan) for x in anew.result.plans]
    assert (folder / "trials.jsonl").read_bytes().startswith(before)
    assert load_run(folder).result == searched_run.result
    assert read_run(folder).version == 2


def test_a_storage_is_shared_with_searches_of_version_1(runs: Path) -> None:
    """Old rows count, and new ones are as version 1 reads them."""
    log = runs / "study.log"
    log.write_text(log.read_text().replace("dpro-search-0.1.0-", f"dpro-search-{__version__}-"))  # versions share no study
    url = f"journal:///{log}"
    info = msgspec.json.decode((runs / "shared" / "run.json").read_bytes()) | {"storage": url}
    (runs / "shared" / "run.json").write_bytes(msgspec.json.encode(info))
    options = ("--sampler", "mcmc", "--seed", 3, "--storage", url, "--out", runs / "shared")
    facts = json.loads(succeeds("run", TRACES["byteps"], "--trials", 11, *options, "--json"))
    assert facts["trials"] == 11
    assert all({"scheme"}.isdisjoint(row["plan"]) for row in facts["plans"]), "settings side by side"
    rows = [json.loads(line).get("user_attrs", {}) for line in log.read_text().splitlines()]
    plans = [row["trial"]["plan"] for row in rows if "trial" in row]
    assert len(plans) == 11
    assert any(plan.keys() & {"partition_bytes", "credit"} for plan in plans[8:])
    assert not any("scheme" in plan for plan in plans)


def test_measurements_correct_a_continued_search(runs: Path) -> None:
    """The options in run.json name the measurements, with plans as version 1 wrote them."""
    searched_run = load(TRACES["byteps"]).search(
        trials=10, sampler="mcmc", seed=3, calibrate=runs / "byteps", out=runs / "calibrated"
    )
    assert searched_run.result.trials == 10
    assert Calibration.load(runs / "byteps").sessions[0].changed[0].plan == Plan.of(servers=3, partition_bytes=24576, credit=4)


def test_a_validated_run_is_reported(runs: Path, tmp_path: Path) -> None:
    succeeds("report", runs / "byteps", "--trace", TRACES["byteps"], "--out", tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert "3 servers, partitions of 24.0 KiB, credit 4" in page
    assert "validated" in page


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
    facts = json.loads(
        succeeds("run", "--sample", HOROVOD_SAMPLE, "--trials", 14, "--sampler", "optuna", "--seed", 3, "--out", run, "--json")
    )
    assert facts["trials"] == 14
    assert (run / "trials.jsonl").read_bytes().startswith(before)


def test_a_plan_of_a_later_version_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"version": 3, "cycle_time_us": 1000.0}')
    assert "plan version 3, this program reads 1 to 2" in fails_in_one_line(2, "replay", "--plan", tmp_path / "plan.json")


def test_a_run_of_a_later_version_is_one_line(run: Path) -> None:
    info = msgspec.json.decode((run / "run.json").read_bytes()) | {"version": 99}
    (run / "run.json").write_bytes(msgspec.json.encode(info))
    with pytest.raises(InputError, match=r"run\.json: version 99 of run folders, this program reads 1 to 2"):
        load_run(run)
