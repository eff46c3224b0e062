"""A calibration: its file, the objective that it corrects, and what a run folder tells of it."""

import pickle
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dpro_search.errors import InputError
from dpro_search.search.calibration import CalibratedObjective, Calibration, calibration_named
from dpro_search.search.correction import MeasuredPoint, Session
from dpro_search.space.plan import Plan, Prediction
from tests.every_case import every_case

PLANS = [Plan(), *(Plan.of(cycle_time_us=1000.0 * 2**n) for n in range(4))]
RECORDED = {"cycle_time_us": 5000.0, "fusion_threshold_bytes": 2**26, "tensor_groups": None}


def predicted(plan):
    us = 4e5 - 1e4 * PLANS.index(plan)
    return Prediction(
        iteration_us=us,
        interval_us=(us * 0.9, us * 1.12),
        breakdown_us={"compute": us * 0.75, "exposed_communication": us * 0.25},
        peak_memory_bytes=1,
        source="recorded",
    )


class Job:
    tensors, recorded = (), None
    extra = "kept"

    def predict(self, plan):
        return predicted(plan)


def measured(plan, error):
    prediction = predicted(plan)
    us = prediction.iteration_us
    return MeasuredPoint(plan=plan, predicted_us=us, interval_us=prediction.interval_us, measured_us=us * error)


def calibration(error=1.08, machine=1.0):
    recorded, *changed = (measured(plan, machine * (1 if plan == Plan() else error)) for plan in PLANS[:3])
    session = Session(recorded=recorded, changed=tuple(changed), recording_us=predicted(Plan()).iteration_us)
    return Calibration.fit([session], RECORDED)


def test_a_setting_that_was_not_measured_is_predicted_better():
    objective = CalibratedObjective(Job(), calibration())
    for plan in PLANS[3:]:
        true_us = measured(plan, 1.08).measured_us
        assert abs(objective.predict(plan).iteration_us - true_us) < 0.7 * abs(predicted(plan).iteration_us - true_us)


def test_predictions_that_were_right_stay():
    prediction = CalibratedObjective(Job(), calibration(error=1.0)).predict(PLANS[1])
    assert prediction.iteration_us == pytest.approx(predicted(PLANS[1]).iteration_us)


def test_the_interval_narrows_and_the_parts_keep_their_shares():
    prediction, before = CalibratedObjective(Job(), calibration()).predict(PLANS[3]), predicted(PLANS[3])
    (low, high), (low_before, high_before) = prediction.interval_us, before.interval_us
    assert low_before / before.iteration_us < low / prediction.iteration_us < 1 < high / prediction.iteration_us
    assert high / prediction.iteration_us < high_before / before.iteration_us
    assert sum(prediction.breakdown_us.values()) == pytest.approx(prediction.iteration_us)
    assert prediction.breakdown_us["compute"] == pytest.approx(0.75 * prediction.iteration_us)


def test_a_correction_is_undone_exactly():
    held = calibration()
    for plan in PLANS:
        prediction = held.uncorrected(held.corrected(predicted(plan), plan), plan)
        assert prediction.iteration_us == pytest.approx(predicted(plan).iteration_us)
        assert prediction.interval_us == pytest.approx(predicted(plan).interval_us)


def test_it_is_kept_in_the_run_folder(tmp_path):
    calibration().save(tmp_path)
    assert Calibration.load(tmp_path) == calibration()


def test_a_run_folder_tells_what_its_predictions_hold():
    calibration_name = calibration_named(calibration().named, "here")
    assert [calibration_name.corrected(predicted(plan), plan) for plan in PLANS] == [
        calibration().corrected(predicted(plan), plan) for plan in PLANS
    ]


def test_the_summary_has_the_correction_and_its_error():
    summary = calibration().summary
    assert "of the 2 measured settings by +" in summary
    assert "Mean error of the measured settings: 7.4 % without the correction, " in summary
    assert "machine" not in summary
    assert "The machine has changed since the recording" in calibration(machine=1.2).summary


@every_case(
    ("content", "reason"),
    [
        (None, "make it with 'dpro-search validate'"),
        ("{", "not a calibration"),
        ('{"version": 1, "factors": {"compute": 1.2}, "points": []}', "version 1, this program reads 2 to 3; validate again"),
        ('{"version": 9}', "version 9"),
        ('{"version": 2, "sessions": []}', "not above 0"),
        ("recorded.measured_us", "not above 0"),
        ("recorded.noise", "not above 0"),
    ],
)
def test_a_damaged_file_is_one_line(content, reason, tmp_path):
    if content is not None and content.startswith("recorded."):
        raw = msgspec.to_builtins(calibration())
        raw["sessions"][0]["recorded"][content.removeprefix("recorded.")] = -1.0
        content = msgspec.json.encode(raw).decode()
    if content is not None:
        Path(tmp_path / "calibration.json").write_text(content)
    with pytest.raises(InputError, match=reason):
        Calibration.load(tmp_path)


@pytest.mark.parametrize("text", ["3f2a", '{"compute": 1.2}', "{}"])
def test_what_an_older_version_wrote_into_a_run_is_refused(text):
    with pytest.raises(InputError, match=r"run\.json: not a calibration of this version"):
        calibration_named(text, "run.json")


def test_nothing_measured_is_refused():
    with pytest.raises(InputError, match="nothing was measured"):
        Calibration.fit([])


def test_a_worker_process_gets_the_same_objective():
    objective = CalibratedObjective(Job(), calibration())
    assert pickle.loads(pickle.dumps(objective)).predict(PLANS[1]) == objective.predict(PLANS[1])
    assert objective.extra == "kept"


class Resampled(Job):
    def sampled(self, plan, *, samples, seed=0):
        return predicted(plan).iteration_us * np.linspace(0.9, 1.1, samples)


def test_times_of_resampled_replays_are_corrected_like_the_prediction():
    objective = CalibratedObjective(Resampled(), calibration())
    for plan in PLANS:
        assert objective.sampled(plan, samples=5)[2] == pytest.approx(objective.predict(plan).iteration_us)


def test_a_job_without_random_draws_has_no_samples_when_calibrated_either():
    objective = CalibratedObjective(Job(), calibration())
    with pytest.raises(InputError, match="cannot be replayed with resampled durations"):
        objective.sampled(Plan(), samples=5)


def test_what_an_objective_judges_is_corrected_like_its_prices():
    class Judging(Job):
        def reevaluated(self, plan):
            us = predicted(plan).iteration_us * 1.05
            return msgspec.structs.replace(predicted(plan), iteration_us=us, interval_us=(us * 0.8, us * 1.2))

    held = calibration()
    for plan in PLANS:
        assert CalibratedObjective(Judging(), held).reevaluated(plan) == held.corrected(Judging().reevaluated(plan), plan)
        assert CalibratedObjective(Job(), held).reevaluated(plan) == CalibratedObjective(Job(), held).predict(plan)
