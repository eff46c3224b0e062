"""Notations of replica groups, each against NumPy's definition of it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.collect.readers.xla import parse_replica_groups, parse_source_target_pairs
from dpro_search.errors import TraceFormatError


def groups(text, participants=1):
    return parse_replica_groups(text, participants).ids.tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{{0, 2}, {1, 3}}", [[0, 2], [1, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("[4,2]<=[2,2,2]T(2,1,0)", [[0, 4], [2, 6], [1, 5], [3, 7]]),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_2'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['x'=4,'y'=2] {'x','y'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['x'=4,'y'=2] {'y','x'}", [[0, 2, 4, 6, 1, 3, 5, 7]]),
        ("mesh['x'=8] {'x':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['x'=8] {'x':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['x'=8] {'x':(4)2,'x':(1)2}", [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['x'=2,'y'=2], device_ids=(3,1,2,0) {'y'}", [[3, 1], [2, 0]]),
    ],
)
def test_each_notation(text, expected):
    assert groups(text) == expected


@pytest.mark.parametrize("text", ["{}", "{{}}", "{ }"])
def test_without_groups_all_take_part(text):
    assert groups(text, participants=4) == [[0, 1, 2, 3]]


def test_groups_of_different_sizes_are_filled_up():
    parsed = parse_replica_groups("{{0,1,2},{3}}", 4)
    assert (parsed.ids.tolist(), parsed.sizes.tolist(), parsed.size, parsed.count) == ([[0, 1, 2], [3, -1, -1]], [3, 1], 3, 2)


@st.composite
def iotas(draw):
    """Dimensions, an order of them, and the number of groups."""
    dimensions = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(dimensions))))
    count = draw(st.sampled_from([n for n in range(1, math.prod(dimensions) + 1) if math.prod(dimensions) % n == 0]))
    return dimensions, order, count


def joined(numbers):
    return ",".join(map(str, numbers))


@given(iotas())
def test_an_iota_is_numpys(drawn):
    dimensions, order, count = drawn
    expected = np.arange(math.prod(dimensions)).reshape(dimensions).transpose(order).reshape(count, -1)
    text = f"[{joined(expected.shape)}]<=[{joined(dimensions)}]T({joined(order)})"
    assert groups(text) == expected.tolist()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_axes_of_a_mesh_are_rows_along_them(sizes, data):
    devices = np.array(data.draw(st.permutations(range(math.prod(sizes)))))
    chosen = data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, unique=True))
    others = [axis for axis in range(len(sizes)) if axis not in chosen]
    expected = devices.reshape(sizes).transpose([*others, *chosen]).reshape(-1, math.prod(sizes[axis] for axis in chosen))
    axes, along = joined(f"'a{axis}'={size}" for axis, size in enumerate(sizes)), joined(f"'a{axis}'" for axis in chosen)
    assert groups(f"mesh[{axes}], device_ids=({joined(devices)}) {{{along}}}") == expected.tolist()


@given(st.integers(1, 4), st.integers(2, 4), st.integers(1, 4))
def test_a_part_of_an_axis_is_a_dimension_within_it(before, size, after):
    expected = np.arange(before * size * after).reshape(before, size, after).transpose(0, 2, 1).reshape(-1, size)
    assert groups(f"mesh['x'={before * size * after}] {{'x':({before}){size}}}") == expected.tolist()


@pytest.mark.parametrize(
    "text",
    [
        "[2,3]<=[4]",
        "[4]T(0)",
        "{{0,1},{2",
        "mesh['x'=4] {'y'}",
        "[2,2,2]<=[8]",
        "[1,99999999]<=[99999999]",
        "[2,2]<=[2,2]T(1)",
        "x",
    ],
)
def test_what_is_no_notation_is_an_error(text):
    with pytest.raises(TraceFormatError, match="replica_groups="):
        groups(text)


def test_pairs_of_a_collective_permute():
    assert parse_source_target_pairs("{{0,2},{2,0}}").tolist() == [[0, 2], [2, 0]]
    assert parse_source_target_pairs("{}").shape == (0, 2)
    with pytest.raises(TraceFormatError, match="no pair"):
        parse_source_target_pairs("{{0,1,2}}")
