"""What a residual expects is the mean of a Gaussian process, and what it explains is the part of the variance that goes."""

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from dpro_search.costmodel.residual import Residual


def near(left, right):
    return np.exp(-0.5 * (left[:, None] - right[None, :]) ** 2)


def residual(points, errors, noise=0.01):
    return Residual(covariance=near, points=np.array(points), errors=np.array(errors), noise=noise)


def test_it_says_what_scikit_learn_says():
    points, errors, others = np.array([0.0, 1.0, 3.0]), np.array([0.2, -0.1, 0.3]), np.linspace(-2, 6, 17)
    process = GaussianProcessRegressor(RBF(1.0) + WhiteKernel(0.01), optimizer=None, alpha=0.0).fit(points[:, None], errors)
    mean, deviation = process.predict(others[:, None], return_std=True)
    expected, explained = residual(points, errors).expected_and_explained(others)
    assert expected == pytest.approx(mean, abs=1e-9)
    assert residual(points, errors).expected(others) == pytest.approx(mean, abs=1e-9)
    assert 1.01 - explained == pytest.approx(deviation**2, abs=1e-9)


def test_far_from_all_measurements_the_formula_alone_remains():
    expected, explained = residual([0.0, 1.0], [0.5, 0.5]).expected_and_explained(np.array([50.0]))
    assert expected == pytest.approx([0.0], abs=1e-12)
    assert explained == pytest.approx([0.0], abs=1e-12)


def test_what_the_measured_errors_share_among_themselves_is_not_expected_elsewhere():
    alone, together = 0.01 * np.eye(3), 0.01 * np.eye(3) + 1.0
    points, errors = [0.0, 2.0, 4.0], [0.4, 0.4, 0.4]
    at = np.array([2.0])
    assert abs(residual(points, errors, together).expected(at)[0]) < residual(points, errors, alone).expected(at)[0] / 2


def test_errors_without_an_inverse_covariance_are_refused():
    with pytest.raises(np.linalg.LinAlgError):
        _ = residual([0.0, 0.0], [0.1, 0.2], noise=0.0).weights
