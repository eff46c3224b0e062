"""Costs that other recordings of a job might have told, and other iterations."""

from __future__ import annotations

import numpy as np
import pytest

from dpro_search.space.servers.cost_spread import CostSpread

SPREAD = CostSpread(common=0.08, worker=0.06, message=0.25, server=0.4, step=0.15)


def test_without_a_spread_all_recordings_tell_the_same():
    for factors in CostSpread(common=0.0, worker=0.0, message=0.0, server=0.0, step=0.0).drawn(3, 4, 5, seed=1):
        assert (*factors.compute, factors.message, factors.server) == (1.0,) * 5
        assert factors.step.tolist() == np.ones((4, 3)).tolist()


def test_draws_depend_on_the_seed_alone_and_more_of_them_begin_alike():
    few, many, other = SPREAD.drawn(2, 5, 3, seed=7), SPREAD.drawn(2, 5, 8, seed=7), SPREAD.drawn(2, 5, 3, seed=8)
    assert len(few) == 3
    for one, same, different in zip(few, many, other, strict=False):
        assert (one.message, one.server) == (same.message, same.server)
        assert (one.compute == same.compute).all()
        assert (one.step == same.step).all()
        assert one.message != different.message


def test_every_second_draw_is_the_opposite_of_the_one_before():
    draws = SPREAD.drawn(4, 5, 10, seed=3)
    for one, other in zip(draws[::2], draws[1::2], strict=True):
        assert one.compute * other.compute == pytest.approx(1.0)
        assert one.message * other.message == pytest.approx(1.0)
        assert one.server * other.server == pytest.approx(1.0)
        assert one.step * other.step == pytest.approx(1.0)


def test_draws_spread_as_far_as_they_are_said_to():
    draws = SPREAD.drawn(2, 3, 20_000, seed=0)
    compute = np.log([factors.compute for factors in draws])
    assert np.log([factors.message for factors in draws]).std() == pytest.approx(0.25, rel=0.03)
    assert np.log([factors.server for factors in draws]).std() == pytest.approx(0.4, rel=0.03)
    assert compute.std(axis=0) == pytest.approx(np.hypot(0.08, 0.06), rel=0.03)
    assert (compute[:, 0] - compute[:, 1]).std() == pytest.approx(0.06 * np.sqrt(2), rel=0.03)
    assert np.log([factors.step for factors in draws]).std(axis=0) == pytest.approx(0.15, rel=0.03)
