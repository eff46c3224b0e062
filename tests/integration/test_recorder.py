"""The recorder in real jobs of two ranks: what it writes is imported, replayed, searched and exported; failures cost a window."""

import gzip
import json
import os
import subprocess
from pathlib import Path

import pytest

from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.trace import Trace
from dpro_search.kinds import job_of, kind_of, profiled_ddp, profiled_fsdp
from tests.faults.disks import fill, small_disk
from tests.faults.processes import ROOT, dpro
from tests.kinds.verbs import verb

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("recorded_job.py")
STEPS = 20
PROFILED = 4
WARNING = "dpro-search: recorder: "


def launched(python, how, folder, steps=STEPS, **env):
    """A finished job of two ranks; it may have failed."""
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env}
    return subprocess.run(
        [*command, str(JOB), how, str(folder), str(steps)], env=variables, capture_output=True, text=True, check=False, timeout=120
    )


def recorded(python, how, folder, steps=STEPS, **env):
    """The error output of a job that ended well."""
    done = launched(python, how, folder, steps, **env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def warnings_in(output):
    return [line[line.index(WARNING) :] for line in output.splitlines() if WARNING in line]


def job_file(folder, rank=0, window=0):
    return json.loads((folder / f"window{window}" / f"rank{rank:05d}.job.json").read_text())


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def plain(request, torch_python, tmp_path_factory):
    """How a job communicates, the folder of its recorder, and its trace."""
    folder = tmp_path_factory.mktemp(request.param) / "recording"
    assert warnings_in(recorded(torch_python, request.param, folder)) == []
    return request.param, folder, import_trace([folder])


def test_a_loop_is_recorded_and_each_step_is_replayed(plain):
    how, folder, trace = plain
    assert sorted(path.name for path in folder.rglob("*.*")) == [
        *("rank00000.job.json", "rank00000.json.gz", "rank00001.job.json", "rank00001.json.gz")
    ]
    assert kind_of(trace) is {"ddp": profiled_ddp, "fsdp": profiled_fsdp}[how].KIND
    assert trace.meta.ranks == trace.meta.world_size == 2
    assert trace.meta.warnings == ()
    replayed = job_of(trace).job.compared(None)
    assert len(replayed.steps) == PROFILED - 1  # how long the first took shows no step before it
    assert all(abs(step.error_pct) < 10 for step in replayed.steps)


def test_the_job_is_described(plain):
    how, folder, trace = plain
    job = job_file(folder, rank=1)
    assert (job["rank"], job["local_rank"], job["world_size"], job["batch_size"]) == (1, 1, 2, 64)
    (model,) = job["models"]
    assert model["kind"] == how
    assert model["parameters"] == sum(_elements(shape) for _, shape, _ in job["parameters"]) == 4 * (256 * 256 + 256) + 2570
    assert model["dtypes"] == ["float32"]
    assert (model["bucket_cap_bytes"] == 2**18) if how == "ddp" else (len(model["units"]) == 5)
    assert job["environment"]["OMP_NUM_THREADS"] == "1"
    assert "PATH" not in job["environment"]
    assert "unread" not in job
    assert trace.meta.versions["torch"] == job["versions"]["torch"]


def _elements(shape):
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def test_all_steps_are_timed_and_those_of_the_profiler_do_not_count(plain):
    _, folder, trace = plain
    job = job_file(folder)
    assert len(job["step_us"]) == STEPS
    assert job["slowed_steps"] == [[6, 13]]  # the warm-up, four steps, and the one in which the files are written
    others = sorted(us for rank in (0, 1) for us in job_file(folder, rank)["step_us"][5:6] + job_file(folder, rank)["step_us"][13:])
    assert others[0] <= trace.meta.unprofiled_us <= others[-1]


def test_it_is_searched_and_exported(plain, tmp_path):
    how, folder, _ = plain
    verb("import", folder, "--out", tmp_path / "trace")
    assert verb("run", tmp_path / "trace", "--trials", 20, "--out", tmp_path / "search")["plans"]
    verb("export", tmp_path / "search", "--out", tmp_path / "plan")
    assert (tmp_path / "plan" / f"{how}.py").is_file()
    assert verb("diagnose", folder)["iteration_us"] > 0  # verbs take the folder as it is


@pytest.mark.parametrize("how", ["transformers", "lightning", "accelerate"])
def test_trainers_are_recorded_by_their_callbacks(how, parallel_python, tmp_path):
    assert warnings_in(recorded(parallel_python, how, tmp_path / "recording", 14)) == []
    assert "hidden" not in str(job_file(tmp_path / "recording"))
    trace = import_trace([tmp_path / "recording"])
    assert trace.meta.ranks == 2
    replayed = job_of(trace).job.compared(None)
    assert len(replayed.steps) == PROFILED - 1
    assert all(abs(step.error_pct) < 10 for step in replayed.steps)


def test_collect_records_a_job_that_torchrun_launches_without_a_line_in_its_script(torch_python, tmp_path):
    options = ("--warmup", 5, "--untraced", 5, "--traced", PROFILED, "--keep-raw", tmp_path / "raw", "--json")
    job = ("--", torch_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, JOB, "bare", "none", STEPS)
    done = dpro("collect", "--out", tmp_path / "trace", *options, *job, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["measured_iteration_us"] > 0
    trace = Trace.load(tmp_path / "trace")
    assert kind_of(trace) is profiled_ddp.KIND
    assert len(job_of(trace).job.compared(None).steps) == PROFILED - 1
    assert job_file(tmp_path / "raw")["first_step"] == 10


def test_collect_says_that_a_job_was_too_short(torch_python, tmp_path):
    job = ("--", torch_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, JOB, "bare", "none", 3)
    done = dpro("collect", "--out", tmp_path / "trace", *job, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 1
    assert "no rank recorded a window" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_killed_rank_leaves_the_window_of_all_before_it(torch_python, tmp_path):
    """Rank 1 is killed within the second window, which then no rank ends."""
    done = launched(torch_python, "ddp", tmp_path / "recording", 26, WINDOWS="2", KILLED_AT=str(8 + 10 + 2))
    assert done.returncode != 0
    trace = import_trace([tmp_path / "recording"])
    assert trace.meta.ranks == 2
    assert trace.meta.warnings == ()
    assert not list((tmp_path / "recording").rglob(".*"))


def test_half_written_and_missing_files_of_a_rank_leave_the_others(torch_python, tmp_path):
    recorded(torch_python, "ddp", tmp_path / "recording", 26, WINDOWS="2")
    last = tmp_path / "recording" / "window1"
    profile = last / "rank00001.json.gz"
    profile.write_bytes(profile.read_bytes()[:20_000])
    trace = import_trace([tmp_path / "recording"])
    assert trace.meta.ranks == 2  # of the window before
    size = job_file(tmp_path / "recording", rank=1, window=1)["profile_bytes"]
    assert f"rank00001.json.gz has 20000 of {size} bytes" in trace.meta.warnings[0]
    assert "window0 was read" in trace.meta.warnings[1]
    trace = import_trace([last])
    assert trace.meta.numbers == (0,)
    assert any("only rank 0 was imported" in warning for warning in trace.meta.warnings)


@pytest.mark.skipif(os.geteuid() != 0, reason="small file systems need root")
@pytest.mark.parametrize("state", ["full", "read-only"])
def test_a_disk_that_takes_nothing_costs_one_line_a_rank(state, torch_python, tmp_path):
    with small_disk(tmp_path / "disk", "2m") as disk:
        if state == "full":
            fill(disk)
        else:
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        lines = warnings_in(recorded(torch_python, "ddp", disk / "recording"))
        assert len(lines) == 2
        assert all("window 0 of rank" in line and ("No space left" in line or "Read-only" in line) for line in lines)
        assert not [path for path in disk.rglob("*") if path.is_file() and path.name != "filler"]


def test_a_job_that_is_switched_off_writes_nothing(torch_python, tmp_path):
    assert warnings_in(recorded(torch_python, "ddp", tmp_path / "recording", 14, DPRO_SEARCH_RECORD="0")) == []
    assert list(tmp_path.iterdir()) == []


USES_THE_PROFILER = """
import sys, torch
from dpro_search.record import Recorder
with Recorder(sys.argv[1], wait=2, warmup=1, steps=2) as recorder, torch.profiler.profile() as profiler:
    for _ in range(6):
        torch.ones(3).sum()
        recorder.step()
print(len(profiler.events()) > 6)
"""


def test_a_script_that_uses_the_profiler_itself_keeps_it(torch_python, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [torch_python, "-c", USES_THE_PROFILER, str(tmp_path / "recording")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    (line,) = warnings_in(done.stderr)
    assert "the script's own profiler is active" in line


def test_profiles_are_whole_json(plain):
    _, folder, _ = plain
    with gzip.open(folder / "window0" / "rank00000.json.gz", "rt") as file:
        assert json.load(file)["distributedInfo"]["world_size"] == 2
