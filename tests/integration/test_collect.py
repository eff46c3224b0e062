"""Recording a real two-rank job, and proving a plan on real runs."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from dpro_search.collect.trace import EventKind, Trace
from dpro_search.kinds import job_of
from dpro_search.space.plan import Plan
from tests.faults.processes import dpro

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "experiments" / "workloads" / "train.py"
SEARCH_LIMIT_S = 600
# The command line; its threads' stacks are written to a file a little before the limit.
SEARCH_WITH_DUMP = f"""
import faulthandler, sys
from dpro_search.cli import main
faulthandler.dump_traceback_later({SEARCH_LIMIT_S} - 20, file=open(sys.argv.pop(1), "w"))
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def recorded(tensorflow_python: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("recorded") / "trace"
    rate = ("--rate", "1gbit") if os.geteuid() == 0 else ()
    done = dpro(
        "collect", "--framework", "tensorflow", "--comm", "horovod", "--out", out, "--hosts", 2, *rate, "--json",
        "--keep-raw", out.parent / "raw",
        "--", tensorflow_python, TRAIN, "--model", "vgg16", "--batch", 2, "--steps", 30,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


def test_a_recording_says_what_it_holds(recorded):
    out, result = recorded
    assert result["trace"] == str(out)
    assert (result["ranks"], result["steps"]) == (2, 11)
    assert result["measured_iteration_us"] > 0
    assert result["ops"] > 1000
    assert result["tensors"] == 32  # 13 convolutions and 3 dense layers, weights and biases


def test_it_holds_every_rank_phase_and_fused_collective(recorded):
    trace = Trace.load(recorded[0])
    events = trace.events
    for kind in (
        EventKind.NEGOTIATE,
        EventKind.QUEUE,
        EventKind.MEMCPY_IN,
        EventKind.ALLREDUCE,
        EventKind.MEMCPY_OUT,
        EventKind.CYCLE,
    ):
        assert (events.kind == kind).any()
    for rank in range(2):
        assert ((events.kind == EventKind.OP) & (events.rank == rank)).sum() > 500
    # TensorFlow's profiler loses the start or the end of one now and then: the reader counts those.
    assert (events.kind == EventKind.COMM).sum() + trace.meta.dropped.get("unpaired", 0) == 2 * 32 * 11
    assert trace.meta.dropped.get("unpaired", 0) < 5
    carried = events.select((events.kind == EventKind.ALLREDUCE) & (events.step >= 0))
    per_collective = np.unique(carried.collective, return_counts=True)[1]
    assert per_collective.max() > 1  # some travelled together
    assert all(tensor.name.count("#") == 1 for tensor in trace.tensors)


def test_clocks_of_one_machine_agree(recorded):
    clock = Trace.load(recorded[0]).meta.clock
    assert clock.offset_us == (0, 0)
    assert max(clock.residual_us) < 1000


def test_the_recorded_setting_is_predicted(recorded):
    trace = Trace.load(recorded[0])
    prediction = job_of(trace).predict(Plan())
    # A machine that also runs tests is noisy: this asks for the right size, docs/accuracy.md for accuracy.
    assert prediction.iteration_us == pytest.approx(recorded[1]["measured_iteration_us"], rel=0.4)


@pytest.fixture
def raw(recorded, tmp_path):
    return shutil.copytree(recorded[0].parent / "raw", tmp_path / "raw")


def imported(raw: Path, *args: object) -> subprocess.CompletedProcess[str]:
    return dpro("import", raw, "--out", raw.parent / "again", *args)


def test_raw_files_can_be_imported_again(recorded, raw):
    done = imported(raw, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["collectives"]["unmatched"] == 0
    np.testing.assert_array_equal(Trace.load(raw.parent / "again").events.start_us, Trace.load(recorded[0]).events.start_us)


def damaged(raw: Path, message: str) -> None:
    done = imported(raw)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line
    assert not (raw.parent / "again").exists()


def test_a_missing_rank_is_named(raw):
    shutil.rmtree(raw / "rank1")
    damaged(raw, "rank1/hook.json")


def test_a_missing_timeline_is_named(raw):
    (raw / "horovod_timeline.json").unlink()
    damaged(raw, "horovod_timeline.json")


def test_a_timeline_cut_off_before_the_first_step_is_named(raw):
    data = (raw / "horovod_timeline.json").read_bytes()
    (raw / "horovod_timeline.json").write_bytes(data[:2000])
    damaged(raw, "horovod_timeline.json")


def test_a_timeline_cut_off_at_its_end_gives_a_warning(raw):
    data = (raw / "horovod_timeline.json").read_bytes()
    (raw / "horovod_timeline.json").write_bytes(data[: len(data) - 150])
    done = imported(raw, "--json")
    assert done.returncode == 0, done.stderr
    assert "cut off" in json.loads(done.stdout)["warnings"][0]


def test_a_profile_that_is_cut_off_is_named(raw):
    data = (raw / "rank0" / "xplane.pb").read_bytes()
    (raw / "rank0" / "xplane.pb").write_bytes(data[: len(data) // 2])
    damaged(raw, "rank0/xplane.pb")


def searched_in_time(trace, run):
    """A search of 30 trials, which takes seconds. One that does not end says where it is, and its recording is kept."""
    dump = run.parent / "stacks.txt"
    search = subprocess.Popen(
        [sys.executable, "-c", SEARCH_WITH_DUMP, dump, "run", trace, "--trials", "30", "--out", run, "--json"],
        stdout=subprocess.DEVNULL,
    )
    try:
        assert search.wait(timeout=SEARCH_LIMIT_S) == 0
    except subprocess.TimeoutExpired:
        kept = Path(tempfile.mkdtemp(prefix="dpro-search-hang-"))
        for folder in filter(Path.is_dir, (trace, run)):
            shutil.copytree(folder, kept / folder.name)
        pytest.fail(f"'run' did not end in {SEARCH_LIMIT_S} s; trace and run folder are in {kept}\n{dump.read_text()}")
    finally:
        search.kill()
        search.wait()


def test_search_and_validation_on_real_runs(recorded, tensorflow_python, tmp_path):
    run = tmp_path / "run"
    searched_in_time(recorded[0], run)
    # The best of few trials may be the recorded setting: validate a plan that differs, with exact groups.
    done = dpro(
        "validate", run, "--top", 1, "--warmup", 2, "--json",
        "--", tensorflow_python, TRAIN, "--model", "vgg16", "--batch", 2, "--steps", 8,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["baseline_us"] > 0
    assert result["noise_pct"] >= 0
    for plan in result["plans"]:
        assert set(plan) >= {"predicted_us", "measured_us", "error_pct", "speedup_measured"}
        assert plan["measured_us"] > 0


def test_a_keras_fit_job_is_recorded_without_a_line_added(tensorflow_python, tmp_path):
    job = Path(__file__).with_name("keras_fit_job.py")
    done = dpro("collect", "--out", tmp_path / "t", "--json", "--", tensorflow_python, job)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["steps"], result["tensors"]) == (11, 10)
    trace = Trace.load(tmp_path / "t")
    assert {tensor.name.split("/")[1].split("#")[0] for tensor in trace.tensors} == {"kernel", "bias"}
    assert job_of(trace).predict(Plan()).iteration_us > 0


def test_an_interpreter_without_the_framework_is_one_line(tmp_path):
    done = dpro("collect", "--out", tmp_path / "t", "--", sys.executable, "train.py")
    assert done.returncode == 1
    assert "tensorflow" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ("raise SystemExit('no such data set')", 1, "no such data set"),
        ("import horovod.tensorflow as hvd; hvd.init()", 2, "no training step was seen"),
    ],
)
def test_a_job_that_gives_no_trace_is_one_line_and_leaves_nothing(tensorflow_python, tmp_path, source, code, message):
    script = tmp_path / "broken.py"
    script.write_text(source)
    done = dpro("collect", "--out", tmp_path / "t", "--", tensorflow_python, script)
    assert done.returncode == code
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "t").exists()
