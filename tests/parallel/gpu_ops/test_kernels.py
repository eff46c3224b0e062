"""What a framework computes an op with decides what it moves, and so what it costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.cluster import bundled, parse_cluster
from dpro_search.parallel.gpu_ops import AttentionKernels, Kernels, LossKernels, NormKernels, OpCosts
from dpro_search.parallel.model import blocks_of, elements, published
from dpro_search.parallel.model.networks import network
from dpro_search.parallel.model.op import OpRole

H100 = parse_cluster("1xhgx-h100").groups[0].host.device


def costs(kernels=None, precision="bf16", **options):
    return OpCosts(H100, precision, kernels=kernels or Kernels(), **options)


def op_of(name, model="llama3-8b", batch=1, sequence=4096):
    """An op by its name, with the sizes of its dims on one device."""
    block, op = next((block, op) for block in blocks_of(published(model)) for op in block.ops if op.name == name)
    return op, block.sizes_at(batch, sequence)


def both_us(found, name, **where):
    op, sizes = op_of(name, **where)
    return found.forward_us(op, sizes) + found.backward_us(op, sizes)


def test_stored_scores_cost_as_the_square_of_the_sequence_and_more_than_fused_attention():
    stored = costs(Kernels(attention=AttentionKernels.SCORES))
    once, twice = (both_us(stored, "attention.core", sequence=length) for length in (4096, 8192))
    assert twice == pytest.approx(4 * once, rel=0.1)
    assert once > 3 * both_us(costs(), "attention.core")


def test_stored_scores_of_heads_that_are_not_aligned_are_computed_on_vector_units():
    """Head sizes of 150 and 152 elements of 16 bits; fused attention pads its heads."""
    op, sizes = op_of("attention.core")
    stored, fused = costs(Kernels(attention=AttentionKernels.SCORES)), costs()
    near, aligned = ({**sizes, "head_dim": width, "value_dim": width} for width in (150.0, 152.0))
    assert stored.forward_us(op, near) > 3 * stored.forward_us(op, aligned)
    assert fused.forward_us(op, near) == pytest.approx(fused.forward_us(op, aligned), rel=0.1)
    whole = costs(Kernels(attention=AttentionKernels.SCORES), precision="fp32")
    assert whole.forward_us(op, near) == pytest.approx(whole.forward_us(op, aligned), rel=0.1)


@pytest.mark.parametrize(
    ("device", "precision", "slower"),
    [("h100-sxm", "bf16", 1 / 0.79), ("h100-sxm", "fp8", 1 / 0.79), ("h100-sxm", "fp32", 1.0), ("a100-sxm-80gb", "bf16", 1.0)],
)
def test_products_by_the_libraries_of_wheels_are_slower_on_hopper(device, precision, slower):
    times_us = [
        OpCosts(bundled.device(device), precision, kernels=Kernels(wheels=wheels)).matmul_us(8192, 8192, 8192)
        for wheels in (False, True)
    ]
    assert times_us[1] / times_us[0] == pytest.approx(slower, rel=0.02)


def test_each_later_attention_kernel_is_faster():
    order = ("EAGER", "SCORES", "FLASH_TRITON", "FLASH_2", "NEWEST")
    times = [both_us(costs(Kernels(attention=AttentionKernels[name])), "attention.core") for name in order]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == len(times)


def test_layer_norms_that_read_twice_take_three_passes_forward_and_ten_backward():
    """In place of two and three; batch norms of images have kernels of their own."""
    once, twice = costs(), costs(Kernels(norm=NormKernels.TWICE))
    op, sizes = op_of("attention_norm", batch=16)
    assert twice.forward_us(op, sizes) / once.forward_us(op, sizes) == pytest.approx(3 / 2, rel=0.03)
    assert twice.backward_us(op, sizes) / once.backward_us(op, sizes) == pytest.approx(10 / 3, rel=0.03)
    images = [(op, block.sizes_at(32, 1)) for block in network("resnet50").blocks for op in block.ops]
    assert all(twice.forward_us(op, sizes) == once.forward_us(op, sizes) for op, sizes in images)


def test_norms_of_volumes_take_a_pass_for_each_kernel_that_a_framework_composes_them_of():
    """Twelve passes forward where nothing is fused, four compiled, two in one kernel; batch norms of images stay in one."""
    kinds = (NormKernels.FUSED, NormKernels.COMPILED, NormKernels.COMPOSED)
    fused, compiled, composed = (costs(Kernels(instance_norm=kind)) for kind in kinds)
    op, sizes = next(
        (op, block.sizes_at(64, 1)) for block in network("vnet").blocks for op in block.ops if op.role is OpRole.INSTANCE_NORM
    )
    moved_us = [each.forward_us(op, sizes) - 2.6 * each.launches(op, backward=False) for each in (fused, compiled, composed)]
    assert [us / moved_us[0] for us in moved_us] == pytest.approx([1, 2, 6], rel=0.01)
    assert fused.backward_us(op, sizes) < compiled.backward_us(op, sizes) < composed.backward_us(op, sizes)
    images = [(op, block.sizes_at(32, 1)) for block in network("resnet50").blocks for op in block.ops]
    assert all(composed.backward_us(op, sizes) == fused.backward_us(op, sizes) for op, sizes in images)


def test_dropout_on_scores_adds_a_pass_with_a_mask_each_way():
    """Two and a half passes of 16 bits over batch x heads x queries x keys, at the achieved rate of the memory."""
    with_, without = (
        both_us(costs(Kernels(attention=AttentionKernels.SCORES, attention_dropout=dropout)), "attention.core")
        for dropout in (True, False)
    )
    moved_bytes = 2 * 2.5 * 2 * 32 * 4096**2
    assert with_ - without == pytest.approx(moved_bytes / (3.35e12 * 0.85) * 1e6, rel=0.05)


@pytest.mark.parametrize("name", ["feed_forward.activation", "attention.rotation"])
def test_what_is_not_fused_moves_more_in_more_kernels(name):
    fused, eager = costs(Kernels(fused=True)), costs(Kernels(fused=False))
    op, _ = op_of(name)
    assert both_us(eager, name) > 1.5 * both_us(fused, name)
    for backward in (False, True):
        assert eager.launches(op, backward=backward) > fused.launches(op, backward=backward)


def test_losses_on_copies_in_fp32_move_several_times_the_logits():
    fused, softmax, parallel = (both_us(costs(Kernels(loss=loss)), "loss") for loss in LossKernels)
    assert parallel > softmax > 3 * fused


def test_continuous_load_lowers_the_clock_to_what_was_measured():
    """SemiAnalysis, December 2024: 720 TFLOP/s of 8192^3 matmuls on an H100 in bf16, 1,280 in fp8."""
    for precision, measured in (("bf16", 720), ("fp8", 1280)):
        tflops = 2 * 8192**3 / costs(precision=precision, continuous=True).matmul_us(8192, 8192, 8192) / 1e6
        assert tflops == pytest.approx(measured, rel=0.05)


def test_a_matmul_in_8_bits_is_faster_by_less_than_twice_for_it_quantizes_its_inputs():
    eight, sixteen = (both_us(costs(precision=precision), "feed_forward.up") for precision in ("fp8", "bf16"))
    assert 1.2 < sixteen / eight < 2


def test_heads_and_routers_stay_in_16_bits():
    for name, model in (("head", "llama3-8b"), ("router", "mixtral-8x7b")):
        times = [both_us(costs(precision=precision), name, model=model) for precision in ("fp8", "bf16")]
        assert times[0] == pytest.approx(times[1])


@given(tokens=st.integers(128, 16384))
def test_experts_never_take_less_than_one_matmul_of_all_their_tokens(tokens):
    """Each has a matmul of its own, whose last wave of tiles it fills alone."""
    op_costs = costs()
    op, sizes = op_of("experts.up", model="mixtral-8x7b", sequence=tokens)
    rows = sizes["experts"] * sizes["capacity"]
    assert op_costs.forward_us(op, sizes) >= op_costs.matmul_us(rows, sizes["hidden"], 2 * sizes["expert_ffn"]) * 0.999


@pytest.mark.parametrize("name", ["attention_norm", "attention_residual", "attention.output", "attention.core"])
def test_autocast_keeps_streams_wide_and_casts_parameters(name):
    """In 16 bits; in fp32 there is nothing to cast."""
    eager = {"attention": AttentionKernels.EAGER, "fused": False}
    for precision, size, is_dearer in (("fp16", 2.0, True), ("fp32", 4.0, False)):
        plain, cast = (
            both_us(costs(Kernels(**eager, autocast=autocast), precision, bytes_per_element=size), name)
            for autocast in (False, True)
        )
        assert (cast > 1.05 * plain) == is_dearer


def test_batch_norms_stay_in_16_bits_under_autocast():
    block = next(block for block in blocks_of(network("resnet50")) if any(op.name.startswith("norm") for op in block.ops))
    op = next(op for op in block.ops if op.name.startswith("norm"))
    times = [costs(Kernels(autocast=autocast), "fp16").forward_us(op, block.sizes_at(32, 1)) for autocast in (False, True)]
    assert times[0] == times[1]


def moved_us(name, model, **where):
    """Forward and backward, less the least time of the kernels."""
    op, sizes = op_of(name, model)
    op_costs, floor_us = costs(**where), costs().moved_us(0.0)
    passes = [op_costs.kernels.passes(op, backward=backward) for backward in (False, True)]
    return both_us(op_costs, name, model=model) - floor_us * sum(each.kernels for each in passes), op, sizes


def test_biases_of_experts_move_what_megatron_core_makes_of_them():
    """28 bytes of an element forward and 40 backward, of which the tensor itself has 2."""
    us, op, sizes = moved_us("experts.biased", "gpt-oss-120b")
    assert us == pytest.approx(costs().moved_us(68.0 * elements(op.output, sizes)) - costs().moved_us(0.0), rel=1e-6)


def test_experts_without_biases_have_no_such_op():
    assert all(op.name != "experts.biased" for block in blocks_of(published("mixtral-8x7b")) for op in block.ops)


def test_tokens_of_experts_in_8_bits_are_copied_to_whole_tiles_and_back():
    """Dispatch and return, each two passes more over the tokens at experts, each way."""
    for name, tokens in (("dispatch", "output"), ("combine", "reads")):
        wide_us, op, sizes = moved_us(name, "mixtral-8x7b")
        narrow_us, _, _ = moved_us(name, "mixtral-8x7b", precision="fp8")
        count = elements(getattr(op, tokens), sizes)
        assert narrow_us - wide_us == pytest.approx(2 * (costs().moved_us(2 * 2.0 * count) - costs().moved_us(0.0)), rel=1e-6)
