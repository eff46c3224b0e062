"""A recording whose own replay is far from the measurement: every verb that predicts from it says so, in the same words."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from sample import sample

import dpro_search
from dpro_search.cli import main
from dpro_search.collect.this_machine import load_warning
from dpro_search.collect.trace import Trace
from dpro_search.collect.trace_meta import MachineLoad
from dpro_search.graph.measured import recording_doubt

SAID = "the recording cannot be trusted"


def test_a_replay_within_ten_percent_is_no_doubt():
    assert [recording_doubt(us, 1e5) for us in (9.1e4, 1.09e5)] == [None, None]
    assert recording_doubt(6.05e4, None) is None
    assert "60.5 ms" in (doubt := recording_doubt(6.05e4, 1e5))
    assert "(-39.5 %)" in doubt


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    """The bundled recording, made on a busy machine: steps without the profiler took 1.65 times as long."""
    good = sample()
    steps, traced = good.steps, good.steps.start_us[good.steps.traced]
    stretched = np.interp(steps.start_us, [traced.min(), traced.max()], [0, 0])
    for end in (traced.min(), traced.max()):
        outside = (steps.start_us - end) * (1 if end == traced.max() else -1) > 0
        stretched[outside] = 0.65 * (steps.start_us - end)[outside]
    slow = replace(steps, start_us=steps.start_us + stretched, end_us=steps.end_us + stretched)
    folder = tmp_path_factory.mktemp("bad") / "trace"
    replace(good, steps=slow).save(folder)
    return folder


@pytest.fixture(scope="module")
def run(trace: Path) -> Path:
    folder = trace.with_name("run")
    dpro_search.load(trace).search(trials=3, sampler="mcmc", out=folder)
    return folder


def told(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[str, str]:
    """What a verb prints on stdout and on stderr."""
    with pytest.raises(SystemExit):
        main([str(arg) for arg in args])
    printed = capsys.readouterr()
    return printed.out, " ".join(printed.err.split())


def test_replay_says_it_also_of_a_changed_setting(trace, capsys):
    for changes in ((), ("--set", "cycle_time_us=5ms")):
        out, err = told(capsys, "replay", trace, "--json", *changes)
        assert SAID in err
        assert SAID in json.loads(out)["recording_doubt"]


def test_run_says_it(trace, capsys, tmp_path):
    out, err = told(capsys, "run", trace, "--trials", 2, "--sampler", "mcmc", "--out", tmp_path / "run", "--json")
    assert SAID in err
    assert SAID in json.loads(out)["recording_doubt"]


def test_an_export_says_it_and_promises_nothing(run, capsys, tmp_path):
    out, _ = told(capsys, "export", run, "--plan", 1, "--out", tmp_path / "tuned")
    readme = (tmp_path / "tuned" / "README.md").read_text()
    assert SAID in out
    assert SAID in readme
    assert "nine times in ten" not in readme


def test_validate_says_it_before_it_runs_anything(run, capsys):
    assert SAID in told(capsys, "validate", run)[1]


def test_the_report_says_it(trace, capsys, tmp_path):
    _, err = told(capsys, "report", trace, "--out", tmp_path / "page.html")
    assert SAID in err
    assert SAID in (tmp_path / "page.html").read_text()


def test_doctor_says_it_and_how_busy_the_machine_was(trace, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DPRO_SEARCH_ENVS", "/nonexistent")  # imports no framework
    checks = {check["name"]: check for check in json.loads(told(capsys, "doctor", trace, "--json")[0])["checks"]}
    assert SAID in checks["recording"]["detail"]
    assert not checks["recording"]["ok"]
    load = MachineLoad(cores=2, job_cores=1.2, other_cores=0.7)
    good = sample()
    replace(good, meta=msgspec.structs.replace(good.meta, load=load)).save(tmp_path / "busy")
    checks = {check["name"]: check for check in json.loads(told(capsys, "doctor", tmp_path / "busy", "--json")[0])["checks"]}
    assert checks["recording"]["detail"] == load_warning(load)
    assert Trace.load(tmp_path / "busy").meta.load == load


def test_of_a_good_recording_nothing_is_said(capsys):
    out, err = told(capsys, "replay", "--json")
    assert err == ""
    assert json.loads(out)["recording_doubt"] is None
