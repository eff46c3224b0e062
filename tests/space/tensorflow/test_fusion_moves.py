"""Moves keep every tensor exactly once, and no group is ever empty."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.collect.trace import TensorInfo
from dpro_search.space.tensorflow.fusion_moves import (
    Grouping,
    canonical,
    contiguous_groups,
    merge_groups,
    move_border,
    move_tensor,
    propose,
    split_group,
    threshold_groups,
)


def tensors_of(sizes_bytes: list[int]) -> list[TensorInfo]:
    return [
        TensorInfo(name=f"g{i}", node="", dtype="float32", shape=(size // 4,), size_bytes=size)
        for i, size in enumerate(sizes_bytes)
    ]


sizes = st.lists(st.integers(0, 10**8), min_size=1, max_size=40)


@st.composite
def groupings(draw: st.DrawFn) -> Grouping:
    """Any partition of up to 20 tensors, groups and their tensors in any order."""
    labels = draw(st.lists(st.integers(0, 5), min_size=1, max_size=20))
    names = draw(st.permutations(range(len(labels))))
    groups = [tuple(f"g{i}" for i in names if labels[i] == label) for label in draw(st.permutations(sorted(set(labels))))]
    return tuple(groups)


def names_in(groups: Grouping) -> list[str]:
    assert all(groups), "an empty group"
    return sorted(name for group in groups for name in group)


@given(sizes, st.data())
def test_contiguous_groups_keep_order_and_have_the_wanted_count(sizes_bytes: list[int], data: st.DataObject) -> None:
    tensors = tensors_of(sizes_bytes)
    count = data.draw(st.integers(1, len(tensors)))
    groups = contiguous_groups(tensors, count, tapered=data.draw(st.booleans()))
    assert len(groups) == count
    assert all(groups)
    assert [name for group in groups for name in group] == [tensor.name for tensor in tensors]


@given(st.integers(1, 10), st.integers(1, 8), st.integers(1, 10**6))
def test_contiguous_groups_of_equal_tensors_are_equal(count: int, each: int, size_bytes: int) -> None:
    groups = contiguous_groups(tensors_of([size_bytes] * (count * each)), count)
    assert {len(group) for group in groups} == {each}


@given(st.integers(2, 10), st.integers(1, 4), st.integers(1, 10**6))
def test_tapered_groups_of_equal_tensors_are_half_as_large_at_the_ends(count: int, half: int, size_bytes: int) -> None:
    groups = contiguous_groups(tensors_of([size_bytes] * (2 * half * (count - 1))), count, tapered=True)
    assert [len(group) for group in groups] == [half, *[2 * half] * (count - 2), half]


@given(sizes.filter(lambda s: sum(s) > 0), st.data())
def test_no_contiguous_group_exceeds_its_share_by_more_than_its_largest_tensors(
    sizes_bytes: list[int], data: st.DataObject
) -> None:
    tensors = tensors_of(sizes_bytes)
    count = data.draw(st.integers(1, len(tensors)))
    size_of = {tensor.name: tensor.size_bytes for tensor in tensors}
    share_bytes = sum(sizes_bytes) / count
    for group in contiguous_groups(tensors, count):
        assert sum(size_of[name] for name in group) <= share_bytes + max(sizes_bytes)


@pytest.mark.parametrize("count", [0, -1, 4])
def test_contiguous_groups_refuse_an_impossible_count(count: int) -> None:
    with pytest.raises(ValueError, match="cannot make"):
        contiguous_groups(tensors_of([1, 2, 3]), count)


@given(sizes, st.integers(0, 2 * 10**8))
def test_threshold_groups_fill_up_to_the_threshold(sizes_bytes: list[int], threshold_bytes: int) -> None:
    tensors = tensors_of(sizes_bytes)
    size_of = {tensor.name: tensor.size_bytes for tensor in tensors}
    groups = threshold_groups(tensors, threshold_bytes)
    assert [name for group in groups for name in group] == [tensor.name for tensor in tensors]
    assert all(len(group) == 1 or sum(size_of[name] for name in group) <= threshold_bytes for group in groups)


@given(groupings(), st.integers(0, 2**32))
def test_any_walk_of_proposals_keeps_each_tensor_once(groups: Grouping, seed: int) -> None:
    names = names_in(groups)
    position = {name: i for i, name in enumerate(names)}
    rng = np.random.default_rng(seed)
    for _ in range(10):
        groups = propose(groups, position, rng)
        assert names_in(groups) == names
        assert groups == canonical(groups, position)


@given(groupings())
def test_canonical_is_the_same_for_every_spelling(groups: Grouping) -> None:
    position = {name: i for i, name in enumerate(names_in(groups))}
    reversed_spelling = tuple(group[::-1] for group in groups[::-1])
    assert canonical(reversed_spelling, position) == canonical(groups, position)


@given(groupings(), st.data())
def test_split_undoes_merge(groups: Grouping, data: st.DataObject) -> None:
    if len(groups) == 1:
        with pytest.raises(ValueError, match="no next group"):
            merge_groups(groups, 0)
        return
    index = data.draw(st.integers(0, len(groups) - 2))
    merged = merge_groups(groups, index)
    assert names_in(merged) == names_in(groups)
    assert split_group(merged, index, len(groups[index])) == groups


@given(groupings().filter(lambda g: len(g) > 1), st.data())
def test_a_border_moves_back_and_forth(groups: Grouping, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(groups) - 2))
    shift = data.draw(st.integers(1 - len(groups[index]), len(groups[index + 1]) - 1))
    moved = move_border(groups, index, shift)
    assert names_in(moved) == names_in(groups)
    assert len(moved[index]) == len(groups[index]) + shift
    assert move_border(moved, index, -shift) == groups


@given(groupings(), st.data())
def test_a_moved_tensor_is_in_its_new_group_only(groups: Grouping, data: st.DataObject) -> None:
    target = data.draw(st.integers(0, len(groups) - 1))
    tensor = data.draw(st.sampled_from(names_in(groups)))
    companion = groups[target][0]
    moved = move_tensor(groups, tensor, target)
    assert names_in(moved) == names_in(groups)
    assert any(tensor in group and companion in group for group in moved)


def test_a_border_never_empties_a_group() -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        move_border((("a",), ("b", "c")), 0, 2)


def test_a_single_tensor_has_no_neighbour() -> None:
    assert propose((("a",),), {"a": 0}, np.random.default_rng(0)) == (("a",),)
