"""What measured ops say about errors on other ops."""

from dataclasses import replace

import numpy as np
import pytest

from dpro_search.costmodel.devices.correction import COORDINATES, OpPoints, Similarity

WIDTH = len(COORDINATES)


def points(at, kind=0.0):
    at = np.asarray(at, dtype=float)
    whole = np.zeros((len(at), WIDTH))
    whole[:, 0] = at
    return OpPoints(
        at=whole,
        kind=np.full(len(at), kind),
        category=np.full(len(at), kind),
        leaves=np.zeros((len(at), 0), np.uint8),
        families=np.zeros((len(at), 0), np.float32),
    )


def similarity(device=0.2, wide=0.2, narrow=0.1, noise=0.02, leaves=0.0, families=0.0):
    deviations = np.array([device, 0.05, 0.05, wide, narrow, noise, leaves, families])
    return Similarity(deviations=deviations, roughness=1.0, lengths=np.full(WIDTH, 2.0))


def corrected(measured, errors, others):
    """Expected error and its deviation at other ops, from errors at measured ones."""
    covariance = similarity()
    return covariance.correction(covariance.residual(measured, errors), others)


def test_a_measured_op_is_corrected_by_its_own_error():
    measured = points([0.0, 5.0, 10.0])
    errors = np.array([0.3, -0.2, 0.1])
    shift, deviation = corrected(measured, errors, measured)
    assert shift == pytest.approx(errors, abs=0.02)
    assert (deviation < 0.05).all()


def test_ops_unlike_all_measured_ones_get_what_the_device_has_in_common():
    measured, errors = points(np.arange(20.0)), np.full(20, 0.3)
    shift, deviation = corrected(measured, errors, points([100.0], kind=3.0))
    assert 0.15 < shift[0] <= 0.3
    assert deviation[0] > corrected(measured, errors, points([5.0]))[1][0]


def test_a_correction_stays_within_the_measured_errors():
    shift, _ = corrected(points([0.0, 1.0, 2.0]), np.array([0.0, 0.2, 0.4]), points(np.linspace(-20, 20, 81)))
    assert shift.min() >= 0.0
    assert shift.max() <= 0.4


def test_ops_in_the_same_leaves_err_alike_however_far_apart_they_are():
    covariance = similarity(device=0.01, wide=0.01, narrow=0.01, leaves=0.3)
    leaves = np.repeat(np.arange(2, dtype=np.uint8), 10)[:, None] * np.ones(5, np.uint8)
    every = replace(points(np.arange(20) * 50.0), leaves=leaves)
    measured = covariance.residual(every[np.arange(9)], np.full(9, 0.4))
    shift, deviation = covariance.correction(measured, every[np.array([9, 15])])
    assert shift[0] > 0.3
    assert abs(shift[1]) < 0.1
    assert deviation[0] < deviation[1]


def test_measured_ops_say_which_family_a_device_errs_like():
    covariance = similarity(device=0.01, wide=0.01, narrow=0.01, families=0.5)
    apart = np.random.default_rng(0).normal(0, 0.3, (40, 3)).astype(np.float32)
    every = replace(points(np.arange(40) * 50.0), families=apart)
    measured = covariance.residual(every[np.arange(20)], apart[:20, 1].astype(float))
    shift, _ = covariance.correction(measured, every[np.arange(20, 40)])
    assert np.corrcoef(shift, apart[20:, 1])[0, 1] > 0.95
    assert np.abs(shift - apart[20:, 1]).mean() < 0.1


def test_one_op_with_a_bad_kernel_does_not_decide():
    shift, _ = corrected(points([0.0, 8.0]), np.array([5.0, 0.0]), points([4.0]))
    assert shift[0] < 1.5
