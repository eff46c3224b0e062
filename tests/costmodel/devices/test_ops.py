"""Library ops: what they compute and move."""

import numpy as np
import pytest

from dpro_search.costmodel.devices import (
    LibraryOpKind,
    attention,
    convolution,
    experts,
    gemm,
    joined,
    latent_attention,
    streamed,
)  # fmt: skip
from dpro_search.errors import InputError


def test_a_gemm_multiplies_and_moves_its_operands_once():
    op = gemm(64, 128, 256, precision="bf16", batch=3)
    assert op.flops[0] == 2 * 3 * 64 * 128 * 256
    assert op.matrix_bytes[0] == 2 * 3 * (64 * 256 + 256 * 128 + 64 * 128)


def test_a_convolution_is_an_implicit_product():
    op = convolution(8, 3, 64, 224, 7, stride=2, padding=3, precision="fp32")
    assert (op.m[0], op.n[0], op.k[0]) == (8 * 112 * 112, 64, 3 * 49)
    assert op.flops[0] == 2 * op.m[0] * op.n[0] * op.k[0]


def test_causal_attention_computes_half_of_the_scores_and_backward_two_and_a_half_times():
    sizes = (2, 16, 16, 1024, 1024, 64)
    whole = attention(*sizes, causal=False, precision="bf16")
    assert attention(*sizes, causal=True, precision="bf16").flops[0] == whole.flops[0] / 2
    assert attention(*sizes, causal=False, precision="bf16", backward=True).flops[0] == 2.5 * whole.flops[0]


def test_products_in_eight_bits_write_sixteen():
    op = gemm(64, 128, 256, precision="fp8")
    assert op.matrix_bytes[0] == 64 * 256 + 256 * 128 + 2 * 64 * 128


def test_experts_read_the_weights_of_those_that_tokens_go_to():
    one, many = (experts(tokens, 1024, 512, 64, 2, precision="bf16") for tokens in (1, 4096))
    weights = 3 * 2 * 1024 * 512
    assert one.batch[0] == pytest.approx(2)
    assert one.matrix_bytes[0] == pytest.approx(2 * weights, rel=0.01)
    assert many.batch[0] == pytest.approx(64)
    assert many.flops[0] == 2 * 3 * 4096 * 2 * 1024 * 512
    assert many.m[0] == pytest.approx(4096 * 2 / 64)


def test_experts_on_several_devices_get_their_part_of_the_tokens():
    whole, part = (experts(4096, 1024, 512, number, 2, all_experts=64, precision="bf16") for number in (64, 16))
    assert part.flops[0] == whole.flops[0] / 4
    assert part.batch[0] == pytest.approx(16)


def test_heads_of_latent_attention_share_one_vector_when_they_decode():
    decoding = latent_attention(8, 128, 1, 4096, precision="bf16")
    assert decoding.matrix_bytes[0] == pytest.approx(2 * 8 * (4096 * 576 + 128 * (576 + 512)))
    prompt = latent_attention(8, 128, 4096, 4096, precision="bf16")
    assert prompt.flops[0] == pytest.approx(2 * 8 * 128 * 4096 * 2048 * (192 + 128))


def test_sizes_broadcast_and_ops_join():
    ops = joined([gemm([1, 2, 3], 8, 8, precision="fp32"), streamed(LibraryOpKind.NORM, 4, 5, moved=160, precision="fp32")])
    assert len(ops) == 4
    assert np.array_equal(ops[np.array([1, 3])].m, [2, 4])


def test_an_op_without_size_is_refused_with_its_place():
    with pytest.raises(InputError, match=r"op 1 \(gemm\): sizes must be above 0 and finite, not .*m 0"):
        gemm([4, 0], 8, 8, precision="fp32")


def test_a_filter_larger_than_its_image_is_refused():
    with pytest.raises(InputError, match="larger than its image"):
        convolution(1, 3, 8, 4, 7, precision="fp32")


def test_training_runs_neither_decoding_steps_nor_latent_attention_nor_experts_nor_eight_bits():
    ops = joined(
        [
            attention(4, 32, 8, 2048, 2048, 128, causal=True, precision="bf16"),
            gemm(64, 64, 64, precision="fp32"),
            attention(4, 32, 8, 1, 2048, 128, causal=True, precision="bf16"),
            latent_attention(4, 32, 2048, 2048, precision="bf16"),
            experts(64, 1024, 512, 8, 2, precision="bf16"),
            gemm(64, 64, 64, precision="fp8"),
        ]
    )
    assert ops.of_training.tolist() == [True, True, False, False, False, False]
