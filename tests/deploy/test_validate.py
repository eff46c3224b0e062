"""What measured runs say about a plan: the order of runs, the statistics, the refusals; real jobs are in tests/integration."""

import subprocess

import msgspec
import numpy as np
import pytest

from dpro_search.collect.launch.ranks import JobSpec, wait_for
from dpro_search.deploy.measured_plans import measured_session
from dpro_search.deploy.validate import is_beyond_noise, measured_plan, validate
from dpro_search.errors import InputError, JobError
from dpro_search.search.calibration import Calibration
from dpro_search.space.plan import Plan
from tests.deploy.fake_job import FAST, SLOW, FakeJob, prediction, validated


def test_the_recorded_setting_opens_and_closes_each_round():
    job = FakeJob({Plan(): 4e5, FAST: 3e5, SLOW: 5e5})
    validated(job, rounds=2)
    assert job.ran == [Plan(), FAST, SLOW, Plan()] * 2


def test_a_gain_and_a_loss_are_proved():
    validation = validated(FakeJob({Plan(): 4e5, FAST: 3.2e5, SLOW: 5e5}))
    fast, slow = validation.plans
    assert fast.beyond_noise
    assert fast.speedup_measured == pytest.approx(1.25, rel=0.02)
    assert fast.speedup_interval[0] < 1.25 < fast.speedup_interval[1]
    assert fast.error_pct == pytest.approx((3 / 3.2 - 1) * 100, abs=1)
    assert slow.beyond_noise
    assert slow.speedup_measured < 1
    assert validation.baseline_error_pct == pytest.approx(0, abs=1)


def test_rounds_are_added_until_the_medians_are_known():
    medians_us = {Plan(): 4e5, FAST: 3e5, SLOW: 5e5}
    assert validated(FakeJob(medians_us), rounds=2, most_rounds=5).rounds == 2
    validation = validated(FakeJob(medians_us, spread=0.3), rounds=2, most_rounds=5)
    assert validation.rounds == 5
    assert not validation.stable


def test_a_plan_that_trains_something_else_gets_no_speed_up():
    job = FakeJob({Plan(): 4e5, FAST: 3e5, SLOW: 5e5}, losses={FAST: (3.0, 2.9, 2.8)})
    validation = validated(job)
    (refused,) = validation.refused
    assert refused.plan == FAST
    assert refused.measured_us == pytest.approx(3e5, rel=0.02)
    assert "differ" in refused.losses.reason
    assert [plan.plan for plan in validation.plans] == [SLOW]
    session = measured_session(validation, prediction(4e5))
    assert [point.plan for point in (session.recorded, *session.changed)] == [Plan(), SLOW]


def test_a_plan_that_fails_is_not_run_again_and_the_others_continue():
    job = FakeJob({Plan(): 4e5, FAST: 3e5, SLOW: 5e5}, fails=[(FAST, 2)])
    said = []
    validation = validated(job, rounds=3, on_run=lambda *what: said.append(what))
    assert job.ran == [Plan(), FAST, SLOW, Plan(), Plan(), FAST, SLOW, Plan(), Plan(), SLOW, Plan()]
    (failed,) = validation.failed
    assert (failed.plan, failed.runs, failed.reason) == (FAST, 1, "failed at 1.0 us")
    assert failed.measured_us == pytest.approx(3e5, rel=0.02)
    assert [plan.plan for plan in validation.plans] == [SLOW]
    assert [name for name, what in said if isinstance(what, JobError)] == ["plan 1"]
    assert [point.plan for point in measured_session(validation, prediction(4e5)).changed] == [SLOW]


def test_each_run_is_announced_with_how_many_there_are_to_be():
    job, started = FakeJob({Plan(): 4e5, FAST: 3e5, SLOW: 5e5}, fails=[(FAST, 1)]), []
    validated(job, rounds=2, on_start=lambda *run: started.append(run))
    assert started[:4] == [("recorded", 0, 8), ("plan 1", 1, 8), ("plan 2", 2, 8), ("recorded", 3, 8)]
    assert started[4:] == [("recorded", 4, 7), ("plan 2", 5, 7), ("recorded", 6, 7)]


def test_rounds_end_where_no_plan_is_left():
    job = FakeJob({Plan(): 4e5, FAST: 3e5, SLOW: 5e5}, fails=[(FAST, 1), (SLOW, 2)])
    validation = validated(job, rounds=5)
    assert validation.rounds == 2
    assert [(plan.runs, plan.measured_us is None) for plan in validation.failed] == [(0, True), (1, False)]


@pytest.mark.parametrize(("fails", "said"), [([(FAST, 1), (SLOW, 1)], "at 1.0"), ([(Plan(), 2)], "at None")])
def test_it_fails_if_every_plan_or_the_recorded_setting_fails(fails, said):
    with pytest.raises(JobError, match=said):
        validated(FakeJob({Plan(): 4e5, FAST: 3e5, SLOW: 5e5}, fails=fails))


