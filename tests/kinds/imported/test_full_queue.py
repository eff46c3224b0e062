"""GPU-bound jobs whose host is far ahead: what it launched before the profiler's window is no part of what a launch takes."""

from __future__ import annotations

import pytest

from dpro_search.collect.readers.kineto.importer import read
from dpro_search.kinds import PlanOptions, job_of
from dpro_search.machine import machine_constants
from dpro_search.space.plan import Plan
from dpro_search.space.recorded.ops import recorded_ops
from dpro_search.space.replay_graph import OpKind, OrderPolicy
from tests.collect.kineto_files import START, Profile
from tests.profiles import under

KERNEL_US, KERNELS, AHEAD = 100.0, 5, 20
HOST_US = 150.0  # of a step


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Steps of kernels that are launched a while before they run, behind those from before the window."""
    profile = Profile()
    for number in range(AHEAD):
        profile.kernel("gemm", START + number * KERNEL_US, KERNEL_US)
    for step in range(4):
        begin = START + step * HOST_US
        profile.step(step, begin, HOST_US - 1)
        for number in range(KERNELS):
            runs = START + (AHEAD + step * KERNELS + number) * KERNEL_US
            profile.kernel("gemm", runs, KERNEL_US, launched=begin + 10 + 20 * number, call_us=1.0)
    return job_of(read([profile.write(tmp_path_factory.mktemp("queue") / "rank0.json")]), PlanOptions())


def test_a_step_takes_what_its_kernels_take(job):
    assert job.predict(Plan()).iteration_us == pytest.approx(KERNELS * KERNEL_US)


def test_shorter_kernels_make_it_shorter(job):
    faster = under(job.job, "kernels.gemm=0.5").predict(Plan()).iteration_us
    assert faster == pytest.approx(0.5 * KERNELS * KERNEL_US)


def test_a_launch_does_not_take_the_time_in_the_queue(job):
    ops = recorded_ops(job.trace)
    launches = (ops.policy[ops.device] == OrderPolicy.UNBOUNDED) & (ops.kind == OpKind.HOST) & (ops.step > 0)
    assert launches.sum() == 3 * KERNELS
    assert ops.duration_us[launches].max() <= machine_constants().gpu.launch_us
