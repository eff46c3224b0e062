"""Texts of synchronisation schemes."""

import pytest

from dpro_search.errors import InputError
from dpro_search.runtime.schemes import Adsp, Bsp, Pace, Ssp, parse_paces, parse_scheme
from dpro_search.space.plan import Plan


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("bsp", Bsp()),
        (" ssp( staleness = 2 ) ", Ssp(staleness=2)),
        ("adsp(commits=2, period_s=0.5)", Adsp(commits=2, period_s=0.5)),
    ],
)
def test_a_text_names_a_scheme_and_its_parameters(text, scheme):
    assert parse_scheme(text) == scheme
    assert parse_scheme(str(scheme)) == scheme


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("hogwild", "none of bsp, ssp"),
        ("ssp(slack=2)", "ssp has no parameter 'slack'"),
        ("ssp(staleness=1.5)", "must be a whole number"),
        ("ssp(staleness=1, staleness=2)", "given twice"),
        ("fixed-adacomm(steps=0)", "steps must be > 0"),
        ("adsp(period_s=nan)", "period_s must be > 0"),
        ("diloco(outer_momentum=1)", "must be below 1"),
    ],
)
def test_what_is_wrong_with_a_text_is_said(text, complaint):
    with pytest.raises(InputError, match=complaint.replace("(", r"\(")):
        parse_scheme(text)


def test_a_mix_of_speeds_gives_the_seconds_of_each_step():
    assert [pace.step_s for pace in parse_paces("1:1:2:4", step_s=0.08)] == [0.08, 0.08, 0.04, 0.02]
    with pytest.raises(InputError, match="1:1:2:3"):
        parse_paces("1:x", step_s=0.1)


def test_a_speed_that_changes_counts_from_its_time_on():
    pace = Pace(step_s=1.0, changes=((10.0, 2.0), (20.0, 0.5)))
    assert [pace.step_at(time) for time in (0.0, 9.9, 10.0, 25.0)] == [1.0, 1.0, 2.0, 0.5]


def test_a_plan_holds_a_scheme_as_text_in_one_spelling():
    plan = Plan.of(synchronisation="ssp(staleness=2)")
    assert Plan.from_json(plan.to_json()) == plan == Plan.of(synchronisation="ssp( staleness=2 )")
    with pytest.raises(InputError, match="none of bsp"):
        Plan.of(synchronisation="best")
