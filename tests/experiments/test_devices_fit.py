"""How the predictor of op latencies is fitted: errors on left-out devices say how alike errors are, and how wide intervals."""

import numpy as np
import pytest
from scipy.optimize import approx_fprime

from dpro_search.costmodel.devices.correction import COORDINATES, OpPoints
from experiments.devices.fit import START, Group, fit_similarity, interval_width

WIDTH = len(COORDINATES)


def points(at, kind=0.0):
    at = np.asarray(at, dtype=float)
    whole = np.zeros((len(at), WIDTH))
    whole[:, 0] = at
    return op_points(whole, np.full(len(at), kind), np.full(len(at), kind))


def op_points(at, kind, category, random=None):
    trees = 0 if random is None else 4
    leaves = np.zeros((len(at), 0), np.uint8) if random is None else random.integers(0, 3, (len(at), trees)).astype(np.uint8)
    families = np.zeros((len(at), trees // 2)) if random is None else random.normal(size=(len(at), trees // 2))
    return OpPoints(at=at, kind=kind, category=category, leaves=leaves, families=families.astype(np.float32))


def test_the_slope_of_the_likelihood_is_its_derivative():
    random = np.random.default_rng(0)
    some = op_points(random.normal(size=(12, WIDTH)), random.integers(0, 2, 12), random.integers(0, 3, 12), random)
    group, errors = Group.of(some, np.ones(WIDTH)), random.normal(size=12) * 0.3
    value, slope = group.negative_log_likelihood(START, errors)
    assert np.isfinite(value)
    numeric = approx_fprime(START, lambda logs: group.negative_log_likelihood(logs, errors)[0], 1e-6)
    assert slope == pytest.approx(numeric, abs=1e-3)


def test_parts_of_errors_are_similarity_in_errors_that_have_them():
    random = np.random.default_rng(1)
    groups = [(points(random.uniform(0, 30, 40)), random.normal() * 0.4 + random.normal(size=40) * 0.05) for _ in range(25)]
    similarity = fit_similarity(groups)
    shared, noise = np.sqrt((similarity.deviations[:3] ** 2).sum()), similarity.deviations[5]  # all ops are of one kind
    assert 0.2 < shared < 0.7
    assert noise < 0.1


def test_an_interval_holds_nine_tenths_of_each_device_alike():
    many, few = np.linspace(0, 1, 1000), np.full(10, 5.0)
    assert interval_width([many] * 19) == pytest.approx(0.945, abs=0.01)
    assert interval_width([many, few]) == 5.0
