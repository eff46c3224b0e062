"""What all launchers do alike, on a kind of job that needs no framework; and what single ones add."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sample import sample

from dpro_search.collect.assemble.common import RankFile, RawJobFile, read_job, read_json
from dpro_search.collect.launch.ranks import JobSpec, hook_env, run_ranks
from dpro_search.collect.launch.step_times import StepSchedule
from dpro_search.collect.launchers import (
    MXNET_BYTEPS,
    MXNET_HOROVOD,
    MXNET_KVSTORE,
    TENSORFLOW_HOROVOD,
    LaunchedJob,
    Launcher,
)
from dpro_search.collect.launchers.ps_lite import explained
from dpro_search.collect.this_machine import load_warning
from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError, JobError, MissingCapabilityError
from dpro_search.kinds import assemble_raw, launcher_for, launchers
from tests.in_process import succeeds

DATA = Path(__file__).parents[1] / "data"

# A job that calls the recorder itself, where hooks would: a step every millisecond.
JOB = """
import os, sys
from dpro_search_steps import StepRecorder

class Recorder(StepRecorder):
    def write(self):
        self.write_hook(("numpy",), settings={"records": self.records, "traced": [self.first_traced, self.end_traced]},
                        told=sorted(name for name in os.environ if name.startswith("DPRO_SEARCH_HOOK_")))

recorder = Recorder()
recorder.steps += [[i * 10**6, i * 10**6 + 1, i * 1000, i * 500, False] for i in range(int(sys.argv[1]))]
"""


class ToyHookFile(RankFile, kw_only=True):
    settings: dict[str, Any]
    told: list[str]


@dataclass(frozen=True, kw_only=True)
class ToyLauncher(Launcher):
    """Ranks without a framework, and a trace that is the bundled one with what the ranks' hooks were told."""

    framework: str = "toy"
    comm: str = "none"
    format: str = "toy-none"
    environment: str = "torch"
    modules: tuple[str, ...] = ("json",)

    def start(self, run: LaunchedJob) -> None:
        run_ranks(run.spec, run.folder, [{}] * run.spec.ranks, hosts=run.hosts, hook={**run.hook, "MORE": "1"})

    def assemble(self, raw: Path) -> Trace:
        job, trace = read_job(raw, RawJobFile, self.format), sample()
        return replace(trace, meta=msgspec.structs.replace(trace.meta, command=job.command))

    def read_hook(self, folder: Path) -> ToyHookFile:
        return read_json(folder / "hook.json", ToyHookFile, "no hook ran")


def spec(steps: int = 12) -> JobSpec:
    return JobSpec(command=(sys.executable, "-c", JOB, str(steps)), ranks=2, timeout_s=30)


def test_a_job_is_recorded_with_the_schedule_it_was_asked_for(tmp_path):
    out, raw = tmp_path / "trace", tmp_path / "raw"
    schedule = StepSchedule(warmup=3, untraced=4, traced=6)
    trace = ToyLauncher().record(spec(), out, schedule=schedule, keep_raw=raw, rate_bps=1e9)
    assert Trace.load(out).meta == trace.meta
    hooks = [ToyLauncher().read_hook(raw / f"rank{rank}") for rank in range(2)]
    assert [hook.rank for hook in hooks] == [0, 1]
    assert all(hook.settings == {"records": True, "traced": [7, 13]} for hook in hooks)
    assert "DPRO_SEARCH_HOOK_MORE" in hooks[0].told, "what a launcher adds"
    job = json.loads((raw / "job.json").read_text())
    assert (job["format"], job["ranks"], job["rate_bps"], tuple(job["command"])) == ("toy-none", 2, 1e9, spec().command)


def test_raw_files_that_are_not_to_be_kept_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ToyLauncher().record(spec(), tmp_path / "trace")
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_a_running_job_is_watched(tmp_path):
    code = JOB + "\nimport time\nfor i in range(4):\n    recorder.begun_step(); print('epoch', i, flush=True); time.sleep(0.5)"
    seen = []
    job = JobSpec(command=(sys.executable, "-c", code, "12"), ranks=2, timeout_s=30)
    ToyLauncher().record(job, tmp_path / "trace", watch=seen.append)
    assert seen
    last = max(seen, key=lambda state: state.elapsed_s)
    assert last.steps == 13  # twelve, and the one that begins
    assert last.last_line in {"epoch 2", "epoch 3"}
    assert 1 < last.elapsed_s < 30


