"""Recording a real two-rank DistributedDataParallel job without a line added to its script."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpro_search.collect.assemble.torch.job import assemble_torch
from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.launch.step_times import StepSchedule
from dpro_search.collect.launchers import PYTORCH_DDP
from dpro_search.collect.trace import EventKind, TensorInfo, Trace
from dpro_search.errors import InputError, JobError
from dpro_search.kinds import PlanOptions, job_of
from dpro_search.kinds._program import program_replay
from dpro_search.kinds.ddp.job import Ddp
from dpro_search.space.plan import Plan
from dpro_search.space.programs.ddp_job import bucket_assignment
from dpro_search.space.scenario import Scenario
from tests.faults.processes import dpro
from tests.integration.torch_losses import assert_same_losses_unrecorded
from tests.recordings import of_the_job

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "experiments" / "workloads" / "torch_train.py"
JOB = Path(__file__).with_name("ddp_job.py")
SCHEDULE = StepSchedule(warmup=3, untraced=4, traced=3)


def collect(out: Path, *job: object) -> subprocess.CompletedProcess[str]:
    rate = ("--rate", "2gbit") if os.geteuid() == 0 else ()
    return dpro("collect", "--framework", "pytorch", "--comm", "ddp", "--out", out, "--hosts", 2, *rate, "--json", "--", *job)


def spec(python: str, *how: object) -> JobSpec:
    return JobSpec(command=(python, str(JOB), *map(str, how)), ranks=2, cores=default_cores(2))


@pytest.fixture(scope="module")
def recorded(torch_python: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("recorded") / "trace"
    done = collect(out, torch_python, TRAIN, "--model", "vgg16", "--batch", 2, "--steps", 30)
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout)


def test_a_recording_says_what_it_holds(recorded):
    out, result = recorded
    assert result["trace"] == str(out)
    assert (result["ranks"], result["steps"], result["tensors"]) == (2, 11, 32)
    assert result["measured_iteration_us"] > 0
    assert of_the_job(result["warnings"]) == []
    assert result["overhead_pct"] is not None


def test_it_holds_every_gradient_and_bucket_of_every_rank_and_step(recorded):
    trace = Trace.load(recorded[0])
    moved = sum(tensor.size_bytes for tensor in trace.tensors)
    for rank in range(2):
        chosen_events = trace.events.select(trace.events.rank == rank)
        assert (chosen_events.kind == EventKind.COMM).sum() == 32 * 11
        buckets = chosen_events.select(chosen_events.kind == EventKind.COLLECTIVE)
        assert buckets.size_bytes.sum() == moved * 11
        cpu = trace.steps.comm_cpu_us[trace.steps.rank == rank]
        assert (cpu > 0).all()  # of Gloo's threads


def test_the_recorded_setting_is_predicted(recorded):
    prediction = job_of(Trace.load(recorded[0])).predict(Plan())
    # A machine that also runs tests is noisy: this asks for the right size, docs/accuracy.md for accuracy.
    assert prediction.iteration_us == pytest.approx(recorded[1]["measured_iteration_us"], rel=0.4)


@pytest.mark.parametrize("how", ["accumulate", "by-hand", "unused", "static", "accumulate,unused,view"])
def test_steps_and_buckets_are_found_in_jobs_of_other_shapes(torch_python, tmp_path, how):
    trace = PYTORCH_DDP.record(spec(torch_python, how), tmp_path / "t", schedule=SCHEDULE)
    assert trace.steps.index[trace.steps.rank == 0].tolist() == list(range(13))  # 14 steps ran, the last has no successor
    assert trace.steps.traced.sum() == 2 * 3
    assert len(trace.tensors) == 14
    assert of_the_job(trace.meta.warnings) == []
    assert (trace.events.kind == EventKind.COMM).sum() == 2 * 3 * 14
    # Both ranks ran the same operators; in which order those of two threads come is chance.
    assert len({tuple(sorted(graph.name)) for graph in trace.graphs}) == 1


def test_a_hook_that_compresses_moves_half_of_the_bytes(torch_python, tmp_path):
    trace = PYTORCH_DDP.record(spec(torch_python, "half,static,view"), tmp_path / "t", schedule=SCHEDULE)
    assert trace.meta.knobs["comm_hook"] == "fp16_compress_hook"
    assert of_the_job(trace.meta.warnings) == []
    moved = trace.events.select((trace.events.kind == EventKind.COLLECTIVE) & (trace.events.rank == 0) & (trace.events.step == 8))
    reduced = np.array([trace.names[name] == "allreduce" for name in moved.name])
    gradients = sum(tensor.size_bytes for tensor in trace.tensors)
    assert moved.size_bytes[reduced].sum() == gradients / 2
    job = program_replay(Ddp.of(trace, PlanOptions()).lower(Scenario(plan=Plan.of(bucket_cap_bytes=10**9)))).job
    assert job.size_bytes[-1] == gradients / 2


@pytest.fixture(scope="module")
def small(torch_python: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    """Raw files and trace of a small job."""
    folder = tmp_path_factory.mktemp("small")
    return folder / "raw", PYTORCH_DDP.record(spec(torch_python, "plain"), folder / "t", schedule=SCHEDULE, keep_raw=folder / "raw")


def test_the_recorder_changes_no_number(torch_python, small, tmp_path):
    raw, _ = small
    assert_same_losses_unrecorded(torch_python, raw, (JOB, "plain"), 29517, tmp_path)


def test_raw_files_give_the_same_trace_again(small):
    raw, trace = small
    np.testing.assert_array_equal(assemble_torch(raw).events.start_us, trace.events.start_us)


def test_a_job_is_timed_without_the_profiler(torch_python):
    times = PYTORCH_DDP.time(spec(torch_python, "plain"), warmup=3)
    assert len(times.iteration_us) == 10
    assert (times.iteration_us > 0).all()


BUCKETS = """
import json, sys, torch
import torch.distributed as dist
sizes, limits = json.loads(sys.argv[1])
tensors = [torch.empty(size) for size in sizes]
print(json.dumps(dist._compute_bucket_assignment_by_size(tensors, limits, [], list(range(len(sizes))))[0]))
"""


@pytest.mark.parametrize("limits", [[1], [1000], [100, 4000], [10**9]])
def test_buckets_follow_the_rule_of_pytorch_itself(torch_python, limits):
    sizes = np.random.default_rng(3).integers(1, 600, 60).tolist()
    command = [torch_python, "-c", BUCKETS, json.dumps([sizes, limits])]
    theirs = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    tensors = [TensorInfo(name=str(i), node="", dtype="float32", shape=(n,), size_bytes=4 * n) for i, n in enumerate(sizes)]
    ours = bucket_assignment(tensors, limits)
    assert [np.flatnonzero(ours == number).tolist() for number in range(ours.max() + 1)] == theirs


def test_a_job_without_a_parallel_module_is_one_line(torch_python, tmp_path):
    done = collect(tmp_path / "t", torch_python, JOB, "alone")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "DistributedDataParallel" in line
    assert not (tmp_path / "t").exists()


def test_a_job_that_is_too_short_says_how_many_steps_ran(torch_python, tmp_path):
    with pytest.raises(InputError, match="only 3 steps ran"):
        PYTORCH_DDP.record(spec(torch_python, "plain", 3), tmp_path / "t", schedule=SCHEDULE)
    with pytest.raises(JobError, match="ran 3 steps"):
        PYTORCH_DDP.time(spec(torch_python, "plain", 3))


def test_an_interpreter_without_the_framework_is_one_line(tmp_path):
    assert shutil.which(sys.executable)
    done = collect(tmp_path / "t", sys.executable, "train.py")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "torch" in line


def test_what_cannot_be_recorded_together_is_one_line(tmp_path):
    done = dpro("collect", "--framework", "pytorch", "--comm", "horovod", "--out", tmp_path / "t", "--", "python", "x.py")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--framework pytorch --comm ddp" in line
