"""Recording real MXNet + Horovod jobs, and TensorFlow + Horovod, on MPI, without a line added to their scripts."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dpro_search.collect.launch.mpi import run_mpi_job
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.launch.step_times import StepSchedule
from dpro_search.collect.launchers import MXNET_HOROVOD
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.errors import InputError, JobError, MissingCapabilityError
from tests.faults.processes import dpro

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("mxnet_horovod_job.py")
TRAIN = Path(__file__).parents[2] / "experiments" / "workloads" / "train.py"
SCHEDULE = StepSchedule(warmup=3, untraced=4, traced=3)
WHEN = ("--warmup", "3", "--untraced", "4", "--traced", "3")
TENSORS = 12

rooted = pytest.mark.skipif(os.geteuid() != 0, reason="shaped hosts need root")


def spec(python: str, *how: object) -> JobSpec:
    return JobSpec(command=(python, str(JOB), *map(str, how)), ranks=2, cores=default_cores(2))


def facts_of(*args: object, **env: str) -> dict:
    done = dpro(*args, timeout=300, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def recorded(mxnet_python: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("recorded") / "trace"
    rate = ("--rate", "2gbit") if os.geteuid() == 0 else ()
    where = ("collect", "--framework", "mxnet", "--comm", "horovod", "--out", out, *rate, *WHEN, "--json")
    return out, facts_of(*where, "--", mxnet_python, JOB, "plain")


def test_a_recording_says_what_it_holds(recorded):
    out, result = recorded
    assert result["trace"] == str(out)
    assert (result["ranks"], result["steps"], result["tensors"]) == (2, 3, TENSORS)
    assert result["measured_iteration_us"] > 0


@pytest.mark.parametrize(
    "asked",
    [
        ("replay",),
        ("replay", "--set", "fusion_threshold_bytes=0"),
        ("replay", "--set", "cycle_time_us=5000"),
        ("replay", "--set", "rate=100mbit"),
        ("diagnose",),
    ],
)
def test_the_verbs_know_such_a_trace(recorded, asked):
    result = facts_of(asked[0], recorded[0], *asked[1:], "--json")
    assert result["iteration_us" if asked[0] == "diagnose" else "predicted_iteration_us"] > 0


@pytest.mark.parametrize("kind", ["imperative", "adam", "prefix"])
def test_other_ways_to_train_are_recorded_alike(mxnet_python, tmp_path, kind):
    trace = MXNET_HOROVOD.record(spec(mxnet_python, kind), tmp_path / "t", schedule=SCHEDULE)
    comm = trace.events.select((trace.events.kind == EventKind.COMM) & (trace.events.rank == 1))
    assert len(comm) == 3 * TENSORS
    assert all(tensor.size_bytes for tensor in trace.tensors)


def test_a_job_is_timed_without_the_profiler(mxnet_python):
    times = MXNET_HOROVOD.time(spec(mxnet_python, "plain"), warmup=3)
    assert len(times.iteration_us) == 10
    assert (times.comm_cpu_us > 0).any()


def test_gradients_fused_by_the_script_are_refused(mxnet_python, tmp_path):
    with pytest.raises(InputError, match="num_groups=0"):
        MXNET_HOROVOD.record(spec(mxnet_python, "groups"), tmp_path / "t", schedule=SCHEDULE)
    assert not (tmp_path / "t").exists()


def test_a_rank_that_fails_is_named_with_its_last_lines(mxnet_python, tmp_path):
    with pytest.raises(JobError, match=r"rank 1 .*the script failed on its own"):
        MXNET_HOROVOD.record(spec(mxnet_python, "fails"), tmp_path / "t", schedule=SCHEDULE)


def of_folder(folder: Path) -> list[str]:
    """Processes whose output goes to the folder."""
    collected = []
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if folder in path.resolve().parents:
                collected.append((path.parents[1] / "cmdline").read_text())
        except OSError:
            continue
    return collected


def test_a_job_that_hangs_is_ended_with_all_its_processes(mxnet_python, tmp_path):
    out = tmp_path.resolve() / "raw"
    with pytest.raises(JobError, match="took longer than 12 s"):
        run_mpi_job(replace(spec(mxnet_python, "hangs"), timeout_s=12), out)
    deadline = time.monotonic() + 10  # the kernel ends ranks when mpirun is gone, which takes a moment on a busy machine
    while of_folder(out) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert of_folder(out) == []


@rooted
def test_bytes_cross_the_shaped_links_of_both_hosts(mxnet_python, tmp_path):
    with ShapedHosts(2, 1e9) as hosts:
        run_mpi_job(spec(mxnet_python, "plain"), tmp_path, hosts=hosts)
        sent = [hosts.sent_bytes(host) for host in range(2)]
    gradients = 4 * ((32 + 1) * 96 + 4 * (96 + 1) * 96 + (96 + 1) * 10)
    assert min(sent) > 14 * gradients * 0.9  # a ring of two sends as much as there is
    assert "loss" in (tmp_path / "rank1" / "log").read_text()


@rooted
def test_nothing_is_left_when_the_recorder_is_killed(mxnet_python, tmp_path):
    code = (
        "import sys; from pathlib import Path; from dpro_search.collect.launch.mpi import run_mpi_job;"
        "from dpro_search.collect.launch.netns import ShapedHosts; from dpro_search.collect.launch.ranks import JobSpec\n"
        "with ShapedHosts(2) as hosts:\n"
        "    run_mpi_job(JobSpec(command=tuple(sys.argv[2:])), Path(sys.argv[1]), hosts=hosts)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), mxnet_python, str(JOB), "hangs"]
    logs = [tmp_path / f"rank{rank}" / "log" for rank in range(2)]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 60
        while not all(log.exists() for log in logs) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        pids = [int(path.parent.parent.name) for path in Path("/proc").glob("[0-9]*/fd/1") if _is_in(path, tmp_path.resolve())]
        assert pids
        process.send_signal(signal.SIGKILL)
    for pid in pids:
        _wait_until_gone(pid)
    assert of_folder(tmp_path.resolve()) == []


def _is_in(path: Path, folder: Path) -> bool:
    try:
        return folder in path.resolve().parents
    except OSError:
        return False


def _wait_until_gone(pid: int) -> None:
    """Blocks until the process has ended (10 s at most)."""
    import select

    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], 10)[0], f"process {pid} lives on"
    finally:
        os.close(fd)


def test_without_mpirun_it_says_what_to_install(mxnet_python, tmp_path, monkeypatch):
    job_spec = spec(mxnet_python, "plain")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingCapabilityError, match="openmpi-bin"):
        run_mpi_job(job_spec, tmp_path / "raw")


def test_tensorflow_trains_on_mpi_where_the_environment_asks_for_it(tensorflow_python, tmp_path):
    rate = ("--rate", "2gbit") if os.geteuid() == 0 else ()
    where = ("collect", "--out", tmp_path / "t", *rate, *WHEN, "--json")
    train = (tensorflow_python, TRAIN, "--model", "vgg16", "--batch", 1, "--steps", 16)
    result = facts_of(*where, "--", *train, HOROVOD_CONTROLLER="mpi")
    assert result["tensors"] == 32
    assert Trace.load(tmp_path / "t").meta.knobs["HOROVOD_CONTROLLER"] == "mpi"
    assert facts_of("replay", tmp_path / "t", "--json")["predicted_iteration_us"] > 0


def test_another_controller_is_refused(mxnet_python, tmp_path):
    done = dpro("collect", "--out", tmp_path / "t", "--", mxnet_python, JOB, HOROVOD_CONTROLLER="nccl")
    assert done.returncode == 2
    assert "HOROVOD_CONTROLLER=nccl: known are gloo, mpi" in done.stderr
