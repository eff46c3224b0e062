"""The best groups of neighbours of collectives that run one after the other."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.search.samplers._cuts import best_cuts, late_cuts
from dpro_search.search.samplers._guide import SyncTime, TensorGroupPart

PARTS = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 500)), min_size=1, max_size=8)


def end_us(groups: tuple[tuple[TensorGroupPart, ...], ...], sync: SyncTime) -> float:
    free_us = 0.0
    for group in groups:
        free_us = max(free_us, max(part.ready_us for part in group)) + sync(sum(part.size_bytes for part in group))
    return free_us


@settings(max_examples=100, deadline=None)
@given(PARTS, st.sampled_from([0.0, 10.0, 200.0]), st.sampled_from([0.0, 0.5, 2.0]))
def test_no_grouping_of_neighbours_in_as_many_groups_ends_earlier(sizes, alpha_us: float, beta_us: float) -> None:
    sync = SyncTime(alpha_us=alpha_us, beta_us=beta_us)
    parts = [
        TensorGroupPart((f"t{i}",), float(size), float(ready))
        for i, (size, ready) in enumerate(sorted(sizes, key=lambda pair: pair[1]))
    ]
    least: dict[int, float] = {}
    for cuts in itertools.product((False, True), repeat=len(parts) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(parts)]
        groups = tuple(tuple(parts[a:b]) for a, b in itertools.pairwise(edges))
        least[len(groups)] = min(least.get(len(groups), float("inf")), end_us(groups, sync))
    chosen_cuts = best_cuts(parts, sync)
    assert {len(cut.groups): cut.end_us for cut in chosen_cuts} == pytest.approx(least)
    assert [cut.end_us for cut in chosen_cuts] == sorted(cut.end_us for cut in chosen_cuts)
    by_name = {part.tensors[0]: part for part in parts}
    for cut in chosen_cuts:
        groups = tuple(tuple(by_name[name] for name in group) for group in cut.groups)
        assert tuple(itertools.chain.from_iterable(groups)) == tuple(parts), "every part once, in its order"
        assert end_us(groups, sync) == pytest.approx(cut.end_us)


def test_what_is_ready_late_travels_with_what_follows_it() -> None:
    """Joined with the first, the second would delay both of the others; alone, it would cost a latency."""
    sync = SyncTime(alpha_us=10.0, beta_us=1.0)
    parts = [TensorGroupPart(("a",), 100.0, 0.0), TensorGroupPart(("b",), 10.0, 105.0), TensorGroupPart(("c",), 500.0, 106.0)]
    best, *others = best_cuts(parts, sync)
    assert best.groups == (("a",), ("b", "c"))
    assert best.end_us == 110 + 520
    assert best.end_us < min(cut.end_us for cut in others)


def test_of_equal_ends_the_one_with_fewer_groups_comes_first() -> None:
    parts = [TensorGroupPart((name,), 10.0, 0.0) for name in "abc"]
    assert [len(cut.groups) for cut in best_cuts(parts, SyncTime(alpha_us=0.0, beta_us=1.0))] == [1, 2, 3]


def test_a_part_stays_whole() -> None:
    (only,) = best_cuts([TensorGroupPart(("a", "b"), 10.0, 0.0)], SyncTime(alpha_us=1.0, beta_us=1.0))
    assert only.groups == (("a", "b"),)


@settings(max_examples=100, deadline=None)
@given(PARTS, st.sampled_from([1.0, 10.0, 200.0]), st.sampled_from([0.0, 0.5, 2.0]))
def test_late_groups_follow_each_other_without_a_pause_unless_nothing_is_ready(sizes, alpha_us: float, beta_us: float) -> None:
    sync = SyncTime(alpha_us=alpha_us, beta_us=beta_us)
    parts = [
        TensorGroupPart((f"t{i}",), float(size), float(ready))
        for i, (size, ready) in enumerate(sorted(sizes, key=lambda pair: pair[1]))
    ]
    ready_us = {part.tensors[0]: part.ready_us for part in parts}
    size_bytes = {part.tensors[0]: part.size_bytes for part in parts}
    cuts = late_cuts(parts, sync)
    assert cuts
    for groups in cuts:
        assert tuple(itertools.chain.from_iterable(groups)) == tuple(ready_us), "every part once, in its order"
        free_us = max(ready_us[name] for name in groups[0]) + sync(sum(size_bytes[name] for name in groups[0]))
        for group in groups[1:]:
            last_us = max(ready_us[name] for name in group)
            assert last_us <= free_us + 1e-6 or len(group) == 1
            free_us = max(free_us, last_us) + sync(sum(size_bytes[name] for name in group))


def test_of_groups_that_end_as_early_the_latest_come_first() -> None:
    """A hundred small gradients, and a large last one: all small ones in time for it, and as late as that allows."""
    sync = SyncTime(alpha_us=1.0, beta_us=1.0)
    parts = [*(TensorGroupPart((f"t{i}",), 2.0, 10.0 * i) for i in range(100)), TensorGroupPart(("last",), 500.0, 1000.0)]
    first, *_, earliest = late_cuts(parts, sync)
    assert len(first[0]) > len(earliest[0]) > 50
    assert best_cuts(parts, sync)[0].end_us == 1000 + 501
