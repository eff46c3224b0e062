"""The theorems on tensor fusion, and what an iteration waits for: small cases whose answers can be seen."""

from __future__ import annotations

import numpy as np
import pytest
from bus_objective import BusObjective, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.collect.trace import CommSettings
from dpro_search.replay.exchanges import Exchange
from dpro_search.search.samplers._guide import (
    SyncTime,
    TensorGroupPart,
    cut,
    fitted_sync_time,
    fusing_pays,
    hot_tensors,
    joined,
    parts_of,
    single_parts,
)
from dpro_search.space.plan import Plan

SYNC = SyncTime(alpha_us=100.0, beta_us=1.0)


def part(size_bytes: float, ready_us: float) -> TensorGroupPart:
    return TensorGroupPart((f"t{ready_us}",), size_bytes, ready_us)


def exchange(names: str, posted_us: float, ended_us: float, size_bytes: float = 10.0) -> Exchange:
    ready = tuple(posted_us - len(names) + 1 + i for i in range(len(names)))
    return Exchange(tensors=tuple(names), ready_us=ready, size_bytes=size_bytes, posted_us=posted_us, ended_us=ended_us)


def test_two_that_are_ready_at_once_share_a_latency() -> None:
    assert fusing_pays(0.0, part(50, 10), part(50, 10), SYNC)


def test_the_first_does_not_wait_for_a_late_second() -> None:
    assert not fusing_pays(0.0, part(50, 10), part(50, 500), SYNC)


def test_behind_a_busy_link_nothing_is_lost_by_waiting() -> None:
    """The correction: the published rule looks at the first collective's own end only."""
    assert fusing_pays(1000.0, part(50, 10), part(50, 500), SYNC)


def test_a_second_that_comes_when_the_first_is_half_way_pays_if_the_rest_is_less_than_a_latency() -> None:
    # apart: 10 + 150, then 150 more = 310; together: 80 + 200 = 280.
    assert fusing_pays(0.0, part(50, 10), part(50, 80), SYNC)
    # together: 115 + 200 = 315.
    assert not fusing_pays(0.0, part(50, 10), part(50, 115), SYNC)


def test_what_a_plan_compresses_is_smaller_in_parts_too() -> None:
    sent = [exchange("ab", 10, 50, size_bytes=15.0), exchange("c", 20, 60, size_bytes=40.0)]
    parts = single_parts(sent, {"a": 20, "b": 10, "c": 40})
    assert [(part.tensors, part.size_bytes) for part in parts] == [(("a",), 10.0), (("b",), 5.0), (("c",), 40.0)]


def test_the_path_goes_back_to_the_last_wait_for_compute() -> None:
    exchanges = [exchange("a", 10, 50), exchange("b", 100, 300), exchange("c", 120, 400), exchange("d", 130, 450)]
    assert hot_tensors(exchanges) == {"d": 50, "c": 100, "b": 200}


def test_the_line_through_collectives_has_no_negative_term() -> None:
    exact = [exchange("a", 0, 100 + 10, 10), exchange("b", 1000, 1000 + 100 + 50, 50)]
    assert fitted_sync_time(exact).alpha_us == pytest.approx(100)
    assert fitted_sync_time(exact).beta_us == pytest.approx(1)
    falling = [exchange("a", 0, 100, 10), exchange("b", 1000, 1050, 500)]
    assert fitted_sync_time(falling).beta_us == 0
    assert fitted_sync_time([exchange("a", 0, 100, 10)]).alpha_us > 0


@given(
    sizes=st.lists(st.integers(1, 10**7), min_size=1, max_size=20),
    compute_us=st.floats(10, 5000),
    alpha_us=st.floats(1, 5000),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_walks_keep_every_tensor_once_and_joining_never_ends_later(
    sizes: list[int], compute_us: float, alpha_us: float, seed: int
) -> None:
    """On a bus that is as the theorems think it is, a walk's plan is no slower than the plan that it began with."""
    tensors = tensors_of(sizes)
    bus = BusObjective(
        tensors, CommSettings(fusion_threshold_bytes=0, cycle_time_us=1e-6), alpha_us=alpha_us, compute_us=compute_us
    )
    size_bytes = {tensor.name: tensor.size_bytes for tensor in tensors}
    sync = SyncTime(alpha_us=alpha_us, beta_us=bus.beta_us_per_byte)
    rng = np.random.default_rng(seed)
    limits = sorted(set(rng.integers(1, len(sizes) + 1, 3).tolist()) | {len(sizes)})
    names = [tensor.name for tensor in tensors]
    groups = tuple(tuple(names[a:b]) for a, b in zip([0, *limits[:-1]], limits, strict=True))
    exchanges = bus.exchanges(Plan(tensor_groups=groups))
    before = max(neighbour.ended_us for neighbour in exchanges)
    for walked in (joined(parts_of(exchanges), sync), cut(exchanges, size_bytes, sync)):
        assert sorted(name for group in walked for name in group) == sorted(names)
        after = max(neighbour.ended_us for neighbour in bus.exchanges(Plan(tensor_groups=walked)))
        assert after <= before * (1 + 1e-6)
    single = joined(single_parts(exchanges, size_bytes), sync)
    assert sorted(name for group in single for name in group) == sorted(names)