def test_the_load_of_the_machine_is_recorded(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        code = JOB + "\nimport time; time.sleep(1.5)"
        job = JobSpec(command=(sys.executable, "-c", code, "12"), ranks=1, timeout_s=30)
        trace = ToyLauncher().record(job, tmp_path / "trace", keep_raw=tmp_path / "raw")
        other.kill()
    load = Trace.load(tmp_path / "trace").meta.load
    assert load is not None
    assert load.other_cores > 0.2
    assert load_warning(msgspec.structs.replace(load, other_cores=0.3 * load.cores)) is not None
    assert load_warning(msgspec.structs.replace(load, other_cores=0.05 * load.cores)) is None
    again = ToyLauncher().trace_of(tmp_path / "raw")
    assert again.meta.load == load
    assert again.meta.warnings == trace.meta.warnings


def test_a_trace_is_never_written_over(tmp_path):
    with pytest.raises(InputError, match="exists already; remove it or choose another --out"):
        ToyLauncher().record(spec(), tmp_path)


def test_a_framework_that_is_missing_is_told_before_anything_runs(tmp_path):
    launcher = ToyLauncher(modules=("json", "no_such_framework"))
    for attempt in (lambda: launcher.record(spec(), tmp_path / "t", keep_raw=tmp_path / "raw"), lambda: launcher.time(spec())):
        with pytest.raises(MissingCapabilityError, match=r"cannot import no_such_framework; .*make_env.sh torch"):
            attempt()
    assert not list(tmp_path.iterdir())


def test_a_job_is_timed_after_its_warm_up_by_hooks_that_only_read_the_clock():
    times = ToyLauncher().time(spec(12), warmup=4)
    assert times.iteration_us.tolist() == [1000.0] * 7
    assert (times.compute_cpu_us[0], times.comm_cpu_us[0]) == (1.0, 0.5)
    assert times.peak_rss_bytes > 2**20


def test_a_job_of_too_few_steps_is_not_measured():
    with pytest.raises(JobError, match="ran 6 steps; at least 7 are needed"):
        ToyLauncher().time(spec(6), warmup=4)


def test_a_job_that_fails_leaves_no_trace(tmp_path):
    broken = replace(spec(), command=(sys.executable, "-c", "raise SystemExit('on its own')"))
    with pytest.raises(JobError, match=r"rank \d ended with code 1: on its own"):
        ToyLauncher().record(broken, tmp_path / "trace")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("told", "rank"),
    [
        ({"RANK": "3"}, 3),
        ({"RANK": "3", "HOROVOD_RANK": "2"}, 2),
        ({"HOROVOD_RANK": "2", "DPRO_SEARCH_HOOK_RANK": "1"}, 1),
        ({}, 0),
    ],
    ids=["torchrun", "Horovod", "our own launchers", "alone"],
)
def test_a_rank_s_hook_finds_its_number_whatever_started_the_rank(told, rank, tmp_path):
    env = hook_env({"MODE": "time", "FRAMEWORK": "toy"}, tmp_path, {}) | told
    subprocess.run([sys.executable, "-c", JOB, "3"], env=env, check=True)
    assert ToyLauncher().read_hook(tmp_path / f"rank{rank}").rank == rank


def test_each_kind_of_job_has_one_launcher():
    known = launchers()
    assert len({(launcher.framework, launcher.comm) for launcher in known}) == len(known)
    assert len({launcher.format for launcher in known}) == len(known)
    assert all(launcher_for(launcher.framework, launcher.comm) is launcher for launcher in known)


def test_help_names_what_can_be_recorded():
    text = succeeds("collect", "--help")
    assert all(launcher.framework in text and launcher.comm in text for launcher in launchers())


def test_a_combination_that_cannot_be_recorded_names_those_that_can():
    with pytest.raises(InputError, match=r"--framework pytorch --comm byteps: cannot be recorded; known are .*--comm fsdp"):
        launcher_for("pytorch", "byteps")


@pytest.mark.parametrize(
    ("folder", "format_name"), [("ddp_mlp", "pytorch-ddp"), ("fsdp_mlp", "pytorch-fsdp"), ("byteps_mlp", "mxnet-byteps")]
)
def test_raw_files_that_were_kept_become_a_trace_whichever_recorder_made_them(folder, format_name):
    assert assemble_raw(DATA / folder).meta.format == format_name


