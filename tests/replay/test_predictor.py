"""Predictions for the bundled recording."""

import json

import msgspec
import numpy as np
import pytest
from sample import predictor, sample

from dpro_search.errors import InputError
from dpro_search.graph.measured import measured_iteration_us
from dpro_search.kinds._evaluate import held_out, with_own_durations
from dpro_search.kinds.horovod.predictor import Predictor
from dpro_search.kinds.horovod.what_if import gains
from dpro_search.replay.horovod.ops import iteration_ops
from dpro_search.replay.outputs import measured_ops, perfetto_json
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scale
from dpro_search.space.tensorflow.fusion_moves import contiguous_groups


def rate(bps):
    return msgspec.structs.replace(predictor().cluster, rate_bps=bps)


def test_the_recorded_setting_is_predicted_within_8_percent_of_the_untraced_steps():
    prediction = predictor().predict(Plan())
    assert prediction.iteration_us == pytest.approx(measured_iteration_us(sample()), rel=0.08)
    assert prediction.settled
    assert prediction.source == "recorded"


def test_predictions_are_deterministic():
    again = Predictor.from_trace(sample())
    plan = Plan(tensor_groups=contiguous_groups(predictor().tensors, 6))
    assert again.predict(plan) == predictor().predict(plan)


def test_the_interval_holds_the_prediction_and_is_wider_for_a_changed_setting():
    recorded, changed = predictor().predict(Plan()), predictor().predict(Plan.of(cycle_time_us=2000.0))
    for prediction in (recorded, changed):
        assert prediction.interval_us[0] < prediction.iteration_us < prediction.interval_us[1]
    assert changed.source == "extrapolated"
    assert changed.interval_us[1] - changed.interval_us[0] > recorded.interval_us[1] - recorded.interval_us[0]


def test_a_faster_link_is_faster_and_never_beats_the_compute():
    times = [predictor().predict(Plan(), rate(bps)).iteration_us for bps in (2e8, 5e8, 1e9, 2e9, 1e10, None)]
    assert times == sorted(times, reverse=True)
    compute = max(float((p.main_us + p.host_us).mean()) for p in predictor().graph.profiles)
    assert times[-1] > compute


def test_no_fusion_is_slower_than_horovods_default():
    assert predictor().predict(Plan.of(fusion_threshold_bytes=0)).iteration_us > predictor().predict(Plan()).iteration_us


def test_one_group_of_everything_hides_nothing():
    whole = predictor().predict(Plan(tensor_groups=contiguous_groups(predictor().tensors, 1)))
    assert whole.iteration_us > predictor().predict(Plan()).iteration_us


def test_the_breakdown_adds_up_to_the_iteration():
    prediction = predictor().predict(Plan())
    assert sum(prediction.breakdown_us.values()) == pytest.approx(prediction.iteration_us, rel=0.1)


def test_a_larger_fusion_buffer_needs_more_memory():
    small, large = (predictor().predict(Plan.of(fusion_threshold_bytes=n)).peak_memory_bytes for n in (2**20, 2**26))
    assert large - small > 2**24


def test_a_held_out_step_is_predicted_from_the_others():
    step = int(predictor().graph.steps[2])
    others, measured, error = held_out(sample(), step, Predictor)
    assert step not in others.graph.steps
    assert measured > 0
    assert abs(error) < 15


def test_a_step_that_was_not_profiled_cannot_be_held_out():
    with pytest.raises(InputError, match="step 0 was not profiled"):
        held_out(sample(), 0, Predictor)


def test_steps_replayed_from_their_own_durations_are_close():
    assert with_own_durations(sample(), Predictor)[2] < 8


@pytest.mark.parametrize("text", ["compute=0.9", "rank0.compute=0.5", "bandwidth=2", "communication=0"])
def test_improvements_never_slow_the_job(text):
    changed = predictor().scaled(Scale.parse(text)).predict(Plan())
    assert changed.iteration_us <= predictor().predict(Plan()).iteration_us * 1.01


def test_free_communication_leaves_the_compute():
    free = predictor().scaled(Scale.parse("communication=0")).predict(Plan()).iteration_us
    works = [p.main_us + p.host_us + sum(r.work_us for r in p.releases) for p in predictor().graph.profiles]
    assert free == pytest.approx(max(float(work.mean()) for work in works), rel=0.05)


def test_gains_are_sorted():
    found = [row["gain_us"] for row in gains(predictor())]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("text", ["", "compute", "rank0.bandwidth=2", "bandwidth=0", "speed=2"])
def test_a_malformed_question_is_refused(text):
    with pytest.raises(InputError, match=r"write compute=0\.9|must be above 0"):
        Scale.parse(text)


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(InputError, match="ranks 0 to 1"):
        predictor().scaled(Scale.parse("rank7.compute=0.5"))


def test_sampled_replays_depend_on_the_seed_and_not_on_the_threads():
    one, two, other = (
        predictor().sampled(Plan(), samples=8, seed=seed, threads=threads) for seed, threads in ((5, 1), (5, 2), (6, 2))
    )
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, other)
    assert len(set(one.tolist())) > 1


def test_more_samples_extend_fewer():
    few, many = (predictor().sampled(Plan(), samples=count) for count in (3, 6))
    np.testing.assert_array_equal(many[:3], few)


def test_sampled_replays_of_a_plan_and_a_cluster_are_around_its_prediction():
    plan, cluster = Plan.of(fusion_threshold_bytes=2**22), rate(1e9)
    found = predictor().sampled(plan, cluster, samples=20)
    assert np.median(found) == pytest.approx(predictor().predict(plan, cluster).iteration_us, rel=0.05)


def test_no_samples_are_refused():
    with pytest.raises(InputError, match="samples"):
        predictor().sampled(Plan(), samples=0)


def test_the_perfetto_file_has_both_sides_of_one_step():
    timeline = iteration_ops(predictor().timeline(Plan(), log=True, iterations=8))
    measured = measured_ops(sample(), int(predictor().graph.steps[0]))
    events = json.loads(perfetto_json(timeline, measured=measured))["traceEvents"]
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
