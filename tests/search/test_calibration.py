"""Real runs correct the predictions of plans that did not run."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.errors import InputError
from dpro_search.search.calibration import CalibratedObjective, Calibration, MeasuredPoint
from dpro_search.space.plan import Plan, Prediction

PLANS = [Plan(), *(Plan(cycle_time_us=float(n)) for n in range(1, 5))]
PARTS = [(300e3, 100e3), (300e3, 20e3), (310e3, 200e3), (305e3, 60e3), (300e3, 150e3)]


def predicted(plan):
    compute, exposed = PARTS[PLANS.index(plan)]
    us = compute + exposed
    return Prediction(
        iteration_us=us,
        interval_us=(us * 0.95, us * 1.05),
        breakdown_us={"compute": compute, "exposed_communication": exposed},
        peak_memory_bytes=1,
        source="recorded",
    )


class Job:
    tensors, recorded = (), None
    extra = "kept"

    def predict(self, plan):
        return predicted(plan)


def measured(plan, compute_factor, exposed_factor):
    found = predicted(plan)
    us = found.breakdown_us["compute"] * compute_factor + found.breakdown_us["exposed_communication"] * exposed_factor
    return MeasuredPoint(plan=plan, predicted_us=found.iteration_us, breakdown_us=found.breakdown_us, measured_us=us)


@given(st.floats(0.85, 1.2), st.floats(0.8, 1.25))
def test_a_plan_that_was_not_measured_is_predicted_better(compute_factor, exposed_factor):
    points = [measured(plan, compute_factor, exposed_factor) for plan in PLANS[:3]]
    objective = CalibratedObjective(Job(), Calibration.fit(points))
    for plan in PLANS[3:]:
        true_us = measured(plan, compute_factor, exposed_factor).measured_us
        before, after = (abs(us / true_us - 1) for us in (predicted(plan).iteration_us, objective.predict(plan).iteration_us))
        assert after <= max(before, 0.01)


def test_a_slower_machine_is_told_from_a_slower_link():
    factors = Calibration.fit([measured(plan, 1.1, 1.0) for plan in PLANS]).factors
    assert factors["compute"] == pytest.approx(1.1, abs=0.01)
    assert factors["exposed_communication"] == pytest.approx(1.0, abs=0.03)


def test_predictions_that_were_right_stay():
    objective = CalibratedObjective(Job(), Calibration.fit([measured(plan, 1.0, 1.0) for plan in PLANS]))
    assert objective.predict(PLANS[1]) == predicted(PLANS[1])


def test_the_interval_keeps_its_relative_width_and_the_parts_their_sum():
    found = CalibratedObjective(Job(), Calibration.fit([measured(plan, 1.1, 1.2) for plan in PLANS])).predict(PLANS[2])
    assert found.interval_us[0] / found.iteration_us == pytest.approx(0.95)
    assert sum(found.breakdown_us.values()) == pytest.approx(found.iteration_us)


def test_noisy_measurements_move_little():
    calm, noisy = (
        Calibration.fit([MeasuredPoint(**{**_fields(measured(PLANS[0], 1.2, 1.2)), "noise": noise})]).factors["compute"]
        for noise in (0.01, 0.3)
    )
    assert calm > noisy > 1


def _fields(point):
    return {name: getattr(point, name) for name in point.__struct_fields__}


def test_the_errors_before_and_after_are_those_of_points_left_out():
    calibration = Calibration.fit([measured(plan, 1.1, 1.1) for plan in PLANS])
    assert calibration.error_before_pct == pytest.approx(100 / 11)
    assert calibration.error_after_pct < 1
    assert Calibration.fit([measured(PLANS[0], 1.1, 1.1)]).error_after_pct is None


def test_it_is_kept_in_the_run_folder(tmp_path):
    calibration = Calibration.fit([measured(plan, 1.1, 0.9) for plan in PLANS])
    calibration.save(tmp_path)
    assert Calibration.load(tmp_path) == calibration


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "make it with 'dpro-search validate'"),
        ("{", "not a calibration"),
        ('{"version": 9, "factors": {}, "points": []}', "version 9"),
        ('{"factors": {"compute": -1}, "points": []}', "not above 0"),
    ],
)
def test_a_damaged_file_is_one_line(content, reason, tmp_path):
    if content is not None:
        (tmp_path / "calibration.json").write_text(content)
    with pytest.raises(InputError, match=reason):
        Calibration.load(tmp_path)


def test_nothing_measured_is_refused():
    with pytest.raises(InputError, match="nothing was measured"):
        Calibration.fit([])


def test_a_worker_process_gets_the_same_objective():
    objective = CalibratedObjective(Job(), Calibration.fit([measured(plan, 1.1, 1.1) for plan in PLANS]))
    assert pickle.loads(pickle.dumps(objective)).predict(PLANS[1]) == objective.predict(PLANS[1])
    assert objective.extra == "kept"


class Lucky(Job):
    def sampled(self, plan, *, samples, seed=0):
        return predicted(plan).iteration_us * np.linspace(0.9, 1.1, samples)


def test_times_in_other_luck_are_corrected_like_the_prediction():
    objective = CalibratedObjective(Lucky(), Calibration.fit([measured(plan, 1.1, 1.1) for plan in PLANS]))
    for plan in PLANS:
        assert objective.sampled(plan, samples=5)[2] == pytest.approx(objective.predict(plan).iteration_us)


def test_a_job_without_luck_has_none_when_calibrated_either():
    objective = CalibratedObjective(Job(), Calibration.fit([measured(PLANS[0], 1.0, 1.0)]))
    with pytest.raises(InputError, match="does not replay plans in different luck"):
        objective.sampled(Plan(), samples=5)