def test_raw_files_of_a_later_recorder_name_those_that_are_known(tmp_path):
    (tmp_path / "job.json").write_text('{"format": "pytorch-later"}')
    with pytest.raises(InputError, match=r"raw files of 'pytorch-later'; known are .*pytorch-ddp"):
        assemble_raw(tmp_path)


def described(launcher: Launcher, shaped: bool = True, **env: str) -> RawJobFile:
    plain = RawJobFile(ranks=2, command=(), machine="", recorded_at="")
    return launcher.job_file(plain, replace(spec(), env=env), shaped)


def test_horovod_s_recordings_know_its_knobs():
    knobs = {"HOROVOD_FUSION_THRESHOLD": "1024", "HOROVOD_CYCLE_TIME": "2.5", "HOROVOD_DISABLE_GROUP_FUSION": "1"}
    job = described(TENSORFLOW_HOROVOD, HOROVOD_CONTROLLER="MPI", **knobs)
    assert (job.settings.fusion_threshold_bytes, job.settings.cycle_time_us) == (1024, 2500)
    assert job.knobs == {"HOROVOD_CONTROLLER": "mpi", "HOROVOD_DISABLE_GROUP_FUSION": "1"}
    assert described(MXNET_HOROVOD, HOROVOD_CONTROLLER="gloo").knobs == {"HOROVOD_CONTROLLER": "mpi"}, "whatever is asked for"


def test_a_controller_that_cannot_be_started_is_one_line():
    with pytest.raises(InputError, match=r"^HOROVOD_CONTROLLER=nccl: known are gloo, mpi$"):
        described(TENSORFLOW_HOROVOD, HOROVOD_CONTROLLER="nccl")


@pytest.mark.parametrize("launcher", [MXNET_KVSTORE, MXNET_BYTEPS], ids=lambda launcher: launcher.comm)
def test_recordings_with_servers_know_where_these_run(launcher):
    job = described(launcher, DMLC_NUM_SERVER="3", DPRO_SEARCH_SERVER_HOSTS="workers")
    assert (job.servers, job.server_hosts, job.server_cores) == (3, ("h0", "h1", "h0"), (-1, -1, -1))
    assert job.knobs["DPRO_SEARCH_SERVER_HOSTS"] == "workers"
    assert launcher.hosts_needed(replace(spec(), env={"DMLC_NUM_SERVER": "3"})) == 5


def of_worker(launcher: Launcher, mode: str, tmp_path: Path) -> dict[str, str]:
    schedule = StepSchedule(warmup=3, untraced=4, traced=3)
    run = LaunchedJob(spec=spec(), folder=tmp_path, hosts=None, schedule=schedule, mode=mode, framework="mxnet")
    return dict(launcher.servers_of_run(run).worker_env(1))


def test_byteps_traces_the_steps_that_the_hook_profiles(tmp_path):
    env = of_worker(MXNET_BYTEPS, "record", tmp_path)
    assert (env["BYTEPS_TRACE_START_STEP"], env["BYTEPS_TRACE_END_STEP"]) == ("8", "10"), "from 1, the last included"
    assert env["BYTEPS_TRACE_DIR"] == str(tmp_path / "rank1")
    assert (tmp_path / "rank1" / "0").is_dir()
    assert "BYTEPS_VAN_TRACE" not in env


def test_a_build_of_byteps_that_logs_messages_is_told_where(tmp_path):
    logging = replace(MXNET_BYTEPS, logs=True)
    assert of_worker(logging, "record", tmp_path)["BYTEPS_VAN_TRACE"] == str(tmp_path / "rank1" / "messages.log")


def test_a_job_of_byteps_that_is_timed_is_not_traced(tmp_path):
    assert not {name for name in of_worker(MXNET_BYTEPS, "time", tmp_path) if "TRACE" in name}


TRACER = (
    "rank 1 ended with code -6: step 11 loss 0.000718 | F byteps/common/core_loops.cc:70] Check failed: "
    "task->context->part_comm_time[task->key][this_op].back()->dur == 0 tensor: byteps.gradient_296_120 task->key:31916152 type:1 "
    "'dur' has already been assigned:94767023711728"
)


def test_a_job_that_byteps_s_tracer_ended_says_what_to_do():
    assert "BYTEPS_PARTITION_BYTES" in str(explained(JobError(TRACER)))


def test_other_failures_stay_as_they_are():
    error = JobError("server0 ended with code 1: no output")
    assert explained(error) is error