def test_a_plan_is_not_waited_for_much_longer_than_the_recorded_setting_took(monkeypatch):
    job = FakeJob({Plan(): 4e5, FAST: 3e5, SLOW: 5e5})
    now_s = iter([0, 100, 1000, 1050] * 2)  # the recorded setting's runs took 100 and 50 s
    monkeypatch.setattr("time.monotonic", lambda: next(now_s))
    validated(job)
    assert job.limits_s[:4] == [None, 500, 500, None]
    short = FakeJob({Plan(): 4e5, FAST: 3e5, SLOW: 5e5})
    now_s = iter([0, 2] * 4)
    validated(short)
    assert short.limits_s[:4] == [None, 300, 300, None]
    now_s = iter([0, 2] * 4)
    validated(short, timeout_s=40)
    assert set(short.limits_s[-8:]) == {40}


def test_without_printed_losses_the_comparison_is_unknown():
    job = FakeJob({Plan(): 4e5, FAST: 3e5, SLOW: 5e5}, losses=dict.fromkeys((Plan(), FAST, SLOW), ()))
    assert {plan.losses.verdict for plan in validated(job).plans} == {"unknown"}


@pytest.mark.parametrize("rounds", [{"rounds": 1}, {"rounds": 3, "most_rounds": 2}])
def test_too_few_rounds_are_refused(rounds):
    with pytest.raises(InputError, match="at least"):
        validated(FakeJob({}), **rounds)


def compared(plan_us, noise_pct):
    rng = np.random.default_rng(1)

    def runs(centre_us):
        return [centre_us + rng.normal(0, 1) * 2_000 + rng.normal(0, 5_000, size=20) for _ in range(4)]

    return measured_plan(FAST, prediction(3.8e5), prediction(4e5), runs(plan_us), runs(4e5), noise_pct)


def test_no_difference_is_within_the_noise():
    assert not compared(4e5, noise_pct=1.0).beyond_noise


def test_a_gain_below_the_noise_floor_proves_nothing():
    assert not compared(3.9e5, noise_pct=5.0).beyond_noise


def test_measurements_of_a_corrected_search_correct_uncorrected_predictions():
    job = FakeJob({Plan(): 4e5, FAST: 3.3e5, SLOW: 5e5})
    first = Calibration.fit([measured_session(validated(job), prediction(4e5))])
    baseline = first.corrected(prediction(4e5), Plan())
    plans = [(plan, first.corrected(prediction(us), plan)) for plan, us in ((FAST, 3e5), (SLOW, 5e5))]
    assert plans[0][1].iteration_us > 3.05e5
    second = measured_session(validate(job, baseline, plans), baseline, first)
    assert second.recorded.predicted_us == pytest.approx(4e5)
    assert [point.predicted_us for point in second.changed] == pytest.approx([3e5, 5e5])
    assert second.changed[0].interval_us == pytest.approx(prediction(3e5).interval_us)


@pytest.mark.parametrize(("recorded_us", "changed"), [(3.2e5, 25), (5e5, -20), (3.95e5, None), (None, None)])
def test_a_changed_machine_is_distinguished_from_a_wrong_prediction(recorded_us, changed):
    validation = validated(FakeJob({Plan(): 4e5, FAST: 3e5, SLOW: 5e5}))
    validation = msgspec.structs.replace(validation, recorded_us=recorded_us)
    assert validation.changed_pct == (None if changed is None else pytest.approx(changed, abs=2))


@pytest.mark.parametrize(
    ("interval", "beyond"), [((1.006, 1.2), True), ((1.004, 1.2), False), ((0.9, 0.996), False), ((0.9, 0.98), True)]
)
def test_a_gain_whose_shown_interval_touches_one_is_not_beyond_noise(interval, beyond):
    assert is_beyond_noise(1.1 if interval[1] > 1 else 0.94, interval, 2.0) is beyond


class ProbedJob(FakeJob):
    """A job whose script uses no file of any plan."""

    def helpers(self, plan):
        return frozenset({"ddp.py"})

    def probe(self, plan):
        raise JobError("the job does not follow the plan: its script does not use ddp.py")


def test_a_script_that_follows_no_plan_is_found_out_before_any_whole_run():
    job = ProbedJob({Plan(): 4e5})
    with pytest.raises(JobError, match="does not follow the plan"):
        validated(job)
    assert job.ran == []


def test_a_job_that_has_told_what_it_was_started_for_is_not_waited_for(tmp_path):
    with subprocess.Popen(["sh", "-c", f"touch {tmp_path}/used; exec sleep 600"]) as process:
        try:
            wait_for([process], tmp_path, JobSpec(command=("sh",), ends_with=(tmp_path / "used",)), lambda place, code: JobError())
            assert process.poll() is None
        finally:
            process.kill()


def test_plans_that_need_the_same_files_are_probed_once():
    class Followed(ProbedJob):
        def __init__(self, medians_us):
            super().__init__(medians_us)
            self.probed = []

        def probe(self, plan):
            self.probed.append(plan)

    job = Followed({Plan(): 4e5, FAST: 3e5, SLOW: 5e5})
    assert len(validated(job).plans) == 2
    assert job.probed == [FAST]


def test_runs_of_the_recorded_setting_are_kept_when_every_plan_fails():
    job = FakeJob({Plan(): 4e5}, fails={(FAST, 1), (SLOW, 1)})
    kept = []
    with pytest.raises(JobError):
        validated(job, on_round=kept.append)
    (alone,) = kept
    assert [run.number for run in alone.runs] == [-1]
    fixed = FakeJob({Plan(): 4e5, FAST: 3e5, SLOW: 5e5})
    validation = validated(fixed, kept=kept)
    assert len(validation.plans) == 2
    assert validation.rounds == 2
