"""Intervals from few recorded steps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.costmodel.intervals import step_interval_us

STEPS = st.lists(st.floats(100.0, 1e6), min_size=1, max_size=20)


@given(STEPS)
def test_an_interval_holds_its_own_prediction_and_has_a_width(steps):
    middle = float(np.median(steps))
    low, high = step_interval_us(steps, middle)
    assert 0 <= low < middle < high


def test_one_step_is_less_certain_than_several_that_agree():
    widths = [high - low for low, high in (step_interval_us([1000.0] * steps, 1000.0) for steps in (1, 2, 5, 20))]
    assert widths == sorted(widths, reverse=True)


def test_steps_that_differ_widen_the_interval():
    calm, restless = step_interval_us([990.0, 1000, 1010], 1000.0), step_interval_us([900.0, 1000, 1100], 1000.0)
    assert restless[0] < calm[0]
    assert restless[1] > calm[1]


def test_nine_of_ten_further_steps_are_inside():
    draw = np.random.default_rng(0)
    inside = []
    for _ in range(400):
        spread = 1000 * np.sqrt(2 * 0.03**2 / draw.chisquare(2))  # spreads of jobs differ as the prior says
        *recorded, another = draw.normal(1000, spread, 6)
        low, high = step_interval_us(recorded, float(np.mean(recorded)))
        inside.append(low <= another <= high)
    assert np.mean(inside) == pytest.approx(0.9, abs=0.04)
