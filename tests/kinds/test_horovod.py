"""Predictions for the bundled recording of a Horovod job."""

import json

import numpy as np
import pytest
from sample import horovod, measured, sample, schedule

from dpro_search.errors import InputError
from dpro_search.graph.measured import measured_iteration_us
from dpro_search.kinds import JobInScenario, PlanOptions, job_of
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import Scale, Scenario
from dpro_search.space.tensorflow.fusion_moves import contiguous_groups


def asked(*changes: str, plan: Plan | None = None, job: JobInScenario | None = None) -> tuple[JobInScenario, Plan]:
    """The job with changes as text, and the plan."""
    job = job or JobInScenario(horovod())
    scenario = job.job.scenario(changes, Scenario(plan=plan or Plan()))
    return job.under(scenario)


def predicted(*changes: str, plan: Plan | None = None, job: JobInScenario | None = None) -> Prediction:
    changed_job, changed_plan = asked(*changes, plan=plan, job=job)
    return changed_job.predict(changed_plan)


def test_the_recorded_setting_is_predicted_within_8_percent_of_the_untraced_steps():
    prediction = predicted()
    assert prediction.iteration_us == pytest.approx(measured_iteration_us(sample()), rel=0.08)
    assert prediction.settled
    assert prediction.source == "recorded"


def test_predictions_are_deterministic():
    plan = Plan(tensor_groups=contiguous_groups(sample().tensors, 6))
    assert predicted(plan=plan, job=job_of(sample())) == predicted(plan=plan)


def test_the_interval_holds_the_prediction_and_is_wider_for_a_changed_setting():
    recorded, changed = predicted(), predicted("cycle_time_us=2ms")
    for prediction in (recorded, changed):
        assert prediction.interval_us[0] < prediction.iteration_us < prediction.interval_us[1]
    assert changed.source == "extrapolated"
    assert changed.interval_us[1] - changed.interval_us[0] > recorded.interval_us[1] - recorded.interval_us[0]


def test_a_faster_link_is_faster_and_never_beats_the_compute():
    rates = ("200mbit", "500mbit", "1gbit", "2gbit", "10gbit", "unlimited")
    times = [predicted(f"rate={rate}").iteration_us for rate in rates]
    assert times == sorted(times, reverse=True)
    compute = max(float((p.main_us + p.host_us).mean()) for p in measured().graph.profiles)
    assert times[-1] > compute


def test_no_fusion_is_slower_than_horovods_default():
    assert predicted("fusion_threshold_bytes=0").iteration_us > predicted().iteration_us


def test_one_group_of_everything_hides_nothing():
    assert predicted("groups=1").iteration_us > predicted().iteration_us


def test_the_breakdown_adds_up_to_the_iteration():
    prediction = predicted()
    assert sum(prediction.breakdown_us.values()) == pytest.approx(prediction.iteration_us, rel=0.1)


def test_a_larger_fusion_buffer_needs_more_memory():
    small, large = (predicted(f"fusion_threshold_bytes={size}").peak_memory_bytes for size in ("1MiB", "64MiB"))
    assert large - small > 2**24


def test_speeds_change_the_step_that_a_plan_makes():
    job = job_of(sample(), PlanOptions(compute=frozenset({"accumulation"}), allow_lossy=True))
    parts = Plan(micro_batches=4)
    assert predicted("compute=0.5", plan=parts, job=job).iteration_us < 0.8 * predicted(plan=parts, job=job).iteration_us


def test_a_held_out_step_is_predicted_from_the_others():
    held_out = horovod().compared(int(measured().graph.steps[2]))
    assert held_out.measured_us > 0
    assert held_out.prediction.iteration_us != predicted().iteration_us
    assert abs(held_out.error_pct) < 15


def test_a_step_that_was_not_profiled_cannot_be_held_out():
    with pytest.raises(InputError, match="step 0 was not profiled"):
        horovod().compared(0)


def test_steps_replayed_from_their_own_durations_are_close():
    assert horovod().compared(None).error_pct < 8


@pytest.mark.parametrize("text", ["compute=0.9", "rank0.compute=0.5", "bandwidth=2", "communication=0"])
def test_improvements_never_slow_the_job(text):
    assert predicted(text).iteration_us <= predicted().iteration_us * 1.01


def test_free_communication_leaves_the_compute():
    works = [p.main_us + p.host_us + sum(r.work_us for r in p.releases) for p in measured().graph.profiles]
    longest_us = max(float(work.mean()) for work in works)
    assert predicted("communication=0").iteration_us == pytest.approx(longest_us, rel=0.05)


def test_gains_are_sorted():
    gained_us = [gain.gain_us for gain in horovod().gains(Scenario(), horovod().questions(Scenario()))]
    assert gained_us == sorted(gained_us, reverse=True)


@pytest.mark.parametrize("text", ["", "compute", "rank0.bandwidth=2", "bandwidth=0", "speed=2"])
def test_a_malformed_question_is_refused(text):
    with pytest.raises(InputError, match=r"write compute=0\.9|must be above 0"):
        Scale.parse(text)


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match="ranks 0 to 1"):
        predicted("rank7.compute=0.5")


def test_communication_of_one_rank_is_refused():
    with pytest.raises(InputError, match="communication of all ranks can be scaled, not of one"):
        predicted("rank1.communication=0.5")


def test_sampled_replays_depend_on_the_seed():
    one, two, other = (JobInScenario(horovod()).sampled(Plan(), samples=8, seed=seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, other)
    assert len(set(one.tolist())) > 1


def test_more_samples_extend_fewer():
    few, many = (JobInScenario(horovod()).sampled(Plan(), samples=count) for count in (3, 6))
    np.testing.assert_array_equal(many[:3], few)


def test_sampled_replays_of_a_plan_and_a_cluster_are_around_its_prediction():
    job, plan = asked("rate=1gbit", "fusion_threshold_bytes=4MiB")
    assert np.median(job.sampled(plan, samples=20)) == pytest.approx(job.predict(plan).iteration_us, rel=0.05)


def test_no_samples_are_refused():
    with pytest.raises(InputError, match="samples"):
        JobInScenario(horovod()).sampled(Plan(), samples=0)


def test_the_ops_of_another_setting_are_not_known():
    for changes in (("cycle_time_us=2ms",), ("rate=1gbit",), ("compute=0.5",)):
        with pytest.raises(InputError, match="--timeline has the ops of the recorded setting"):
            schedule(None, *changes).timeline()


def test_the_perfetto_file_has_both_sides_of_one_step():
    events = json.loads(horovod().perfetto(horovod().lower(Scenario()), recorded=False))["traceEvents"]
    names = {event["args"].get("name") for event in events if event["ph"] == "M"}
    assert {"measured rank 0", "measured rank 1", "predicted rank 0", "predicted rank 1", "Horovod of rank 0"} <= names
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in slices)
    measured_end, predicted_end = (
        max(e["ts"] + e["dur"] for e in slices if (e["cat"] == "measured") == measured) for measured in (True, False)
    )
    assert predicted_end == pytest.approx(measured_end, rel=0.25)
    shown = {event["name"] for event in slices}
    assert any(name.startswith("negotiation of ") for name in shown)
    assert any(name.endswith(", transfer@0") for name in shown)
    starts = {event["id"] for event in events if event["ph"] == "s"}
    assert starts == {event["id"] for event in events if event["ph"] == "f"}
    assert starts
