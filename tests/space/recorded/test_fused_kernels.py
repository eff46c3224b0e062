"""What a compiler would fuse: a changed profile takes what the job with fused kernels takes."""

import pytest
from kineto_files import START, STREAM, Profile
from kineto_machine import CALL_US, Launch, Program, Synchronize, run

from dpro_search.collect.readers.kineto.importer import read
from dpro_search.errors import InputError
from dpro_search.kinds.imported.job import Imported
from tests.profiles import iteration_us, profiled, replay_of


def job_of_program(program: Program, tmp_path, name: str = "trace.json") -> Imported:
    profile, _ = run(program, 5)
    return profiled(read([profile.write(tmp_path / name)]))


def gelu(host_us: float, *kernels_us: float) -> Program:
    names = ("vectorized_elementwise_kernel", "reduce_kernel", "layer_norm_kernel", "softmax_warp_forward")
    return [Launch(name, host_us, us) for name, us in zip(names, kernels_us, strict=False)]


DEVICE_BOUND: Program = [Launch("sgemm", 5, 300), *gelu(5, 60, 100, 80), Launch("sgemm", 5, 300), *gelu(5, 40), Synchronize(5)]
HOST_BOUND: Program = [Launch("sgemm", 100, 20), *gelu(70, 10, 12, 8), Launch("sgemm", 90, 20)]


@pytest.mark.parametrize(
    ("program", "fused"),
    [
        (DEVICE_BOUND, [Launch("sgemm", 5, 300), *gelu(5, 100), Launch("sgemm", 5, 300), *gelu(5, 40), Synchronize(5)]),
        (HOST_BOUND, [Launch("sgemm", 100, 20), *gelu(70, 12), Launch("sgemm", 90, 20)]),
    ],
)
def test_a_run_of_small_kernels_takes_what_its_longest_takes_and_one_launch(program, fused, tmp_path):
    """On a device that is busy all the time, and on one that waits for launches."""
    time_us = iteration_us(job_of_program(program, tmp_path), "compile=1")
    assert time_us == pytest.approx(iteration_us(job_of_program(fused, tmp_path, "fused.json")), abs=6)
    assert time_us < iteration_us(job_of_program(program, tmp_path)) - 15


def test_the_factor_is_that_of_the_fused_kernel(tmp_path):
    job = job_of_program(DEVICE_BOUND, tmp_path)
    assert iteration_us(job, "compile=1.5") - iteration_us(job, "compile=1") == pytest.approx(50, abs=1)


def test_products_between_element_wise_kernels_keep_them_apart(tmp_path):
    job = job_of_program([*gelu(5, 100), Launch("sgemm", 5, 300), *gelu(5, 100), Launch("sgemm", 5, 300)], tmp_path)
    with pytest.raises(InputError, match="no kernels that follow each other and that a compiler would fuse"):
        iteration_us(job, "compile=1")


@pytest.mark.parametrize("name", ["triton_poi_fused_add_0", "volta_sgemm"])
def test_what_is_compiled_or_of_a_library_is_not_fused(name, tmp_path):
    with pytest.raises(InputError, match="compile=1"):
        iteration_us(job_of_program([Launch(name, 5, 100), Launch(name, 5, 100)], tmp_path), "compile=1")


def test_what_the_optimizer_launches_is_not_of_the_model(tmp_path):
    profile = Profile()
    for number in range(5):
        begin = START + 1000 * number
        profile.op("Optimizer.step#SGD.step", begin + 390, 500)
        for place in range(4):
            at = begin + 100 + 100 * place + 200 * (place > 1)
            profile.kernel("vectorized_elementwise_kernel", at + 20, 50, launched=at, stream=STREAM, call_us=CALL_US)
        profile.step(number, begin, 999)
    job = profiled(read([profile.write(tmp_path / "trace.json")]))
    graph, changed = (replay_of(job, *speeds).timeline().graph for speeds in ((), ("compile=1",)))
    gone = [us for us, after in zip(graph.duration_us, changed.duration_us, strict=True) if after < us - 30 and us == 50]
    assert len(gone) == 1
