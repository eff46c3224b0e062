"""The predictor on a device whose file has measured ops, and which ops are measured."""

import msgspec
import numpy as np
import pytest

from dpro_search.cluster import Sample, bundled
from dpro_search.costmodel.devices import DeviceProfile, OpSpec, default_model, latency_on, probe_places
from dpro_search.costmodel.devices.choice import chosen, stack_of
from dpro_search.costmodel.devices.sampled import held_out, outside_of
from dpro_search.costmodel.devices.written import ops_of
from dpro_search.errors import InputError

L40S = bundled.device("l40s")


@pytest.fixture(scope="module")
def specs():
    return chosen(L40S, 30)


def with_samples(specs, factor=1.0, device=L40S):
    us = default_model().on(DeviceProfile(device=device)).predict(ops_of(specs, stack_of(device))).us * factor
    return msgspec.structs.replace(
        device, samples=tuple(Sample(str(spec), float(one)) for spec, one in zip(specs, us, strict=True))
    )


def test_a_device_that_was_measured_to_be_slower_is_predicted_to_be_slower(specs):
    expected = latency_on(L40S).predict(ops_of(specs, stack_of(L40S))).us
    slower = latency_on(with_samples(specs, 1.6)).predict(ops_of(specs, stack_of(L40S))).us
    assert np.median(slower / expected) == pytest.approx(1.6, rel=0.15)


def test_held_out_ops_of_a_device_that_is_as_expected_are_close_and_inside(specs):
    held_out_ops = held_out(with_samples(specs))
    assert held_out_ops.rows == len(specs) - len(probe_places(ops_of(specs, stack_of(L40S)), L40S))
    assert held_out_ops.median_ape_pct < 15
    assert held_out_ops.coverage > 0.8


def test_few_samples_say_nothing_of_errors(specs):
    assert held_out(with_samples(specs[:6])) is None
    assert held_out(L40S) is None


@pytest.mark.parametrize("factor", [1e3, 1e-3])
def test_samples_in_other_units_are_refused(specs, factor):
    with pytest.raises(InputError, match=r"L40S.*microseconds"):
        latency_on(with_samples(specs, factor))


def test_a_sample_that_is_no_op_is_named():
    device = msgspec.structs.replace(L40S, samples=(Sample("gemm bf16 m=1 n=1 k=1", 1.0), Sample("gem", 1.0)))
    with pytest.raises(InputError, match="L40S 48GB: samples, entry 1: no op is called 'gem'"):
        latency_on(device)


def test_a_core_is_said_to_be_unlike_what_the_predictor_was_fitted_to(specs):
    core = msgspec.structs.replace(
        L40S, name="one core", kind="cpu", cores=1, clock_hz=2.5e9, l2_cache_bytes=2**20, memory_bytes_per_s=2e10,
        peak=msgspec.structs.replace(L40S.peak, fp32=1.5e11),
    )  # fmt: skip
    small = [OpSpec.of("gemm", "fp32", m=size, n=size, k=size) for size in (64, 128, 256, 512)]
    text = outside_of(with_samples(small, device=core))
    assert "a CPU core, and the predictor was fitted to GPUs alone" in text
    assert "fitted to GPUs alone" not in outside_of(with_samples(specs))
    assert outside_of(L40S) == ""


def test_probes_come_first_and_short_ops_alone_are_chosen():
    targets = chosen(L40S, 12, longest_us=500.0)
    assert len(set(targets)) == 12
    assert targets[0].name == "gemm"
    rates = DeviceProfile(device=L40S).rates(default_model().usual)
    longest = max(
        float(spec.ops(stack_of(L40S)).flops[0] / rates.matrix_flops_per_s[0]) for spec in targets if spec.precision == "fp32"
    )
    assert not longest > 600.0


def test_a_larger_number_of_ops_of_a_job_holds_its_ops_only():
    ops = [OpSpec.of("gemm", "bf16", m=2048, n=size, k=1024) for size in range(64, 1024, 64)]
    targets = chosen(L40S, 15, job_ops=ops)
    assert len(set(targets) & set(ops)) == 15 - len(set(targets) - set(ops))
    assert 1 <= len(set(targets) - set(ops)) <= 5


def test_a_job_without_ops_that_can_be_measured_is_refused():
    with pytest.raises(InputError, match=r"none of the job's 1 ops is expected to take less than 0\.2 s"):
        chosen(L40S, 10, job_ops=[OpSpec.of("gemm", "fp64", m=8, n=8, k=8)])
