"""Types and layouts: sizes with and without the padding of tiles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.collect.readers.xla import HloShape, parse_shape
from dpro_search.errors import TraceFormatError


def test_an_array_with_everything():
    shape = parse_shape("bf16[128,384]{1,0:T(8,128)(2,1)S(1)}")
    assert shape == HloShape("bf16", (128, 384), (1, 0), ((8, 128), (2, 1)), memory_space=1)
    assert shape.bytes == shape.padded_bytes == 128 * 384 * 2


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[]", 4),
        ("pred[3]{0}", 3),
        ("c64[2,2]{1,0}", 32),
        ("f8e4m3fn[10]{0}", 10),
        ("f8e4m3b11fnuz[10]{0}", 10),
        ("s4[10]{0}", 10),
        ("s4[10]{0:E(4)}", 5),
        ("u32[]{:S(2)}", 4),
        ("token[]", 0),
        ("f32[0,4]{1,0}", 0),
        ("f32[<=8]{0}", 32),
        ("b(f32[4]{0})", 16),
        ("()", 0),
        ("(f32[2]{0}, (bf16[4]{0}, u32[]), /*index=5*/s8[3]{0})", 8 + 8 + 4 + 3),
        ("((f32[4]{0}), f32[2]{0})", 24),
    ],
)
def test_bytes(text, size):
    assert parse_shape(text).bytes == size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[3,100]{1,0:T(8,128)}", 8 * 128 * 4),
        ("f32[3,100]{0,1:T(8,128)}", 104 * 128 * 4),  # the first dimension varies fastest
        ("bf16[5]{0:T(1024)(128)(2,1)}", 1024 * 2),
        ("f32[]{:T(128)}", 128 * 4),
        ("f32[2,3,100]{2,1,0:T(8,128)}", 2 * 8 * 128 * 4),
        ("(f32[1]{0:T(128)}, f32[1]{0})", 128 * 4 + 4),
    ],
)
def test_tiles_are_whole(text, size):
    assert parse_shape(text).padded_bytes == size


@given(st.lists(st.integers(0, 300), max_size=4), st.sampled_from(["", ":T(8,128)", ":T(8,128)(2,1)", ":T(1,128)", ":T(256)"]))
def test_padding_never_takes_bytes_away(dimensions, tiles):
    layout = ",".join(str(dim) for dim in reversed(range(len(dimensions))))
    shape = parse_shape(f"f32[{','.join(map(str, dimensions))}]{{{layout}{tiles}}}")
    assert shape.dimensions == tuple(dimensions)
    assert shape.padded_bytes >= shape.bytes or shape.size == 0


def test_the_hosts_memory_has_a_number():
    assert parse_shape("bf16[4]{0:T(128)S(5)}").in_host_memory
    assert not parse_shape("bf16[4]{0:T(128)S(1)}").in_host_memory


def test_leaves_are_in_order():
    assert [leaf.dtype for leaf in parse_shape("(f32[1], ((s8[1], u8[1])), pred[])").leaves()] == ["f32", "s8", "u8", "pred"]


@pytest.mark.parametrize("text", ["f32", "f32[2", "f32[a]", "(f32[2]", "f32[2]{1,0}", "f32[2]{0} x", "", "(f32[2],,"])
def test_what_is_no_shape_is_an_error(text):
    with pytest.raises(TraceFormatError, match="not a shape"):
        parse_shape(text)


@pytest.mark.parametrize(("text", "why"), [("f32[?]", "without a bound"), ("blob[2]", "unknown size")])
def test_an_unknown_size_is_said(text, why):
    with pytest.raises(TraceFormatError, match=why):
        _ = parse_shape(text).bytes
