"""Measured plans of a job whose devices are other than predicted: what is learned predicts the plans that did not run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dpro_search.analysis.plan_beliefs import PlanBeliefs
from dpro_search.parallel.answers.efficiencies import NOISE, learned, log_steps_us, plan_errors, scaled
from dpro_search.parallel.costs.scales import MEASURED, Scales
from dpro_search.space.plan import Plan
from tests.parallel.jobs import job, prepared

PLANS = [Plan.of(**values) for values in ({}, {"tp": 1}, {"tp": 4}, {"tp": 8}, {"pp": 2}, {"tp": 16}, {"tp": 4, "pp": 2})]
TRUTH = {"matmul": 1.15, "inside": 1.5, "between": 1.4}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    here = prepared(job(tmp_path_factory.mktemp("job")))
    return [(here.prices, here.space.strategy(plan)) for plan in PLANS]


@pytest.fixture(scope="module")
def logs_us(steps):
    """Predictions, and the steps of a job whose devices are slower, [plans] each."""
    truth = np.log([TRUTH.get(name, 1.0) for name in MEASURED])
    nothing = np.zeros((len(steps), len(MEASURED)))
    return log_steps_us(steps, nothing), log_steps_us(steps, nothing + truth)


def test_plans_that_did_not_run_are_predicted_better(steps, logs_us):
    predicted, measured = logs_us
    ran = [0, 2, 4]
    factors = learned([steps[place] for place in ran], measured[ran], np.full(len(ran), NOISE), same_job=True)
    again = log_steps_us(steps, np.tile(np.log([factors[name] for name in MEASURED]), (len(steps), 1)))
    rest = [place for place in range(len(steps)) if place not in ran]
    assert np.abs(again - measured)[rest].mean() < 0.4 * np.abs(predicted - measured)[rest].mean()


def test_what_is_as_predicted_changes_nothing(steps, logs_us):
    factors = learned(steps, logs_us[0], np.full(len(steps), NOISE), same_job=True)
    assert [*factors.values()] == pytest.approx([1.0] * len(MEASURED), abs=1e-9)


def test_what_all_plans_of_a_job_share_is_not_carried_to_another_job(steps, logs_us):
    slower = logs_us[0] + 0.2
    noise = np.full(len(steps), NOISE)
    same, other = (learned(steps, slower, noise, same_job=same_job) for same_job in (True, False))
    assert all(same[name] > other[name] for name in MEASURED)


def test_plans_that_wait_for_the_same_links_have_errors_in_common(steps):
    covariance = plan_errors(steps)
    correlation = covariance / np.sqrt(np.outer(np.diag(covariance), np.diag(covariance)))
    assert np.all(np.linalg.eigvalsh(covariance) > 0)
    assert correlation[3, 2] > correlation[3, 1]  # tensor parallel over 8 devices, over 4, and none


def test_the_run_of_one_plan_moves_the_beliefs_on_the_others(steps, logs_us):
    predicted, measured = logs_us
    beliefs = PlanBeliefs(logs=predicted, covariance=plan_errors(steps), noise=NOISE).after({3: float(measured[3])})
    rest = [place for place in range(len(steps)) if place != 3]
    assert np.abs(beliefs.logs - measured)[rest].mean() < np.abs(predicted - measured)[rest].mean()


def test_factors_multiply_those_of_the_scenario():
    twice = scaled(replace(Scales(), matmul=2.0), np.log([1.5, *[1.0] * (len(MEASURED) - 1)]))
    assert twice.matmul == pytest.approx(3.0)
    assert twice.attention == 1.0
