"""Autocast treats ops as its lists say."""

from dpro_search.costmodel.autocast import AutocastPolicy, base_name, casts_input, operands, policy
from tests.every_case import every_case

PRODUCT, SINGLE, WIDEST = AutocastPolicy


@every_case(
    "op, kernel, expected",
    [
        ("aten::addmm", "ampere_sgemm_128x64_tn", PRODUCT),
        ("aten::mm", "splitKreduce_kernel", PRODUCT),
        ("aten::bmm", "volta_sgemm", PRODUCT),
        ("aten::cudnn_convolution_backward_weight", "wgrad_alg0_engine", PRODUCT),
        ("aten::convolution_backward", "nchwToNhwcKernel", PRODUCT),
        ("aten::_scaled_dot_product_flash_attention_backward", "flash_bwd_kernel", PRODUCT),
        ("aten::native_layer_norm_backward", "layer_norm_grad_input_kernel", SINGLE),
        ("aten::_softmax", "softmax_warp_forward", SINGLE),
        ("aten::nll_loss_forward", "nll_loss_forward_reduce_cuda_kernel_2d", SINGLE),
        ("aten::pow", "vectorized_elementwise_kernel", SINGLE),
        ("aten::cudnn_batch_norm", "bn_fw_tr_1C11_kernel_NCHW", WIDEST),
        ("aten::threshold_backward", "vectorized_elementwise_kernel", WIDEST),
        ("aten::native_dropout", "fused_dropout_kernel_vec", WIDEST),
        ("aten::sum", "reduce_kernel", WIDEST),
        ("", "volta_sgemm_64x64_nt", PRODUCT),
        ("", "layer_norm_kernel", SINGLE),
        ("", "vectorized_elementwise_kernel", WIDEST),
    ],
)
def test_the_list_of_an_op_is_known_by_its_name_or_by_its_kernel(op: str, kernel: str, expected: AutocastPolicy) -> None:
    assert policy(op, kernel) is expected


def test_variants_of_an_op_have_one_name() -> None:
    assert {base_name(f"aten::{name}") for name in ("native_layer_norm", "native_layer_norm_backward")} == {"layer_norm"}
    assert base_name("aten::add_") == "add"
    assert base_name("FlashAttnFunc") == ""


def test_weights_of_linear_and_convolution_are_cast_and_both_sides_of_a_batched_product_are_activations() -> None:
    assert operands("aten::addmm", ((8,), (4, 16), (16, 8))) == (64, 128)
    assert operands("aten::mm", ((4, 16), (16, 8))) == (64, 128)
    assert operands("aten::cudnn_convolution", ((2, 3, 8, 8), (4, 3, 1, 1))) == (384, 12)
    assert operands("aten::bmm", ((2, 4, 16), (2, 16, 8))) == (128 + 256, 0)
    assert operands("aten::native_layer_norm", ((4, 16), (16,))) == (64, 0)
    assert operands("aten::mm", None) == (None, None)
    assert operands("aten::bmm", None) == (None, 0)


def test_softmax_converts_within_its_kernel_and_layer_norm_does_not() -> None:
    assert not casts_input("aten::_log_softmax")
    assert casts_input("aten::native_layer_norm")
