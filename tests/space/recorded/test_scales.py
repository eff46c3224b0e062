"""What-ifs about one category of ops: a changed profile takes what the changed job takes."""

import numpy as np
import pytest
from kineto_files import COLLECTIVES, START, Profile, distributed
from kineto_machine import CALL_US, LATENCY_US, Launch, Program, Synchronize, run

from dpro_search.collect.readers.kineto.importer import read
from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError
from dpro_search.kinds.imported.job import Imported
from tests.profiles import iteration_us, profiled

HOST_BOUND: Program = [Launch("volta_sgemm", 100, 20), Launch("elementwise_kernel", 80, 10)]
DEVICE_BOUND: Program = [Launch("volta_sgemm", 5, 300), Launch("elementwise_kernel", 5, 100), Synchronize(5)]
ALLREDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL()"


def job_of_program(program: Program, tmp_path) -> Imported:
    profile, _ = run(program, 5)
    return profiled(read([profile.write(tmp_path / "trace.json")]))


def test_without_launch_overhead_the_kernels_remain(tmp_path):
    job = job_of_program(HOST_BOUND, tmp_path)
    assert iteration_us(job) == pytest.approx(180 + 2 * CALL_US, abs=1)
    assert iteration_us(job, "launch=0") == pytest.approx(30, abs=1)


def test_a_class_of_kernels_gets_faster_alone(tmp_path):
    job = job_of_program(DEVICE_BOUND, tmp_path)
    assert iteration_us(job) - iteration_us(job, "kernels.gemm=0.5") == pytest.approx(150, abs=1)
    assert iteration_us(job) - iteration_us(job, "kernels.elementwise=0.5") == pytest.approx(50, abs=1)


def test_the_host_counts_only_where_it_decides(tmp_path):
    assert iteration_us(job_of_program(HOST_BOUND, tmp_path), "host=0.5") == pytest.approx((180 + 2 * CALL_US) / 2, abs=1)
    bound = job_of_program(DEVICE_BOUND, tmp_path)
    assert iteration_us(bound) - iteration_us(bound, "host=0.5") < 10 + LATENCY_US


def loading_job(tmp_path) -> Trace:
    """Steps of 1000 us, of which 600 are spent in the data loader."""
    profile = Profile()
    for number in range(5):
        begin = START + 1000 * number
        profile.step(number, begin, 990)
        profile.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin + 10, 600)
        profile.kernel("volta_sgemm", begin + 706, 200, launched=begin + 700)
        call = profile.call("cudaStreamSynchronize", begin + 800, 110)
        assert call
    return read([profile.write(tmp_path / "trace.json")])


def test_loading_of_input_is_its_own_part_of_the_host(tmp_path):
    job = profiled(loading_job(tmp_path))
    before = iteration_us(job)
    assert before - iteration_us(job, "loading=0") == pytest.approx(600, abs=5)
    assert before - iteration_us(job, "loading=0.5") == pytest.approx(300, abs=5)
    assert iteration_us(job, "launch=0") >= 600, "launches without overhead still wait for their input"


def group_job(tmp_path) -> Trace:
    """Three ranks, of which the last computes for 500 us, the others for 300; an all-reduce of 100 us ends a step."""
    paths = []
    for rank in range(3):
        profile = Profile(pid=100 + rank, device=rank)
        for number in range(5):
            begin, compute = START + 1000 * number, 500 if rank == 2 else 300
            profile.step(number, begin, 990)
            profile.kernel("volta_sgemm", begin + 20, compute, launched=begin + 10)
            group = {"Process Group Ranks": "[0, 1, 2]"}
            profile.kernel(ALLREDUCE, begin + 20 + compute, 610 - compute, launched=begin + 15, stream=COLLECTIVES, **group)
            profile.call("cudaDeviceSynchronize", begin + 40, 600)
        paths.append(profile.write(tmp_path / f"rank{rank}.json", header=distributed(rank, 3)))
    return read(paths)


def test_a_slow_rank_takes_the_usual_time_of_the_others(tmp_path):
    trace = group_job(tmp_path)
    job = profiled(trace)
    assert np.isclose(iteration_us(job) - iteration_us(job, "rank2=usual"), 200, atol=10)
    assert iteration_us(job, "rank0=usual") >= iteration_us(job) - 1, "a fast rank that becomes an ordinary one gains nothing"


def test_collectives_of_a_type_and_of_a_group_can_be_free(tmp_path):
    job = profiled(group_job(tmp_path))
    free = iteration_us(job, "communication=0")
    assert free < iteration_us(job)
    assert iteration_us(job, "collectives.all_reduce=0") == pytest.approx(free, abs=1)
    assert iteration_us(job, "ranks0+1+2.communication=0") == pytest.approx(free, abs=1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kernels.attention=0.5", "the kernels of the trace are gemm"),
        ("collectives.all_gather=0", "the collectives of the trace are all_reduce"),
        ("ranks0+1.communication=0", "no collective among these ranks alone"),
        ("loading=0", "shows no loading"),
        ("rank7=usual", "the trace has ranks 0 to 2"),
    ],
)
def test_a_question_about_nothing_in_the_trace_is_one_line(tmp_path, text, reason):
    job = profiled(group_job(tmp_path))
    with pytest.raises(InputError, match=reason):
        iteration_us(job, text)
