"""Recording a real two-rank job that ``fully_shard`` divides, without a line added to its script."""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.launch.step_times import StepSchedule
from dpro_search.collect.launchers import PYTORCH_DDP, PYTORCH_FSDP
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.errors import InputError
from dpro_search.graph.fsdp import Purpose, build_fsdp_graph
from dpro_search.kinds import job_of
from dpro_search.space.plan import Plan
from tests.integration.torch_losses import assert_same_losses_unrecorded
from tests.recordings import of_the_job

pytestmark = pytest.mark.integration

TRAIN = Path(__file__).parents[2] / "experiments" / "workloads" / "torch_train.py"
JOB = Path(__file__).with_name("fsdp_job.py")
SCHEDULE = StepSchedule(warmup=3, untraced=4, traced=3)


def spec(python: str, *how: object) -> JobSpec:
    return JobSpec(command=(python, str(JOB), *map(str, how)), ranks=2, cores=default_cores(2))


@pytest.fixture(scope="module")
def recorded(torch_python: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Trace]]:
    """Raw files and trace of a job of a shape, which is recorded once."""

    @functools.cache
    def record(how: str) -> tuple[Path, Trace]:
        folder = tmp_path_factory.mktemp("recorded")
        return folder / "raw", PYTORCH_FSDP.record(
            spec(torch_python, how), folder / "t", schedule=SCHEDULE, keep_raw=folder / "raw"
        )

    return record


def purposes(trace: Trace) -> list[int]:
    return np.bincount(build_fsdp_graph(trace).purpose, minlength=4).tolist()


@pytest.mark.parametrize(
    ("how", "gathers", "again", "scatters"),
    [
        ("plain", 4, 3, 4),
        ("prefetch", 4, 3, 4),
        ("keep", 4, 0, 4),
        ("grouped", 3, 2, 3),
        ("accumulate", 8, 6, 4),
        ("by-hand,prefetch", 4, 3, 4),
    ],
)
def test_steps_units_and_collectives_are_found_in_jobs_of_all_shapes(recorded, how, gathers, again, scatters):
    _, trace = recorded(how)
    assert of_the_job(trace.meta.warnings) == []
    assert trace.steps.index[trace.steps.rank == 0].tolist() == list(range(13))  # 14 steps ran, the last has no successor
    assert len(trace.tensors) == 8
    assert (trace.events.kind == EventKind.COMM).sum() == 2 * 3 * 8
    assert purposes(trace) == [gathers, again, scatters, 0]
    assert len(trace.graph_of_rank) == 2
    assert job_of(trace).predict(Plan()).iteration_us > 0


def test_the_blocks_of_a_workload_are_its_units(torch_python, tmp_path):
    command = (torch_python, str(TRAIN), "--model", "vgg16", "--batch", "2", "--steps", "14", "--fsdp")
    trace = PYTORCH_FSDP.record(JobSpec(command=command, ranks=2, cores=default_cores(2)), tmp_path / "t", schedule=SCHEDULE)
    assert purposes(trace) == [8, 8, 8, 0]
    assert build_fsdp_graph(trace).size_bytes[Purpose.FORWARD] > 0
    assert sum(tensor.size_bytes for tensor in trace.tensors) > 40e6


def test_the_recorder_changes_no_number(torch_python, recorded, tmp_path):
    raw, _ = recorded("prefetch")
    assert_same_losses_unrecorded(torch_python, raw, (JOB, "prefetch"), 29518, tmp_path)


def test_a_job_is_timed_without_the_profiler(torch_python):
    assert (PYTORCH_DDP.time(spec(torch_python, "plain"), warmup=3).iteration_us > 0).all()


def test_a_sharded_job_is_not_taken_for_another(torch_python, tmp_path):
    with pytest.raises(InputError, match="record it with --comm fsdp"):
        PYTORCH_DDP.record(spec(torch_python, "plain"), tmp_path / "t", schedule=SCHEDULE)
