"""The predictor that the package ships."""

import numpy as np
import pytest

from dpro_search.cluster import bundled
from dpro_search.costmodel.devices import (
    DeviceProfile,
    LibraryOpKind,
    Probes,
    Stack,
    attention,
    default_model,
    gemm,
    joined,
    streamed,
)  # fmt: skip
from dpro_search.costmodel.devices.model_file import load
from dpro_search.costmodel.intervals import PredictionOrigin
from dpro_search.errors import InputError, TraceFormatError

PROBED = Probes(matrix_flops_per_s={"bf16": 2.5e14}, stream_bytes_per_s=1.6e12, floor_us=3.0)


def a100(probes=PROBED):
    return DeviceProfile(device=bundled.device("a100-sxm-80gb"), probes=probes)


def some_ops():
    random = np.random.default_rng(0)
    m, n, k = (2.0 ** random.integers(6, 13, 40) for _ in range(3))
    return gemm(m, n, k, precision="bf16", stack=Stack.SERVING, transposes=1.0)


def test_a_large_product_takes_what_its_arithmetic_takes():
    op = gemm(4096, 4096, 4096, precision="bf16", stack=Stack.SERVING, transposes=1.0)
    prediction = default_model().on(a100()).predict(op)
    ideal_us = op.flops[0] / 312e12 * 1e6
    assert ideal_us < prediction.us[0] < 1.6 * ideal_us
    assert prediction.low_us[0] < prediction.us[0] < prediction.high_us[0]
    assert prediction.origin[0] == PredictionOrigin.INTERPOLATED


def test_intervals_narrow_from_specs_to_probes_to_samples():
    ops = some_ops()
    model = default_model()
    us = model.on(a100()).predict(ops).us
    ways = (model.on(a100(Probes())), model.on(a100()), model.on(a100(), ops, us))
    specs, probed, sampled = (np.log(found.high_us / found.low_us).mean() for found in (way.predict(ops) for way in ways))
    assert specs > probed > sampled


def test_probes_make_no_interval_wider():
    profiles = (DeviceProfile(device=bundled.device("h100-sxm")), DeviceProfile(device=bundled.device("h100-sxm"), probes=PROBED))
    for precision in ("bf16", "fp8"):
        op = gemm(4096, 4096, 4096, precision=precision, stack=Stack.SERVING, transposes=1.0)
        specs, probed = (default_model().on(profile).predict(op) for profile in profiles)
        assert probed.high_us[0] / probed.us[0] <= specs.high_us[0] / specs.us[0]


def test_samples_of_a_device_that_is_slower_than_expected_make_all_its_ops_slower():
    ops = some_ops()
    model = default_model()
    expected = model.on(a100()).predict(ops).us
    slower = model.on(a100(), ops[:20], 1.5 * expected[:20]).predict(ops[20:]).us
    assert np.median(slower / expected[20:]) == pytest.approx(1.5, rel=0.15)


def test_a_precision_that_was_never_measured_is_refused():
    prediction = default_model().on(a100()).predict(gemm(512, 512, 512, precision="fp64"))
    assert prediction.origin[0] == PredictionOrigin.REFUSED
    assert np.isnan(prediction.us[0])


def test_a_precision_that_a_device_has_no_units_for_is_refused():
    prediction = default_model().on(a100()).predict(gemm(512, 512, 512, precision="fp8", stack=Stack.SERVING))
    assert prediction.origin[0] == PredictionOrigin.REFUSED
    assert np.isnan(prediction.us[0])


def test_eight_and_four_bits_are_faster_than_sixteen_where_a_device_computes_them():
    on_b200 = default_model().on(DeviceProfile(device=bundled.device("b200-sxm")))
    us = [
        on_b200.predict(gemm(8192, 8192, 8192, precision=precision, stack=Stack.SERVING, transposes=1.0)).us[0]
        for precision in ("bf16", "fp8", "fp4")
    ]
    assert us[0] > us[1] > us[2] > 0


def test_a_decoding_step_takes_what_reading_its_cache_takes():
    h100 = bundled.device("h100-sxm")
    few, many = (
        attention(64, 32, kv_heads, 1, 8192, 128, causal=True, precision="bf16", stack=Stack.SERVING) for kv_heads in (8, 32)
    )
    for op in (few, many):
        us = default_model().on(DeviceProfile(device=h100)).predict(op).us[0]
        ideal_us = op.matrix_bytes[0] / h100.memory_bytes_per_s * 1e6
        assert ideal_us < us < 2 * ideal_us
    assert many.matrix_bytes[0] / few.matrix_bytes[0] == pytest.approx(4, rel=0.01)


def test_samples_in_eight_bits_change_nothing_of_what_training_runs():
    profile = DeviceProfile(device=bundled.device("h100-sxm"))
    model, ops = default_model(), some_ops()
    narrow = gemm(ops.m, ops.n, ops.k, precision="fp8", stack=Stack.SERVING, transposes=1.0)
    us = 1.5 * model.on(profile).predict(narrow).us
    sampled = model.on(profile, narrow[:20], us[:20])
    assert sampled.predict(ops).us == pytest.approx(model.on(profile).predict(ops).us, rel=1e-12)
    assert np.median(sampled.predict(narrow[20:]).us / us[20:]) == pytest.approx(1.0, abs=0.15)
    both = sampled.predict(joined([narrow, ops]))
    assert both.us == pytest.approx([*sampled.predict(narrow).us, *sampled.predict(ops).us])


def test_sizes_beyond_what_was_measured_widen_and_then_refuse():
    rows = [2.0**13, 2.0**23, 2.0**60]
    ops = streamed(LibraryOpKind.SOFTMAX, rows, 4096.0, moved=[row * 4096 * 8 for row in rows], precision="fp32")
    profile = a100(Probes(matrix_flops_per_s={"fp32": 1.8e13}, stream_bytes_per_s=1.6e12, floor_us=30.0))
    inside, outside, far = default_model().on(profile).predict(ops).origin
    assert (inside, outside, far) == (PredictionOrigin.INTERPOLATED, PredictionOrigin.EXTRAPOLATED, PredictionOrigin.REFUSED)


@pytest.mark.parametrize("factor", [1e3, 1e-3])
def test_samples_in_other_units_are_refused(factor):
    ops = some_ops()
    us = default_model().on(a100()).predict(ops).us
    with pytest.raises(InputError, match="are they in microseconds"):
        default_model().on(a100(), ops, us * factor)


def test_all_kinds_of_ops_are_predicted():
    ops = joined(
        [
            gemm(2048, 2048, 512, precision="fp32", products=2, kernels=2, backward=True),
            attention(4, 16, 16, 2048, 2048, 64, causal=True, precision="bf16", stack=Stack.SERVING),
            *(
                streamed(kind, 4096, 1024, moved=3 * 4 * 4096 * 1024, precision="fp32")
                for kind in (LibraryOpKind.NORM, LibraryOpKind.SOFTMAX, LibraryOpKind.ELEMENTWISE, LibraryOpKind.OPTIMIZER)
            ),
        ]
    )
    us = default_model().on(a100(Probes())).predict(ops).us
    assert (us > 0).all()
    assert (us < 1e5).all()


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "latency.npz"
    path.write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(TraceFormatError, match=r"latency.npz: damaged or no file of op latencies"):
        load(path)
