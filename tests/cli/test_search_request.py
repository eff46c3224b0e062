"""A search asked for on the command line and from Python is the same search: options, errors, run folders."""

import msgspec
import pytest

import dpro_search
from dpro_search._api.errors import in_python
from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError
from dpro_search.kinds import job_of
from dpro_search.search.calibration import Calibration
from dpro_search.search.correction import MeasuredPoint, Session
from dpro_search.search.request import SearchRequest, calibration_of
from dpro_search.search.run_folder import read_run
from dpro_search.space.plan import Plan
from tests.in_process import dpro, fails_in_one_line, succeeds
from tests.sample import HOROVOD_SAMPLE, horovod_trace_path

LIMIT = 2 * 2**30
ASKED = {"with_": ["accumulation"], "allow_lossy": True, "memory_limit_bytes": LIMIT, "quantile": 0.9, "sampler": "mcmc"}
SAMPLE = ("--sample", HOROVOD_SAMPLE)
OPTIONS = (*SAMPLE, "--with", "accumulation", "--allow-lossy", "--memory-limit", LIMIT, "--quantile", 0.9, "--sampler", "mcmc")


@pytest.fixture(scope="module")
def job():
    return dpro_search.load(sample=HOROVOD_SAMPLE)


@pytest.fixture(scope="module")
def measured(job, tmp_path_factory):
    """A run folder whose real runs took a little longer than predicted."""
    folder = tmp_path_factory.mktemp("measured")
    us = float(job.replay().iteration_us)
    point = MeasuredPoint(plan=Plan(), predicted_us=us, interval_us=(0.9 * us, 1.1 * us), measured_us=1.04 * us)
    Calibration.fit([Session(recorded=point)]).save(folder)
    return folder


def test_python_continues_what_the_command_line_began(job, measured, tmp_path):
    run = tmp_path / "run"
    succeeds("run", *OPTIONS, "--calibrate", measured, "--trials", 8, "--out", run)
    begun = (run / "trials.jsonl").read_bytes()
    searched_run = job.search(trials=12, out=run, calibrate=measured, **ASKED)
    assert searched_run.result.trials == 12
    assert (run / "trials.jsonl").read_bytes().startswith(begun)
    assert searched_run.result.plans[0].beats_recorded is not None


@pytest.fixture(scope="module")
def begun(job, tmp_path_factory):
    """The folder of a search of two trials."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    job.search(trials=2, out=folder, **ASKED)
    return folder


@pytest.mark.parametrize("other", [{"with_": ()}, {"allow_lossy": False}, {"memory_limit_bytes": None}, {"calibrate": True}])
def test_a_run_with_other_options_is_another_search(job, measured, begun, other):
    if "calibrate" in other:
        other = {"calibrate": measured}
    with pytest.raises(InputError, match="a search with another options"):
        job.search(trials=2, out=begun, **(ASKED | other))


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"quantile": 2.0}, ("--quantile", 2)),
        ({"calibrate": "nowhere"}, ("--calibrate", "nowhere")),
        ({"with_": ["precision"]}, ("--with", "precision")),
        ({"with_": ["precision"], "precision_table": "gone"}, ("--with", "precision", "--precision-table", "gone")),
        ({"with_": ["op-fusion"], "cluster_model": "gone"}, ("--with", "op-fusion", "--cluster-model", "gone")),
    ],
)
def test_an_invalid_request_is_the_same_line(job, tmp_path, monkeypatch, asked, options):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as refused:
        job.search(trials=2, out="run", **asked)
    line = fails_in_one_line(2, "run", *SAMPLE, "--trials", 2, "--out", "run", *options, cwd=tmp_path)
    assert in_python(line).endswith(str(refused.value))


def test_only_python_can_name_a_transformation_that_there_is_not(job):
    with pytest.raises(InputError, match="transformation 'magic' is unknown"):
        job.search(with_=["magic"])


def test_a_calibration_changes_every_prediction_and_the_run_names_it(job, measured, tmp_path):
    plain = job.search(trials=3, sampler="mcmc", out=tmp_path / "plain")
    corrected = job.search(trials=3, sampler="mcmc", out=tmp_path / "corrected", calibrate=measured)
    was, is_now = plain.result.baseline, corrected.result.baseline
    assert 1.01 < is_now.iteration_us / was.iteration_us < 1.04
    held = calibration_of(read_run(corrected.folder), corrected.folder)
    assert held.uncorrected(is_now, Plan()).iteration_us == pytest.approx(was.iteration_us)
    assert calibration_of(read_run(plain.folder), plain.folder).uncorrected(was, Plan()) == was


def test_a_calibrated_search_says_so_in_a_line(measured, tmp_path):
    command = ("run", *SAMPLE, "--trials", 2, "--sampler", "mcmc", "--calibrate", measured)
    assert "changes the prediction of the recorded setting by +" in dpro(*command, "--out", tmp_path / "run").stderr
    assert "Corrects" not in dpro(*command, "--quiet", "--out", tmp_path / "quiet").stderr


def test_a_run_that_an_older_version_calibrated_is_one_line(job, measured, tmp_path):
    info = msgspec.structs.replace(
        read_run(job.search(trials=1, sampler="mcmc", out=tmp_path / "run").folder), options={"calibration": '{"compute": 1.2}'}
    )
    with pytest.raises(InputError, match=r"run\.json, options: not a calibration of this version"):
        calibration_of(info, tmp_path / "run")


def test_files_are_identified_by_their_content(measured, tmp_path):
    trace = Trace.load(horovod_trace_path())
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "calibration.json").write_bytes((measured / "calibration.json").read_bytes())
    here, there = (
        SearchRequest.of(horovod_trace_path(), job_of(trace).objective(), {}, folder) for folder in (measured, tmp_path / "moved")
    )
    assert here.options == there.options
    assert here.trace_digest == there.trace_digest
