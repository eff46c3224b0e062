"""What measured settings say of others: an error that is shared, a machine that is not what it was, settings that are far away."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.search.correction import CARRIED, Correction, MeasuredPoint, Session, knobs_of, mean_errors_pct, similarity
from dpro_search.space.plan import Plan

WIDTH = 0.12
KNOBS = knobs_of({"servers": 2, "bigarray_bound": 1_000_000, "p3": False, "slice_threshold": 40_000, "tensor_groups": None})
SLICES = [Plan.of(p3=True, slice_threshold=size) for size in (100_000, 120_000, 4_000_000)]


def point(plan, predicted_us, measured_us, noise=0.01):
    interval_us = (predicted_us * (1 - WIDTH), predicted_us * (1 + WIDTH))
    return MeasuredPoint(plan=plan, predicted_us=predicted_us, interval_us=interval_us, measured_us=measured_us, noise=noise)


def correction(*changed, machine=1.0, recording_us=4e5, noise=0.01):
    """After one session; all runs take `machine` times what they would."""
    recorded = point(Plan(), 4e5, 4e5 * machine, noise)
    points = tuple(point(plan, 3e5, 3e5 * error * machine, noise) for plan, error in changed)
    return Correction((Session(recorded=recorded, changed=points, recording_us=recording_us),), KNOBS)


def test_a_setting_is_corrected_by_those_that_are_like_it_and_the_less_the_farther_it_is():
    fitted_correction = correction((SLICES[0], 0.9))
    same, near, far, other = (fitted_correction.of(plan, WIDTH) for plan in (*SLICES, Plan.of(servers=1, bigarray_bound=30_000)))
    assert 0.9 < same[0] < near[0] < far[0] < other[0] < 1
    assert same[1] < near[1] < far[1] < other[1] < 1
    assert other == pytest.approx((1, 1), abs=0.05)


def test_what_the_whole_machine_does_is_not_taken_for_errors_of_plans():
    slow, as_it_was = correction((SLICES[0], 1.0), machine=1.2), correction((SLICES[0], 1.0))
    assert slow.carried == 0
    for plan in (Plan(), *SLICES):
        assert slow.of(plan, WIDTH)[0] == pytest.approx(as_it_was.of(plan, WIDTH)[0], abs=0.02)


def test_a_recording_that_was_short_is_no_change_of_the_machine_if_the_prediction_holds():
    fitted_correction = correction((SLICES[0], 1.0), recording_us=3.7e5)
    assert not fitted_correction.sessions[0].machine_changed
    assert fitted_correction.of(SLICES[0], WIDTH)[0] == pytest.approx(1, abs=0.03)


def test_half_of_a_small_change_of_the_machine_is_expected_to_last():
    factor = correction((SLICES[0], 1.0), machine=1.03).of(Plan.of(servers=1, bigarray_bound=30_000), WIDTH)[0]
    assert 1.005 < factor < 1 + CARRIED * 0.03 + 0.003


def test_without_the_recording_s_own_time_the_recorded_setting_is_believed_a_little():
    assert 1 < correction(machine=1.05, recording_us=None).of(Plan(), WIDTH)[0] < 1.05


def test_noisy_measurements_move_little():
    calm, noisy = (correction((SLICES[0], 0.9), noise=noise).of(SLICES[0], WIDTH)[0] for noise in (0.01, 0.3))
    assert calm < noisy < 1


def test_more_sessions_teach_more_and_each_has_a_machine_of_its_own():
    once, slow = (correction((SLICES[0], 0.9), machine=machine) for machine in (1.0, 1.2))
    twice = Correction((*once.sessions, *slow.sessions), KNOBS)
    (factor, narrowing), (factor_once, narrowing_once) = (learned.of(SLICES[0], WIDTH) for learned in (twice, once))
    assert 0.9 < factor < factor_once
    assert narrowing < narrowing_once


@given(
    st.lists(st.tuples(st.sampled_from(SLICES), st.floats(0.01, 100), st.floats(0, 2)), max_size=5),
    st.floats(0.1, 10),
    st.sampled_from([None, 4e5]),
    st.sampled_from([Plan(), *SLICES, Plan(servers=1), Plan(tensor_groups=(("a",), ("b",)))]),
)
def test_whatever_was_measured_no_correction_leaves_the_prediction_s_interval(measured, machine, recording_us, plan):
    recorded = point(Plan(), 4e5, 4e5 * machine)
    changed = tuple(point(other, 3e5, 3e5 * error, noise) for other, error, noise in measured)
    fitted_correction = Correction((Session(recorded=recorded, changed=changed, recording_us=recording_us),), KNOBS)
    factor, narrowing = fitted_correction.of(plan, WIDTH)
    assert 1 - WIDTH - 1e-9 <= factor <= 1 + WIDTH + 1e-9
    assert 0 < narrowing <= 1


def test_settings_are_alike_by_the_ratio_of_sizes_and_by_kind():
    def alike(one, other):
        return similarity(KNOBS | knobs_of(one), KNOBS | knobs_of(other))

    assert alike(Plan(servers=2), Plan()) == 1  # as recorded
    assert alike(Plan(servers=4), Plan(servers=2)) > alike(Plan(servers=8), Plan(servers=2)) > math.exp(-1)
    assert alike(Plan.of(p3=True), Plan.of(p3=False)) == pytest.approx(math.exp(-1))
    groups = [Plan(tensor_groups=tuple((f"t{i}",) for i in range(count))) for count in (2, 3, 30)]
    assert alike(groups[0], groups[1]) > alike(groups[0], groups[2])
    assert alike(groups[0], Plan()) == pytest.approx(math.exp(-1))


def test_errors_are_those_of_settings_left_out():
    sessions = correction((SLICES[0], 0.9), (SLICES[1], 0.9)).sessions
    before, after = mean_errors_pct(sessions, KNOBS)
    assert before == pytest.approx(100 / 9)
    assert after < 8
    assert mean_errors_pct(correction().sessions, KNOBS) is None
