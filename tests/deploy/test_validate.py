"""What measured runs say about a plan: the statistics; the runs themselves are in tests/integration."""

import numpy as np
import pytest

from dpro_search.deploy.validate import _compared
from dpro_search.space.plan import Plan, Prediction


def prediction(us):
    return Prediction(
        iteration_us=us, interval_us=(us * 0.95, us * 1.05), breakdown_us={}, peak_memory_bytes=None, source="recorded"
    )


def runs(centre_us, spread_us, rng):
    return [centre_us + rng.normal(0, 1) * spread_us + rng.normal(0, 5_000, size=20) for _ in range(4)]


def compared(plan_us, base_us=400_000.0, noise_pct=1.0, spread_us=2_000.0):
    rng = np.random.default_rng(1)
    return _compared(
        Plan(cycle_time_us=1.0), prediction(380_000.0), prediction(400_000.0),
        runs(plan_us, spread_us, rng), runs(base_us, spread_us, rng), noise_pct,
    )  # fmt: skip


def test_a_clear_gain_is_beyond_the_noise():
    found = compared(320_000.0)
    assert found.beyond_noise
    assert found.speedup_measured == pytest.approx(1.25, rel=0.02)
    assert found.speedup_interval[0] < 1.25 < found.speedup_interval[1]
    assert found.error_pct == pytest.approx((380 / 320 - 1) * 100, abs=2)


def test_a_clear_loss_is_beyond_the_noise_too():
    assert compared(480_000.0).beyond_noise


def test_no_difference_is_within_the_noise():
    assert not compared(400_000.0).beyond_noise


def test_a_gain_below_the_noise_floor_proves_nothing():
    assert not compared(390_000.0, noise_pct=5.0).beyond_noise
