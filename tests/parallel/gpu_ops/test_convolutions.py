"""Durations of convolutions: what makes them cheaper or dearer than a matmul of the same multiply-adds."""

import pytest

from dpro_search.cluster import bundled
from dpro_search.parallel.frameworks import FRAMEWORKS
from dpro_search.parallel.gpu_ops import ImageLayout, Kernels, OpCosts
from dpro_search.parallel.model import NetworkBuilder, Tensor, elements
from dpro_search.parallel.model.op import OpRole

BATCH = 64


def convolution(channels=256, window=3, extent=28, frozen=False, **more):
    net = NetworkBuilder("one", frozen=frozen)
    net.loss(net.conv(net.open("first", Tensor("", channels, (extent, extent))), channels, window, **more))
    net.loss(net.open("second", Tensor("", 1, (1,))))
    block = net.network().blocks[0]
    return block.ops[0], block.sizes_at(BATCH, 1)


def costs(precision="bf16", kernels=Kernels()):  # noqa: B008 -- a frozen value
    return OpCosts(bundled.device("a100-sxm-80gb"), precision, 4.0 if precision in ("fp32", "tf32") else 2.0, kernels)


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


@pytest.mark.parametrize(
    ("layout", "precision", "volume", "times"),
    [
        (ImageLayout.CHANNELS_LAST, "bf16", False, 0),
        (ImageLayout.CHANNELS_FIRST, "bf16", False, 1),
        (ImageLayout.CHANNELS_FIRST, "fp32", False, 0),  # not on matrix units
        (ImageLayout.HALF_LAST, "fp16", True, 0),
        (ImageLayout.HALF_LAST, "tf32", False, 1),
        (ImageLayout.HALF_LAST, "fp32", True, 1),  # by TensorFlow
        (ImageLayout.HALF_LAST, "tf32", True, 2),  # by TensorFlow, and by cuDNN
        (ImageLayout.HALF_IMAGES_LAST, "fp16", True, 2),
    ],
)
def test_a_convolution_brings_images_into_the_order_of_its_units(layout, precision, volume, times):
    assert Kernels(layout=layout).image_transposes(precision, volume=volume) == times


def test_images_with_channels_first_cost_what_moves_them():
    """Read and written on the way in and on the way out; a window of one position needs it for its weights' gradients alone."""
    first, last = (costs("bf16", Kernels(layout=layout)) for layout in (ImageLayout.CHANNELS_FIRST, ImageLayout.CHANNELS_LAST))
    op, sizes = convolution(channels=64, extent=224)
    moved = elements(op.reads, sizes) + elements(op.output, sizes)
    more_us = first.forward_us(op, sizes) - last.forward_us(op, sizes)
    assert more_us == pytest.approx(first.moved_us(2 * 2 * moved), rel=0.1)
    matmul, its_sizes = convolution(channels=64, window=1)
    assert first.forward_us(matmul, its_sizes) == last.forward_us(matmul, its_sizes)
    assert first.weight_gradient_us(matmul, its_sizes) > last.weight_gradient_us(matmul, its_sizes)


def test_batch_norms_of_modules_move_what_a_profile_of_them_shows():
    """Eager: norm reads twice, then writes; ReLU; backward norm reads input and gradient twice."""
    net = NetworkBuilder("norms")
    net.loss(net.conv_norm(net.open("first", Tensor("", 64, (56, 56))), 64))
    net.loss(net.open("second", Tensor("", 1, (1,))))
    norm = next(op for op in net.network().blocks[0].ops if op.role is OpRole.NORM)
    eager = FRAMEWORKS["pytorch"].runtime.kernels
    forward, backward = (eager.passes(norm, backward=backward) for backward in (False, True))
    assert (forward.reads + forward.output, backward.reads + backward.output) == (5, 8)
