"""Durations of convolutions: what makes them cheaper or dearer than a matmul of the same multiply-adds."""

import pytest

from dpro_search.cluster import bundled
from dpro_search.parallel.gpu_ops import Kernels, OpCosts
from dpro_search.parallel.model import NetworkBuilder, Tensor

BATCH = 64


def convolution(channels=256, window=3, extent=28, frozen=False, **more):
    net = NetworkBuilder("one", frozen=frozen)
    net.loss(net.conv(net.open("first", Tensor("", channels, (extent, extent))), channels, window, **more))
    net.loss(net.open("second", Tensor("", 1, (1,))))
    block = net.network().blocks[0]
    return block.ops[0], block.sizes_at(BATCH, 1)


def costs(precision="bf16", device="a100-sxm-80gb"):
    return OpCosts(bundled.device(device), precision, 4.0 if precision in ("fp32", "tf32") else 2.0)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_convolution_takes_longer_than_its_multiply_adds_at_the_peak(precision):
    op, sizes = convolution()
    op_costs = costs(precision)
    least_us = op.forward_flops(sizes) * op.winograd_share ** (precision == "fp32")
    assert op_costs.forward_us(op, sizes) > least_us / op_costs.device.peak_flops_per_s(precision) * 1e6
    assert 1.5 < op_costs.backward_us(op, sizes) / op_costs.forward_us(op, sizes) < 3


def test_winograd_saves_in_fp32_only():
    """3 x 3 windows with stride 1: 16 of 36 multiply-adds."""
    three, one = convolution(window=3), convolution(window=1, channels=768)  # as many multiply-adds a position
    ratio = {precision: costs(precision).forward_us(*three) / costs(precision).forward_us(*one) for precision in ("fp32", "bf16")}
    assert ratio["fp32"] < 0.6 * ratio["bf16"]


def test_the_gradient_of_a_small_weight_is_split_among_cores():
    """32 x 32 x 9 weights are four tiles; without a split 104 of 108 cores would wait."""
    op, sizes = convolution(channels=32, extent=224)
    op_costs = costs()
    assert op_costs.backward_us(op, sizes) < 4 * op_costs.forward_us(op, sizes)


def test_what_is_frozen_has_no_backward_pass():
    op, sizes = convolution(frozen=True)
    assert costs().backward_us(op, sizes) == 0
    assert op.saves == ()


def test_a_group_has_its_share_of_the_reduction():
    whole, parts = (costs("fp32").forward_us(*convolution(channels=1024, groups=groups)) for groups in (1, 4))
    assert parts < whole


@pytest.mark.parametrize(("device", "faster"), [("a100-sxm-80gb", 0.95 / 0.6), ("h100-sxm", 1.0)])
def test_searched_convolutions_are_as_fast_as_the_instructions_that_they_use(device, faster):
    """Earlier GPUs have no faster ones than those of cuDNN's convolutions."""
    op, sizes = convolution(channels=1024)
    usual, searched = (
        OpCosts(bundled.device(device), "bf16", kernels=Kernels(searched_convolutions=found)).forward_us(op, sizes)
        for found in (False, True)
    )
    assert usual / searched == pytest.approx(faster, rel=0.05)
