"""`PlanBeliefs`: what the run of one plan says about others, and which run is worth most."""

from __future__ import annotations

import numpy as np
import pytest

from dpro_search.analysis.plan_beliefs import PlanBeliefs


def beliefs(logs, slopes, rest=0.02, noise=0.01) -> PlanBeliefs:
    slopes = np.atleast_2d(slopes).T
    covariance = slopes @ slopes.T + rest**2 * np.eye(len(logs))
    return PlanBeliefs(logs=np.array(logs, float), covariance=covariance, noise=noise)


def test_a_run_moves_the_plans_that_share_its_error_and_no_other():
    # Plans 0 and 1 wait for the network, whose rate may be 20 % off; plan 2 does not.
    now = beliefs([1.0, 1.05, 1.1], [0.2, 0.2, 0.0]).after({0: 1.3})
    assert now.logs[0] == pytest.approx(1.3, abs=0.01)
    assert now.logs[1] == pytest.approx(1.35, abs=0.02)
    assert now.logs[2] == 1.1
    assert now.best == 2


def test_a_measured_plan_is_known_as_well_as_it_was_measured():
    now = beliefs([1.0, 1.1], [0.2, 0.1]).after({0: 1.2})
    assert np.sqrt(now.covariance[0, 0]) == pytest.approx(0.01, rel=0.2)
    assert now.covariance[1, 1] < beliefs([1.0, 1.1], [0.2, 0.1]).covariance[1, 1]


def test_nothing_is_worth_running_where_one_plan_is_certainly_fastest():
    worth = beliefs([0.0, 5.0], [0.1, 0.1]).worth()
    assert worth == pytest.approx([0.0, 0.0], abs=1e-9)


def test_what_all_plans_share_tells_nothing_about_their_order():
    shared = beliefs([0.0, 0.01], [0.3, 0.3], rest=1e-6).worth().max()
    apart = beliefs([0.0, 0.01], [0.3, 0.0], rest=1e-6).worth().max()
    assert shared < 1e-6 < apart


def test_the_worth_is_the_expected_gain_of_the_plan_that_is_chosen():
    start, rng = beliefs([0.0, 0.02, 0.3], [0.15, 0.0, 0.05]), np.random.default_rng(0)
    gains = []
    for _ in range(4000):
        truth = rng.multivariate_normal(start.logs, start.covariance)
        after = start.after({0: truth[0] + start.noise * rng.standard_normal()})
        gains.append(truth[start.best] - truth[after.best])
    assert np.mean(gains) == pytest.approx(start.worth()[0], rel=0.15)


def test_of_plans_that_may_be_fastest_the_less_certain_one_is_run_first():
    start = beliefs([0.0, 0.02, 0.3], [0.01, 0.15, 0.05])
    assert start.best == 0
    assert start.next_plan() == 1
    assert start.next_plan(but={1}) == 0
    with pytest.raises(ValueError, match="empty"):
        start.next_plan(but={0, 1, 2})
