"""PowerSGD as a plan of a DDP job that was profiled on CPUs: its all-reduces and its compute take the place of the buckets'."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.trace import TensorInfo, Trace
from dpro_search.costmodel.powersgd import low_rank
from dpro_search.errors import InputError
from dpro_search.kinds import PlanOptions, job_of
from dpro_search.space.plan import Plan
from tests.collect.kineto_files import START, Profile, distributed
from tests.kinds.test_profiled_ddp import trace_of as gpu_trace

SHAPES = ((512, 512), (512, 1024), (1024,), (1024, 1024))  # of the gradients, in the order in which they become ready
BUCKETS = (2, 2)
GLOO = 300
POST_US, DELAY_US, LATENCY_US, RATE_BYTES_PER_US = 30.0, 5.0, 100.0, 500.0
LOSSY = PlanOptions(allow_lossy=True)


def transfer_us(size_bytes: float) -> float:
    return LATENCY_US + size_bytes / RATE_BYTES_PER_US


def profiles(
    *,
    steps: int = 5,
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
    buckets: tuple[int, ...] = BUCKETS,
    powersgd: int | None = None,
) -> tuple[list[Profile], float]:
    """Two ranks on Gloo, and how long a step takes; under PowerSGD each bucket is sent where it is full, before all else."""
    tensors = [TensorInfo(name="", node="", dtype="float32", shape=shape, size_bytes=4 * math.prod(shape)) for shape in shapes]
    bucket_of = np.repeat(np.arange(len(buckets)), buckets)
    sent = None if powersgd is None else low_rank(tensors, bucket_of, powersgd)
    ranks = [Profile(pid=100 + rank, device=rank) for rank in range(2)]
    begin, step_us = float(START), 0.0
    for number in range(steps):
        now, free, ends, gradient = begin + 5, 0.0, [], 0
        rows: list[tuple[str, float, float, dict[str, Any]]] = [("DistributedDataParallel.forward", now, 500.0, {})]
        gloo: list[tuple[float, float, int]] = []
        now += 500
        for bucket, members in enumerate(buckets):
            for _ in range(members):
                rows.append(("aten::mm", now, 395.0, {}))
                dims = {"Input Dims": [list(shapes[gradient])], "Input type": ["float"]}
                rows.append(("torch::autograd::AccumulateGrad", now + 400, 10.0, dims))
                rows.append(("torch::distributed::reducer::copy_", now + 412, 20.0, {}))
                now, gradient = now + 432, gradient + 1
            parts = [4 * sum(math.prod(shape) for shape in shapes[gradient - members : gradient])]
            stages: list[float] = [0.0]
            if sent is not None:
                parts, stages = sent.sent_bytes[bucket].tolist(), sent.stages_us[bucket].tolist()
            for size, stage_us in zip(parts, stages, strict=False):
                now += stage_us
                if not size:
                    continue
                rows.append(("c10d::allreduce_", now + 1, POST_US, {"Input Dims": [[[size // 4]]], "Input type": ["TensorList"]}))
                now += 1 + POST_US
                start = max(now + DELAY_US, free)
                free = start + transfer_us(size)
                gloo.append((start, transfer_us(size), int(size // 4)))
                if sent is not None:
                    now = free + 2
            now += 0.0 if sent is None else stages[-1]
            ends.append(free)
        gradient = 0
        for members, end in zip(buckets, ends, strict=True):
            now = max(now, end + 2)
            for _ in range(members):
                rows.append(("torch.distributed.ddp.reducer::copy_bucket_to_grad", now, 40.0, {}))
                now, gradient = now + 41, gradient + 1
        rows.append(("Optimizer.step#SGD.step", now, 200.0, {}))
        now += 205
        for profile in ranks:
            profile.step(number, begin, now - begin)
            for name, at, length, args in rows:
                profile.op(name, at, length, **args)
            for at, length, elements in gloo:
                args = {"Input Dims": [[elements]], "Input type": ["float"]}
                profile.add("user_annotation", "gloo:all_reduce", at, length, GLOO, args)
        begin, step_us = now + 5, now + 5 - begin
    return ranks, step_us


def cpu_trace(folder: Path, **options: Any) -> Trace:
    both_profiles, _ = profiles(**options)
    headers = [distributed(rank, 2) | {"host_name": "one"} for rank in range(2)]
    return import_trace([p.write(folder / f"rank{rank}.json", header=headers[rank]) for rank, p in enumerate(both_profiles)])


@pytest.fixture(scope="module")
def job(tmp_path_factory: Any) -> Any:
    return job_of(cpu_trace(tmp_path_factory.mktemp("profiles")), LOSSY)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_step_takes_what_the_job_that_follows_the_plan_takes(job: Any, rank: int) -> None:
    assert job.predict(Plan()).iteration_us == pytest.approx(profiles()[1], rel=0.01)
    followed_us = profiles(powersgd=rank)[1]
    assert job.predict(Plan(compression=f"powersgd-{rank}")).iteration_us == pytest.approx(followed_us, rel=0.03)


def test_each_bucket_sends_what_is_no_matrix_then_p_then_q(job: Any) -> None:
    """The first bucket has matrices only, of which there is nothing to send first."""
    names = job.timeline(Plan(compression="powersgd-1")).graph.names
    sent = [name.removesuffix("@0") for name in names if name.startswith(("vectors", "P of", "Q of")) and name.endswith("@0")]
    assert sorted(sent) == ["P of bucket 0", "P of bucket 1", "Q of bucket 0", "Q of bucket 1", "vectors of bucket 1"]
    assert not any(name.startswith("gloo:all_reduce") for name in names)


def test_other_buckets_go_with_it(job: Any) -> None:
    """A single bucket computes and sends the same factors with fewer all-reduces, behind the whole backward pass."""
    together = Plan.of(compression="powersgd-1", bucket_cap_bytes=2**30)
    names = [name for name in job.timeline(together).graph.names if name.startswith("P of bucket")]
    assert len(names) == 2, "one bucket of two ranks"
    followed_us = profiles(buckets=(4,), powersgd=1)[1]
    assert job.predict(together).iteration_us == pytest.approx(followed_us, rel=0.03)


def test_the_interval_holds_the_error_of_the_hooks_compute(job: Any) -> None:
    plan = Plan(compression="powersgd-4")
    low, high = job.predict(plan).interval_us
    assert (high - low) / 2 > job.job._compute_error_us(plan) > 0


def test_it_is_searched_with_lossy_plans_only(job: Any) -> None:
    (choice,) = (choice for choice in job.space.choices if choice.name == "compression")
    assert [point["compression"] for point in choice.grids["set"]] == ["fp16", "powersgd-4", "powersgd-2", "powersgd-1"]
    with pytest.raises(InputError, match="changes the numbers; only with --allow-lossy"):
        job_of(job.trace).predict(Plan(compression="powersgd-1"))


def test_what_cannot_be_compressed_is_refused_in_one_line(tmp_path: Path, job: Any) -> None:
    vectors = job_of(cpu_trace(tmp_path, shapes=((4096,),) * 4), LOSSY)
    assert "would compress no gradient of this job" in str(vectors.space.refusal(Plan(compression="powersgd-1")))
    assert "needs NCCL, and this job was profiled on CPUs" in str(job.space.refusal(Plan(compression="bf16")))
    on_gpus = job_of(gpu_trace(), LOSSY)
    assert "was measured on CPUs, and this job was profiled on GPUs" in str(on_gpus.space.refusal(Plan(compression="powersgd-1")))
