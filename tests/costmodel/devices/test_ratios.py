"""Recorded ops on another device, and what is known of bundled devices."""

import msgspec
import numpy as np
import pytest

from dpro_search.cluster import bundled
from dpro_search.costmodel.devices import OpSpec, Stack, default_model
from dpro_search.costmodel.devices.profile import known_probes, profile_of
from dpro_search.costmodel.devices.ratios import OpLatency
from tests.every_case import every_case

A100, H100 = bundled.device("a100-sxm-80gb"), bundled.device("h100-sxm")
GEMM = OpSpec.of("gemm", "bf16", m=8192, n=4096, k=4096)


def test_a_large_product_changes_by_what_both_devices_reach_of_their_peaks():
    ratio = OpLatency(A100, H100).ratios([GEMM])[GEMM]
    assert ratio.low < ratio.middle < ratio.high
    assert ratio.middle == pytest.approx(264 / 791, rel=0.12)  # TFLOP/s of probes


def test_both_directions_are_one_ratio():
    forth, back = OpLatency(A100, H100).ratios([GEMM])[GEMM], OpLatency(H100, A100).ratios([GEMM])[GEMM]
    assert forth.middle * back.middle == pytest.approx(1)


@pytest.mark.parametrize(
    "text", ["add bf16 rows=8192 length=8192", "softmax fp32 rows=8192 length=8192", "gemm fp32 m=64 n=64 k=64"]
)
def test_ops_of_which_a_roofline_is_nearer_or_that_are_mostly_launch_have_none(text):
    spec = OpSpec.parse(text)
    assert OpLatency(A100, H100).ratios([spec])[spec] is None


def test_a_device_without_specs_has_none():
    bare = msgspec.structs.replace(H100, l2_cache_bytes=None)
    assert OpLatency(A100, bare).ratios([GEMM])[GEMM] is None


@every_case("name", [name for name in bundled.names("device") if bundled.device(name).kind != "tpu"])
def test_known_probes_agree_with_the_data_sheet(name):
    profile_of(bundled.device(name)).rates(default_model().usual)  # refuses rates that contradict it


def test_devices_that_were_measured_publicly_have_probes():
    assert known_probes(H100).matrix_flops_per_s.keys() == {"bf16", "fp32", "fp8"}
    assert known_probes(msgspec.structs.replace(H100, name="another")).stream_bytes_per_s is None


def test_a_product_of_unknown_sizes_changes_as_the_square_one_that_takes_as_long():
    """A large square product itself, by what is known of it alone: its time."""
    latency, spec = OpLatency(A100, H100), OpSpec.of("gemm", "bf16", m=8192, n=8192, k=8192)
    known = latency.ratios([spec])[spec]
    took_us = float(default_model().on(profile_of(A100)).predict(spec.ops(Stack.SERVING)).us[0])
    middle, low, high = latency.ratios_of_times("gemm", "bf16", np.array([took_us]))
    assert middle[0] == pytest.approx(known.middle, rel=0.02)
    assert low[0] < middle[0] < high[0]


def test_attention_of_unknown_sizes_changes_as_that_of_the_sequence_that_takes_as_long():
    latency, spec = OpLatency(A100, H100), OpSpec.of("attention", "bf16", batch=1, heads=32, queries=4096, head_dim=128)
    took_us = float(default_model().on(profile_of(A100)).predict(spec.ops(Stack.SERVING)).us[0])
    middle, low, high = latency.ratios_of_times("attention", "bf16", np.array([took_us]))
    assert middle[0] == pytest.approx(latency.ratios([spec])[spec].middle, rel=0.02)
    assert low[0] < middle[0] < high[0]
    assert latency.ratios_of_times("reduction", "bf16", np.array([took_us])) is None


def test_short_products_gain_less_from_a_faster_device_than_long_ones():
    middle, _, _ = OpLatency(A100, H100).ratios_of_times("gemm", "bf16", np.array([15.0, 3000.0]))
    assert middle[1] < middle[0] < 1


def test_a_device_without_tf32_computes_such_products_in_fp32():
    middle, _, _ = OpLatency(bundled.device("v100-sxm2-32gb"), A100).ratios_of_times("gemm", "tf32", np.array([5000.0]))
    assert middle[0] < 0.35  # 15.7 TFLOP/s in fp32 there, 156 in tf32 here
    assert OpLatency(A100, H100).ratios_of_times("gemm", "fp64", np.array([5000.0])) is None
