"""Library ops as lines of text."""

import pytest

from dpro_search.costmodel.devices import OpSpec, Stack, gemm
from dpro_search.costmodel.devices.written import SIZES
from dpro_search.errors import InputError
from tests.every_case import every_case

TEXTS = [
    "gemm bf16 m=4096 n=1024 k=512",
    "gemm fp32 backward m=64 n=32 k=16 batch=8",
    "convolution fp16 images=32 inputs=64 outputs=128 side=56 window=3 stride=2 padding=1",
    "attention bf16 batch=2 heads=8 queries=1024 head_dim=64 kv_heads=2",
    "layer_norm fp32 backward rows=512 length=1024",
]


@pytest.mark.parametrize("text", TEXTS)
def test_an_op_is_the_text_that_it_was_read_from(text):
    assert str(OpSpec.parse(text)) == text


def test_sizes_with_their_usual_value_are_left_out():
    assert OpSpec.parse("gemm bf16 m=8 n=8 k=8 batch=1 transposes=0") == OpSpec.of("gemm", "bf16", m=8, n=8, k=8)


def test_a_product_computes_what_the_predictor_calls_a_product():
    ops = OpSpec.parse("gemm bf16 m=64 n=32 k=16 transposes=1").ops(Stack.SERVING)
    assert (ops.matrix == gemm(64, 32, 16, precision="bf16", stack=Stack.SERVING, transposes=1.0).matrix).all()


def test_both_gradients_of_a_product_are_two_products():
    forward, backward = (OpSpec.parse(f"gemm fp32{word} m=64 n=32 k=16").ops(Stack.PYTORCH) for word in ("", " backward"))
    assert backward.flops[0] == 2 * forward.flops[0]


@every_case("name", SIZES)
def test_every_op_has_something_to_do(name):
    sizes = dict.fromkeys(SIZES[name][0], 8) | ({"window": 3} if name == "convolution" else {})
    ops = OpSpec.of(name, "fp32", **sizes).ops(Stack.PYTORCH)
    assert ops.flops[0] + ops.stream_bytes[0] > 0


@every_case(
    ("text", "message"),
    [
        ("", "no op is called ''"),
        ("gem bf16 m=1 n=1 k=1", "no op is called 'gem'"),
        ("gemm int4 m=1 n=1 k=1", "precision 'int4'"),
        ("gemm bf16 m=1 n=1", "gemm: k missing"),
        ("gemm bf16 m=1 n=1 k=1 q=1", "gemm has no size 'q'"),
        ("gemm bf16 m=0 n=1 k=1", "m=0 is impossible"),
        ("gemm bf16 m=1.5 n=1 k=1", "is no op; write it like"),
        ("add fp32 backward rows=1 length=1", "add has no backward pass"),
    ],
)
def test_what_is_no_op_is_named(text, message):
    with pytest.raises(InputError, match=message):
        OpSpec.parse(text)
