"""Library ops behind a profile's ops of PyTorch."""

from types import SimpleNamespace

import numpy as np
import pytest

from dpro_search.collect.trace import EventKind
from dpro_search.costmodel.devices.recorded import RecordedSpecs, specs_of
from tests.every_case import every_case

CONVOLUTION = "images=8 inputs=3 outputs=64 side=224 window=7 stride=2 padding=3"
KEYS = (2, 2, 512, 64)
ATTENTION = "attention bf16 batch=2 heads=8 queries=512 head_dim=64 kv_heads=2 keys=512"
IMAGE, FILTER = (8, 3, 224, 224), (64, 3, 7, 7)
OPS = [
    ("aten::addmm", ((1000,), (32, 2048), (2048, 1000), ()), "float32", "gemm fp32 m=32 n=1000 k=2048"),
    ("aten::bmm", ((16, 128, 64), (16, 64, 256)), "c10::Half", "gemm fp16 m=128 n=256 k=64 batch=16"),
    ("aten::cudnn_convolution", (IMAGE, FILTER, ()), "", f"convolution fp32 {CONVOLUTION}"),
    ("aten::convolution_backward", ((8, 64, 112, 112), IMAGE, FILTER, ()), "", f"convolution fp32 backward {CONVOLUTION}"),
    ("aten::native_layer_norm", ((4, 128, 1024), (), (1024,), (1024,)), "bfloat16", "layer_norm bf16 rows=512 length=1024"),
    ("aten::add_", ((4, 128), (4, 128), ()), "float32", "add fp32 rows=4 length=128"),
    ("aten::add_", ((4, 128), (), ()), "float32", "add_scalar fp32 rows=4 length=128"),
    ("aten::_scaled_dot_product_flash_attention", ((2, 8, 512, 64), KEYS, KEYS), "bfloat16", ATTENTION),
]


@pytest.fixture(scope="module")
def trace():
    names, dtypes = tuple(op for op, *_ in OPS), ("float32", "c10::Half", "bfloat16")
    events = SimpleNamespace(
        kind=np.full(len(OPS), EventKind.OP), name=np.arange(len(OPS)), shapes=np.arange(len(OPS)),
        dtype=np.array([dtypes.index(dtype) if dtype else -1 for *_, dtype, _ in OPS]),
    )  # fmt: skip
    return SimpleNamespace(names=names, dtypes=dtypes, shapes=tuple(shapes for _, shapes, *_ in OPS), events=events)


@every_case("number", range(len(OPS)), ids=[op for op, *_ in OPS])
def test_shapes_make_the_op(trace, number):
    op, _, dtype, text = OPS[number]
    assert str(RecordedSpecs(trace).of(op, number, dtype)) == text


def test_all_distinct_ops_of_a_trace_are_found(trace):
    assert {str(spec) for spec in specs_of(trace)} == {text for *_, text in OPS}


@pytest.mark.parametrize(("op", "dtype"), [("aten::cat", "float32"), ("aten::bmm", "float32"), ("aten::addmm", "int64")])
def test_ops_of_other_kinds_inputs_or_elements_are_none(trace, op, dtype):
    assert RecordedSpecs(trace).of(op, 0, dtype) is None
