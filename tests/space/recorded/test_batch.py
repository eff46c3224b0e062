"""A larger batch of a profile: kernels of the passes take longer, host threads and the optimizer do not."""

import pytest
from kineto_machine import Launch, Program, Synchronize, run

from dpro_search.collect.readers.kineto.importer import read
from dpro_search.errors import InputError
from dpro_search.kinds import job_of
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scale
from tests.profiles import under

DEVICE_BOUND: Program = [Launch("sgemm", 5, 300), Launch("vectorized_elementwise_kernel", 5, 100), Synchronize(5)]
HOST_BOUND: Program = [Launch("sgemm", 100, 10), Launch("vectorized_elementwise_kernel", 90, 10), Launch("sgemm", 90, 10)]
WITH_OPTIMIZER: Program = [Launch("sgemm", 5, 300), Launch("multi_tensor_apply_kernel", 5, 200), Synchronize(5)]


def job_of_program(program: Program, tmp_path):
    profile, _ = run(program, 5)
    return job_of(read([profile.write(tmp_path / "trace.json")]))


def predicted(job, text: str):
    return under(job.job, text).predict(Plan())


def test_on_a_busy_device_a_step_grows_with_the_batch(tmp_path):
    job = job_of_program(DEVICE_BOUND, tmp_path)
    recorded_us = job.predict(Plan()).iteration_us
    assert predicted(job, "batch=2").iteration_us - recorded_us == pytest.approx(400, abs=6)
    assert predicted(job, "batch=0.5").iteration_us - recorded_us == pytest.approx(-200, abs=6)


def test_on_a_waiting_device_a_larger_batch_is_free(tmp_path):
    job = job_of_program(HOST_BOUND, tmp_path)
    assert predicted(job, "batch=2").iteration_us == pytest.approx(job.predict(Plan()).iteration_us, rel=0.05)


def test_the_optimizer_takes_as_long_as_ever(tmp_path):
    job = job_of_program(WITH_OPTIMIZER, tmp_path)
    assert predicted(job, "batch=2").iteration_us - job.predict(Plan()).iteration_us == pytest.approx(300, abs=6)


def test_the_interval_holds_the_step_whose_kernels_do_not_grow(tmp_path):
    job = job_of_program(DEVICE_BOUND, tmp_path)
    low_us, high_us = predicted(job, "batch=2").interval_us
    assert low_us <= job.predict(Plan()).iteration_us
    assert high_us >= predicted(job, "batch=2").iteration_us


def test_what_is_assumed_is_said(tmp_path):
    job = job_of_program(DEVICE_BOUND, tmp_path)
    assert any("with 2 times the batch" in sentence for sentence in under(job.job, "batch=2").assumptions)
    assert not any("batch" in sentence for sentence in job.assumptions)


@pytest.mark.parametrize("text", ["batch=0", "rank1.batch=2", "batch.gemm=2"])
def test_what_no_batch_can_be_is_refused(text):
    with pytest.raises(InputError):
        Scale.parse(text)
