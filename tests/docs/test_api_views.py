"""What the Python API shows, tabulates and draws, and how its errors speak."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample import HOROVOD_SAMPLE

import dpro_search
from dpro_search import api
from dpro_search._repr import short_repr
from dpro_search.errors import DproSearchError, InputError, MissingCapabilityError
from dpro_search.kinds import job_of
from dpro_search.search import RankedPlan, SearchResult
from dpro_search.space.plan import Plan, Prediction

ONE_SCREEN = 1300  # characters
ROOT = Path(__file__).parents[2]
MANY = tuple(f"model/layer{number}/convolution@op" for number in range(4000))
PREDICTION = Prediction(
    iteration_us=1e5, interval_us=(9e4, 1.1e5), breakdown_us={"compute": 1e5}, peak_memory_bytes=None, source="recorded"
)


@pytest.fixture(scope="module")
def job():
    return dpro_search.load(sample=HOROVOD_SAMPLE)


@pytest.fixture(scope="module")
def run(job, tmp_path_factory):
    return job.search(trials=20, sampler="mcmc", out=tmp_path_factory.mktemp("search") / "run", with_="recomputation")


def test_a_plan_shows_only_what_it_changes():
    assert repr(Plan()) == "Plan()"
    plan = Plan.of(fusion_threshold_bytes=0, micro_batches=2)
    assert repr(plan) == "Plan.of(fusion_threshold_bytes=0, micro_batches=2)"
    assert eval(repr(plan)) == plan


def test_a_large_plan_fits_on_a_screen():
    large = Plan(bfloat16_ops=MANY, tensor_groups=(MANY[:2000], MANY[2000:]))
    assert len(repr(large)) < ONE_SCREEN
    assert "... 3996 more" in repr(large)
    ranked = RankedPlan(plan=large, prediction=PREDICTION, trial=1, speedup=1.5, gain_certain=True)
    result = SearchResult(run="run", trials=9, seconds=1.0, stopped="finished", baseline=PREDICTION, plans=(ranked,) * 10)
    assert len(repr(result)) < ONE_SCREEN
    assert "speedup=1.5" in repr(result)


def test_every_value_of_the_api_fits_on_a_screen(job, run):
    timeline = job_of(job.trace).timeline(Plan())
    for value in (job, job.trace, job.replay(), job.diagnose(), run, run.best, run.result, timeline, timeline.graph):
        assert len(repr(value)) < ONE_SCREEN
    assert repr(job.trace) == "Trace(format='tensorflow-horovod', ranks=2, steps=38, events=123656)"


_VALUES = st.recursive(
    st.none() | st.integers() | st.floats() | st.text() | st.just(np.zeros(10_000)),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20),
)


@given(_VALUES)
def test_any_value_fits_on_a_screen(value):
    assert len(short_repr(value)) <= ONE_SCREEN


def test_completion_offers_the_api_and_nothing_else():
    assert dir(dpro_search) == sorted([*dpro_search.__all__, "__version__"])
    assert dir(api) == sorted(api.__all__)


@pytest.mark.parametrize("value", ["job", "replay", "diagnosis", "run"])
def test_values_are_tables(value, job, run):
    shown = {"job": lambda: job, "replay": job.replay, "diagnosis": job.diagnose, "run": lambda: run}[value]()
    columns = shown.columns()
    assert len({len(column) for column in columns.values()}) == 1
    pytest.importorskip("pandas")
    frame = shown.to_frame()
    assert list(frame.columns) == list(columns)
    assert len(frame) == len(next(iter(columns.values()))) > 0


def test_the_events_of_a_recording_have_their_names(job):
    columns, events = job.columns(), job.trace.events
    assert len(columns["name"]) == len(events)
    assert columns["name"][5] == job.trace.names[events.name[5]]
    sent = int(np.flatnonzero(events.tensor >= 0)[0])
    assert columns["tensor"][sent] == job.trace.tensors[events.tensor[sent]].name
    assert set(columns["tensor"][events.tensor < 0].tolist()) == {None}


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_values_are_drawn(job, run, pyplot):
    timeline = job.plot(rank=1)
    lanes = [label.get_text() for label in timeline.get_yticklabels()]
    assert {"predicted core", "measured thread 0"} <= set(lanes)
    replay = job.replay()
    bars = replay.plot().patches
    assert sum(bar.get_width() for bar in bars) == pytest.approx(sum(replay.breakdown_us.values()) / 1e3)
    diagnosis = job.diagnose()
    drawn_ms = [bar.get_width() for bar in diagnosis.plot().patches]
    assert drawn_ms == pytest.approx(
        [g["gain_us"] / 1e3 for g in diagnosis.gains if g["gain_us"] >= 0.005 * diagnosis.iteration_us]
    )
    assert min(drawn_ms) > 0
    trials = run.plot().lines[0].get_xydata()
    assert len(trials) == run.result.trials
    assert len(run.plot("pareto").lines[1].get_xydata()) >= 1
    _, ax = pyplot.subplots()
    assert run.plot(ax=ax) is ax


@pytest.mark.parametrize(("library", "method"), [("pandas", "to_frame"), ("matplotlib", "plot")])
def test_a_missing_library_is_named_with_the_extra(library, method, run, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingCapabilityError, match=rf"{method}\(\) needs {library}: pip install 'dpro-search\[notebook\]'"):
        getattr(run, method)()


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda job, run: job.replay(holdout_step=15, changes={"ranks": 4}), "leave out plan, cluster, changes and what_if"),
        (lambda job, run: job.replay(changes={"ranks": None}), "changes: ranks is None; give a number, a text or a list"),
        (lambda job, run: job.replay(samples=0), "samples must be at least 1"),
        (lambda job, run: job.search(trials=0, out="x"), "trials must be at least 1"),
        (lambda job, run: job.search(quantile=3, out="x"), "quantile must be between 0 and 1"),
        (lambda job, run: job.search(trials=3, sampler="mcmc", seed=1, out=run.folder), "give the same seed or choose another out"),
        (lambda job, run: job.search(trials=3, out="x", calibrate="none"), "make it with 'Run.validate'"),
        (lambda job, run: dpro_search.load_run("none"), "make one with 'Recording.search'"),
        (lambda job, run: dpro_search.import_trace([], "x"), "sources: no file is named"),
        (lambda job, run: run.validate(["python"], top=1, rounds=1), "rounds 1: at least 2"),
        (lambda job, run: run.report("."), "name a file, like 'report.html'"),
        (lambda job, run: run.plot("memory"), "kind must be 'progress' or 'pareto'"),
        (lambda job, run: job.plot(rank=7), "rank 7 has no events to plot; ranks are 0, 1"),
        (lambda job, run: job.plot(step=3), "step 3 was not profiled; choose a step from 13 to 23"),
    ],
)
def test_errors_speak_of_parameters_and_methods(ask, said, job, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DproSearchError) as error:
        ask(job, run)
    assert said in str(error.value)
    assert not any(word.startswith("--") for word in str(error.value).split())


def test_one_text_is_a_list_of_one(job):
    assert job.replay(what_if="compute=0.9").iteration_us == job.replay(what_if=["compute=0.9"]).iteration_us
    with pytest.raises(InputError, match="nowhere: cannot be read"):
        dpro_search.import_trace("nowhere", "x")


def test_what_is_no_plan_is_a_type_error(job):
    with pytest.raises(TypeError, match="plan must be a Plan, not dict"):
        job.replay({"rate": "1gbit"})


def test_the_tutorial_runs(tmp_path, monkeypatch, pyplot, capsys):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "python_tutorial.py"))
    printed = capsys.readouterr().out
    assert "ms predicted" in printed
    assert "speedup" in printed
    assert (tmp_path / "run.html").is_file()
