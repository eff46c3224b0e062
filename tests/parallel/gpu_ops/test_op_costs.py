"""Costs of ops on GPUs stay under their roofs, and grow with what they do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.cluster import bundled, parse_cluster
from dpro_search.errors import InputError
from dpro_search.parallel.gpu_ops import OpCosts, achieved_by


def device(machine):
    return parse_cluster(f"1x{machine}").groups[0].host.device


SIZES = st.integers(1, 2**14)


@given(m=SIZES, k=SIZES, n=SIZES, machine=st.sampled_from(["hgx-h100", "dgx-a100-80", "hgx-b200", "l40s-pcie-8", "dgx-1-v100"]))
def test_a_matmul_is_never_faster_than_its_roofs(m, k, n, machine):
    chosen = device(machine)
    precision = "fp16"
    time_us = OpCosts(chosen, precision).matmul_us(m, k, n)
    assert time_us >= 2 * m * k * n / chosen.peak_flops_per_s(precision) * 1e6
    assert time_us >= 2 * (m * k + k * n + m * n) / chosen.memory_bytes_per_s * 1e6


@given(m=SIZES, k=SIZES, n=SIZES)
def test_more_to_reduce_never_takes_less(m, k, n):
    costs = OpCosts(device("hgx-h100"))
    assert costs.matmul_us(m, 2 * k, n) >= costs.matmul_us(m, k, n)


def test_large_matmuls_reach_the_measured_share_of_the_peak():
    """Median of 4,485 bf16 matmuls with all sizes of 2,048 and above on an H100: 784 TFLOP/s (aiconfigurator-core 0.12.0)."""
    tflops = 2 * 8192**3 / OpCosts(device("hgx-h100")).matmul_us(8192, 8192, 8192) / 1e6
    assert tflops == pytest.approx(784, rel=0.1)


def test_a_device_of_an_unknown_architecture_says_so():
    assert "no GPU of this architecture was measured" in achieved_by(device("titan-xp-pcie-8")).origin
    assert achieved_by(device("hgx-h200")).origin == "fitted to hopper GPUs"


def test_cards_of_one_chip_differ_as_their_power_and_not_as_their_peaks():
    """L40 has half the peak of L40S and 86 % of its power: at its peak it draws less than that, so it keeps its clock."""
    product_us = {}
    for name in ("l40", "l40s"):
        costs = OpCosts(bundled.device(name), "bf16", continuous=True)
        product_us[name] = costs.matmul_us(8192, 8192, 8192)
    assert 1.2 < product_us["l40"] / product_us["l40s"] < 1.6


def test_a_precision_that_a_device_has_not_is_one_line():
    with pytest.raises(InputError, match="its peak in fp8 is not known"):
        OpCosts(device("dgx-a100-80"), "fp8")


@pytest.mark.parametrize("machine", ["dgx-1-v100", "titan-xp-pcie-8"])
def test_few_sums_over_many_positions_are_split(machine):
    """The gradient of the weight of a 3 x 3 convolution of 64 channels: five tiles, and 100,352 positions of 32 images."""
    costs = OpCosts(device(machine), "fp32", 4.0)
    assert costs.matmul_us(576, 100_352, 64) < 1.7 * costs.matmul_us(100_352, 576, 64)


@pytest.mark.parametrize(("name", "precision", "measured"), [("l4", "fp32", 8.8), ("t4", "fp32", 3.2), ("t4", "fp16", 39)])
def test_cards_do_no_more_than_their_power_allows(name, precision, measured):
    """Large products of NeuSight's tables (fp32) and of DeepBench's (fp16), TFLOP/s: a third to six tenths of the peak."""
    size = 4 if precision == "fp32" else 2
    tflops = 2 * 8192**3 / OpCosts(bundled.device(name), precision, size).matmul_us(8192, 8192, 8192) / 1e6
    assert tflops == pytest.approx(measured, rel=0.1)


def test_units_that_multiply_fp32_matrices_are_faster_than_the_vector_units():
    """MI210: 28.5 TFLOP/s of large products (NeuSight), more than the 22.6 of its vector units."""
    tflops = 2 * 8192**3 / OpCosts(bundled.device("mi210"), "fp32", 4.0).matmul_us(8192, 8192, 8192) / 1e6
    assert tflops == pytest.approx(28.5, rel=0.1)


@pytest.mark.parametrize(("machine", "reached"), [("hgx-h100", 0.75), ("dgx-1-v100", 0.93), ("dgx-a100-80", 0.856)])
def test_large_products_in_fp32_reach_what_was_measured_of_vector_units(machine, reached):
    chosen = device(machine)
    time_us = OpCosts(chosen, "fp32", 4.0).matmul_us(8192, 8192, 8192)
    assert 2 * 8192**3 / (chosen.peak_flops_per_s("fp32") * time_us / 1e6) == pytest.approx(reached, rel=0.06)
