"""What is known of a device: specs, probes, and which ops are probes."""

import msgspec
import numpy as np
import pytest

from dpro_search.cluster import bundled
from dpro_search.cluster.device import PRECISIONS
from dpro_search.costmodel.devices import (
    DeviceProfile,
    LibraryOpKind,
    Probes,
    Stack,
    experts,
    gemm,
    joined,
    probe_places,
    probes_of,
    streamed,
)  # fmt: skip
from dpro_search.costmodel.devices.features import base_us, cached_us
from dpro_search.costmodel.devices.ops import STACKS
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
    us = cached_us(np.array([small, large]), rates)
    assert small / us[0] * 1e6 == pytest.approx(rates.cache_bytes_per_s)
    assert large / us[1] * 1e6 == pytest.approx(rates.stream_bytes_per_s)
    assert rates.cache_bytes_per_s > rates.stream_bytes_per_s


def test_only_engines_stream_from_the_cache():
    profile, moved = DeviceProfile(device=A100), 0.2 * A100.l2_cache_bytes
    us = [
        base_us(streamed(LibraryOpKind.NORM, 64, 1024, moved=moved, precision="bf16", stack=stack), profile, UsualShares())[0]
        - profile.rates(UsualShares()).floor_us[STACKS.index(stack)]
        for stack in (Stack.SERVING, Stack.PYTORCH)
    ]
    assert us[0] < us[1]
    assert us[1] == pytest.approx(moved / profile.rates(UsualShares()).stream_bytes_per_s * 1e6)


def test_products_in_eight_bits_are_probes_beside_those_of_training_and_change_no_other_rate():
    h100 = bundled.device("h100-sxm")
    others = joined([gemm([512, 4096], 4096, 4096, precision="fp8"), experts(64, 4096, 1024, 8, 2, precision="bf16")])
    places = probe_places(joined([others, ops()]), h100)
    assert places.tolist() == [*(probe_places(ops(), h100) + len(others)).tolist(), 1]
    both = Probes(matrix_flops_per_s={"bf16": 7e14, "fp8": 1.8e15})
    wide = Probes(matrix_flops_per_s={"bf16": 7e14})
    shares = [DeviceProfile(device=h100, probes=probes).rates(UsualShares()).matrix_share for probes in (both, wide)]
    fp32 = PRECISIONS.index("fp32")
    assert shares[0][fp32] == shares[1][fp32]
