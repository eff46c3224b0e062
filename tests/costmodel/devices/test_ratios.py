"""Recorded ops on another device, and what is known of bundled devices."""

import msgspec
import pytest

from dpro_search.cluster import bundled
from dpro_search.costmodel.devices import OpSpec
from dpro_search.costmodel.devices.known_probes import known_probes, profile_of
from dpro_search.costmodel.devices.model_file import default_model
from dpro_search.costmodel.devices.ratios import OpRatios

A100, H100 = bundled.device("a100-sxm-80gb"), bundled.device("h100-sxm")
GEMM = OpSpec.of("gemm", "bf16", m=8192, n=4096, k=4096)


def test_a_large_product_changes_by_what_both_devices_reach_of_their_peaks():
    found = OpRatios(A100, H100).of([GEMM])[GEMM]
    assert found.low < found.middle < found.high
    assert found.middle == pytest.approx(264 / 791, rel=0.12)  # TFLOP/s of probes


def test_both_directions_are_one_ratio():
    there, back = OpRatios(A100, H100).of([GEMM])[GEMM], OpRatios(H100, A100).of([GEMM])[GEMM]
    assert there.middle * back.middle == pytest.approx(1)


@pytest.mark.parametrize(
    "text", ["add bf16 rows=8192 length=8192", "softmax fp32 rows=8192 length=8192", "gemm fp32 m=64 n=64 k=64"]
)
def test_ops_of_which_a_roofline_is_nearer_or_that_are_mostly_launch_have_none(text):
    spec = OpSpec.parse(text)
    assert OpRatios(A100, H100).of([spec])[spec] is None


def test_a_device_without_specs_has_none():
    bare = msgspec.structs.replace(H100, l2_cache_bytes=None)
    assert OpRatios(A100, bare).of([GEMM])[GEMM] is None


@pytest.mark.parametrize("name", bundled.names("device"))
def test_known_probes_agree_with_the_data_sheet(name):
    profile_of(bundled.device(name)).rates(default_model().usual)  # refuses rates that contradict it


def test_devices_that_were_measured_publicly_have_probes():
    assert known_probes(H100).matrix_flops_per_s.keys() == {"bf16", "fp32"}
    assert known_probes(msgspec.structs.replace(H100, name="another")).stream_bytes_per_s is None
