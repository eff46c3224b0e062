"""The Python API: its examples run, its tables are safe, and it costs nothing until it is used."""

import doctest
import re
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import msgspec
import pytest

import dpro_search
from dpro_search import api
from dpro_search._api import recording, values
from dpro_search.deploy.losses import Equivalence
from dpro_search.deploy.validate import FailedPlan, MeasuredPlan, RefusedPlan
from dpro_search.errors import InputError
from dpro_search.space.plan import Plan
from tests.cli.facts import replayed
from tests.sample import HOROVOD_SAMPLE


def test_the_examples_in_its_docstrings_run():
    options = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    results = [doctest.testmod(module, optionflags=options) for module in (api, recording, values)]
    assert [result.failed for result in results] == [0, 0, 0]
    assert sum(result.attempted for result in results) > 20


def test_every_name_is_there_and_nothing_else_is_loaded_for_the_package():
    code = "import sys, dpro_search; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "numpy" not in loaded
    assert "dpro_search.api" not in loaded
    assert dpro_search.__all__ == api.__all__
    assert set(dpro_search.__all__) <= set(dir(dpro_search))
    assert all(getattr(dpro_search, name) is getattr(api, name) for name in dpro_search.__all__)
    with pytest.raises(AttributeError, match="no attribute 'serach'"):
        dpro_search.serach  # noqa: B018


def test_packages_and_api_do_not_hide_each_other():
    import dpro_search.replay
    import dpro_search.search

    assert dpro_search.replay.Timeline
    assert dpro_search.search.run_search
    assert not {"replay", "search", "report"} & set(dpro_search.__all__)


def test_it_says_what_the_command_line_says():
    job = dpro_search.load(sample=HOROVOD_SAMPLE)
    facts = replayed(job.trace, changes=("fusion_threshold_bytes=0",))
    replayed_job = job.replay(changes={"fusion_threshold_bytes": 0})
    assert replayed_job.iteration_us == facts["predicted_iteration_us"]
    assert replayed_job.breakdown_us == facts["breakdown_us"]
    assert job.replay(dpro_search.Plan.of(fusion_threshold_bytes=0)).iteration_us == replayed_job.iteration_us


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"changes": {"threshold": 1}}, "has no knob 'threshold'"),
        ({"what_if": ["magic"]}, "magic"),
        ({"holdout_step": 15, "changes": {"ranks": 4}}, "leave out"),
    ],
)
def test_what_a_job_does_not_know_is_one_line(asked, said):
    with pytest.raises(InputError, match=said):
        dpro_search.load(sample=HOROVOD_SAMPLE).replay(**asked)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return dpro_search.load().search(trials=20, sampler="mcmc", out=tmp_path_factory.mktemp("search") / "run")


def test_a_run_can_be_opened_exported_and_reported(run, tmp_path):
    again = dpro_search.load_run(run.folder)
    assert again == run
    assert (again.best, again.speedup) == (run.best, run.speedup)
    exported = run.export(tmp_path / "tuned")
    assert dpro_search.Plan.load(exported.folder / "plan.json") == run.best
    assert run.report(tmp_path / "run.html").read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(InputError, match=r"plan-99\.json: no such plan"):
        run.export(tmp_path / "none", plan=99)


def test_tables_are_well_formed_and_hostile_names_stay_text(run):
    job = dpro_search.load()
    evil = "<script>alert(1)</script>"
    meta = msgspec.structs.replace(job.trace.meta, framework=evil)
    diagnosis = replace(job.diagnose(), findings=(evil,))
    for shown in (replace(job, source=replace(job.trace, meta=meta)), job.replay(), diagnosis, run):
        html = shown._repr_html_()
        ElementTree.fromstring(html)
        assert "<script>" not in html
    assert "&lt;script&gt;" in diagnosis._repr_html_()


def test_real_runs_are_a_table_that_says_what_trains_something_else():
    plan = Plan.of(fusion_threshold_bytes=0)
    other = Equivalence(verdict="different", compared=20, difference=0.1, tolerance=1e-4, reason="first 20 losses differ")
    ran = MeasuredPlan(
        plan=plan,
        predicted_us=80e3,
        interval_us=(76e3, 84e3),
        measured_us=81e3,
        spread_us=1e3,
        error_pct=-1.2,
        speedup_predicted=1.25,
        speedup_measured=1.23,
        speedup_interval=(1.2, 1.26),
        beyond_noise=True,
    )
    refused = RefusedPlan(plan=plan, predicted_us=80e3, measured_us=40e3, losses=other)
    failed = FailedPlan(plan=plan, predicted_us=80e3, reason="rank 1 ended with code 3", runs=0, measured_us=None)
    facts = {"baseline_predicted_us": 101e3}
    runs = api.RealRuns(baseline_us=100e3, noise_pct=1.0, plans=(ran,), refused=(refused,), failed=(failed,), facts=facts)
    shown = runs._repr_html_()
    ElementTree.fromstring(shown)
    assert "1.23" in shown
    assert "none: trains something else" in shown
    assert "none: rank 1 ended with code 3" in shown


def test_times_and_sizes_are_numbers_that_print_with_a_unit():
    replay = dpro_search.load().replay()
    assert isinstance(replay.iteration_us, float)
    assert re.fullmatch(r"\d+\.\d ms", f"{replay.iteration_us}")
    assert replay.iteration_us.seconds == replay.iteration_us / 1e6
    assert repr(dpro_search.Bytes(2**30)) == "1.0 GiB"
    assert "ms" in repr(replay)


def test_a_job_is_described_in_python_and_its_settings_take_lists(tmp_path):
    job = dpro_search.describe("gpt2-xl", "1xhgx-h100", tmp_path / "job.toml", global_batch=64, sequence=1024)
    even = job.replay(changes={"pp": 4, "micro_batch": 4})
    uneven = job.replay(changes={"pp": 4, "micro_batch": 4, "stage_layers": [15, 11, 11, 11]})
    assert uneven.iteration_us == job.replay(changes={"pp": 4, "micro_batch": 4, "stage_layers": "15,11,11,11"}).iteration_us
    assert uneven.iteration_us != even.iteration_us
    with pytest.raises(InputError, match="exists already"):
        dpro_search.describe("gpt2-xl", "1xhgx-h100", tmp_path / "job.toml")
    with pytest.raises(InputError, match="changes: pp is"):
        job.replay(changes={"pp": []})


def test_a_plan_of_your_own_is_exported(tmp_path):
    exported = dpro_search.load().export(Plan.of(bucket_cap_bytes=2**20), tmp_path / "tuned")
    assert "planned_ddp" in exported.usage
    assert (tmp_path / "tuned" / "ddp.json").is_file()
    with pytest.raises(InputError):
        dpro_search.load().export(Plan.of(fusion_threshold_bytes=0), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_capture_names_what_is_missing(tmp_path):
    with pytest.raises(InputError, match="give a script and a function"):
        dpro_search.capture("train.py", tmp_path / "captured")
    with pytest.raises(InputError, match="optimiser"):
        dpro_search.capture("train.py:model", tmp_path / "captured", optimiser="adam")
