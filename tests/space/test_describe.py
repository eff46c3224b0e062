"""Names of plans in one table tell the plans apart."""

from __future__ import annotations

import pytest

from dpro_search.space.describe import plan_names
from dpro_search.space.plan import Plan


@pytest.mark.parametrize(
    ("plans", "names"),
    [
        ([Plan(), Plan(servers=2)], ["as recorded", "2 servers"]),
        (
            [Plan(tensor_groups=(("a",), ("b", "c"))), Plan(tensor_groups=(("a", "b"), ("c",))), Plan(servers=2)],
            ["2 groups (of 1 + 2)", "2 groups (of 2 + 1)", "2 servers"],
        ),
        (
            [Plan(tensor_groups=(("a", "b"), ("c", "d"))), Plan(tensor_groups=(("a", "c"), ("b", "d")))],
            ["2 groups (of 2 + 2) (with b)", "2 groups (of 2 + 2) (with c)"],
        ),
        (
            [Plan(recomputed_modules=("x.1", "x.2")), Plan(recomputed_modules=("x.1", "x.3"))],
            ["2 modules recomputed (with x.2)", "2 modules recomputed (with x.3)"],
        ),
        (
            [Plan.of(cycle_time_us=2511.0), Plan.of(cycle_time_us=2512.0)],
            ["cycle 2.5 ms (2511)", "cycle 2.5 ms (2512)"],
        ),
    ],
)
def test_equal_descriptions_get_what_differs(plans: list[Plan], names: list[str]) -> None:
    assert plan_names(plans) == names


def test_no_two_names_are_equal_even_if_nothing_short_tells_them_apart() -> None:
    plans = [Plan(tensor_groups=(("a", "b"), (last, other))) for last, other in (("c", "d"), ("d", "c"))]
    plans += [Plan(tensor_groups=(("a", "b"), ("c", "e"))), Plan(tensor_groups=(("a", "b"), ("c", "f")))]
    assert len(set(plan_names(plans))) == len(plans)
