"""Groups with few members lean on the group that they belong to; those with many stand for themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.costmodel.pooling import Pools

FAMILY = {"light": np.array([0.0, 0.1, -0.1, 0.05, -0.05])}


def pools(**children: list[float]) -> Pools:
    return Pools.fit({**FAMILY, **{name: np.array(found) for name, found in children.items()}}, dict.fromkeys(children, "light"))


def test_a_group_lies_between_its_own_mean_and_its_family():
    fitted = pools(often=[1.0] * 4 + [1.2] * 4, once=[1.1], other=[-1.0, -0.9])
    often, once = fitted.of("often"), fitted.of("once")
    assert often.centre == pytest.approx(1.1, abs=0.02)
    assert 0 < once.centre < often.centre
    assert once.half_width(0.9) > often.half_width(0.9)


def test_an_unseen_group_is_its_family_and_less_certain():
    fitted = pools(one=[0.5, 0.6], other=[-0.5, -0.6])
    unseen = fitted.unseen("light")
    assert unseen.centre == pytest.approx(fitted.of("light").centre)
    assert unseen.half_width(0.9) > fitted.of("one").half_width(0.9)
    assert unseen.half_width(0.9) > 0.5, "as far as the kinds that were measured lie apart"
    assert fitted.unseen("heavy") is None
    assert fitted.of("heavy") is None


def test_children_that_are_alike_make_one_that_is_not_measured_certain():
    alike, apart = pools(a=[0.0, 0.1], b=[0.1, 0.0]), pools(a=[0.8, 0.9], b=[-0.8, -0.9])
    assert alike.unseen("light").half_width(0.9) < apart.unseen("light").half_width(0.9) / 2


def test_without_measurements_nothing_is_known():
    assert Pools.fit({}, {}).unseen("light") is None


def test_a_single_member_is_taken_for_what_it_is():
    fitted = Pools.fit({"light": np.array([0.3])}, {})
    assert fitted.of("light").centre == 0.3
    assert 0 < fitted.of("light").half_width(0.9) < 0.2


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), st.lists(st.floats(-3, 3), min_size=1, max_size=6), min_size=1))
def test_a_group_is_never_outside_of_what_was_measured(children):
    fitted = pools(**children)
    everything = np.concatenate([*FAMILY.values(), *(np.array(members) for members in children.values())])
    for name in children:
        assert everything.min() - 1e-9 <= fitted.of(name).centre <= everything.max() + 1e-9
        assert np.isfinite(fitted.of(name).half_width(0.9))


def test_intervals_hold_as_many_new_members_as_they_say():
    """Members and kinds drawn from normal distributions: the interval of one more member of a kind covers nine in ten."""
    rng = np.random.default_rng(0)
    inside = []
    for _ in range(200):
        centres = rng.normal(0, 0.4, size=6)
        drawn = {f"kind {i}": rng.normal(centre, 0.2, size=rng.integers(2, 9)) for i, centre in enumerate(centres)}
        fit = Pools.fit({"all": rng.normal(centres.mean(), 0.1, size=8), **drawn}, dict.fromkeys(drawn, "all"))
        for name, centre in zip(drawn, centres, strict=True):
            pooled = fit.of(name)
            inside.append(abs(rng.normal(centre, 0.2) - pooled.centre) <= pooled.half_width(0.9))
    assert 0.87 <= np.mean(inside) <= 0.97
