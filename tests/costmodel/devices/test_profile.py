"""What is known of a device: specs, probes, and which ops are probes."""

import msgspec
import numpy as np
import pytest

from dpro_search.cluster import bundled
from dpro_search.costmodel.devices import DeviceProfile, LibraryOpKind, Probes, gemm, joined, probe_places, probes_of, streamed
from dpro_search.costmodel.devices.features import streamed_us
from dpro_search.costmodel.devices.profile import UsualShares
from dpro_search.errors import InputError

A100 = bundled.device("a100-sxm-80gb")


def ops():
    return joined(
        [
            gemm([4096, 8192, 100, 1, 3], 4096, [4096, 1024, 100, 64, 4096], precision="bf16"),
            streamed(LibraryOpKind.ELEMENTWISE, [8192, 16384], 8192, moved=[4e8, 5e8], precision="bf16"),
        ]
    )


def roofline_us(ops, share=0.8, floor_us=5.0):
    return floor_us + np.maximum(ops.flops / (312e12 * share), (ops.matrix_bytes + ops.stream_bytes) / (2.039e12 * share)) * 1e6


def test_a_device_without_specs_is_refused_and_they_are_named():
    bare = msgspec.structs.replace(A100, memory_bytes_per_s=None, l2_cache_bytes=None)
    with pytest.raises(InputError, match=r"memory_rate, l2_cache not known; give them in a device file"):
        DeviceProfile(device=bare)


def test_probes_are_the_large_product_the_copy_and_the_smallest_op():
    places = probe_places(ops(), A100)
    assert {0, 5, 3} <= set(places.tolist())


def test_probes_show_the_rates_that_ops_reach():
    every = ops()
    places = probe_places(every, A100)
    probes = probes_of(every[places], roofline_us(every[places]), A100)
    assert probes.matrix_flops_per_s["bf16"] == pytest.approx(0.8 * 312e12, rel=0.02)
    assert probes.stream_bytes_per_s == pytest.approx(0.8 * 2.039e12, rel=0.03)
    assert probes.floor_us == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_times_in_other_units_are_refused(factor):
    every = ops()
    places = probe_places(every, A100)
    probes = probes_of(every[places], roofline_us(every[places]) * factor, A100)
    with pytest.raises(InputError, match="contradicts the data sheet"):
        DeviceProfile(device=A100, probes=probes)


def test_what_was_not_probed_reaches_the_usual_share():
    rates = DeviceProfile(device=A100, probes=Probes(matrix_flops_per_s={"bf16": 0.9 * 312e12})).rates(UsualShares())
    assert rates.stream_share == UsualShares().stream
    # Other precisions reach more than usual by as much as the one that was probed.
    expected = np.array(list(UsualShares().matrix_by_precision.values())) * 0.9 / UsualShares().matrix
    assert rates.matrix_share == pytest.approx(expected)


def test_small_streamed_tensors_are_read_from_the_cache_and_large_ones_from_memory():
    rates = DeviceProfile(device=A100).rates(UsualShares())
    small, large = 0.2 * A100.l2_cache_bytes, 4.0 * A100.l2_cache_bytes
    us = streamed_us(np.array([small, large]), rates)
    assert small / us[0] * 1e6 == pytest.approx(rates.cache_bytes_per_s)
    assert large / us[1] * 1e6 == pytest.approx(rates.stream_bytes_per_s)
    assert rates.cache_bytes_per_s > rates.stream_bytes_per_s


def test_the_launch_is_the_least_that_an_op_takes_beside_its_roofline():
    every = joined([gemm(1, 64, 64, precision="bf16"), streamed(LibraryOpKind.ELEMENTWISE, 1, 64, moved=256, precision="bf16")])
    places = probe_places(every, A100)
    assert set(places.tolist()) == {0, 1}
    assert probes_of(every, np.array([4.0, 2.0]), A100).floor_us == pytest.approx(2.0, abs=0.01)
