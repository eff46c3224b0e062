"""Predictions from recorded steps: of written jobs, whose truth is known, and of real ones."""

import random
from contextlib import suppress
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from importer_kit import shared_trace
from kineto_files import small_job
from kineto_machine import Launch, Program, Synchronize, run, scaled

from dpro_search.collect.readers.kineto.importer import read
from dpro_search.errors import DproSearchError, InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.kinds import JobInScenario, job_of
from dpro_search.kinds.imported.job import Imported
from dpro_search.replay import replay
from dpro_search.replay.device_time import mean_breakdown_us, rank_times
from dpro_search.space.plan import Plan
from dpro_search.space.recorded.step_graph import graph_of_step
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph, csr
from dpro_search.space.scenario import Scenario
from tests.cli.facts import replayed
from tests.profiles import profiled, replay_of, times_of

PROGRAM: Program = [Launch("gemm", 10, 400), Launch("relu", 10, 100), Synchronize(50)]
REAL = (
    "convnet_v100_ns_timestamps",
    "ddp_resnet50_a100_rank0of2",
    "resnet50_v100_workers0",
    "resnet50_v100_workers4",
    "torchrec_a100_rank3of8",
)


def job_of_program(tmp_path, program: Program = PROGRAM, steps: int = 6) -> Imported:
    profile, _ = run(program, steps)
    return profiled(read([profile.write(tmp_path / "trace.json")]))


def real(name: str) -> Imported:
    return profiled(shared_trace(f"kineto_single/{name}.json.gz"))


def test_the_prediction_of_a_steady_job_is_its_iteration(tmp_path):
    job = job_of_program(tmp_path)
    prediction = JobInScenario(job).predict(Plan())
    assert prediction.iteration_us == pytest.approx(job.measurement(Scenario()).median_us, abs=0.5)
    assert prediction.interval_us[0] <= prediction.iteration_us <= prediction.interval_us[1]
    assert prediction.settled


def test_a_change_is_predicted_as_the_changed_job_runs(tmp_path):
    _, ends = run(scaled(PROGRAM, kernels=0.5), 8)
    changed_times = times_of(job_of_program(tmp_path), "compute=0.5")
    assert changed_times.iteration_us == pytest.approx(ends[-1] - ends[-2], rel=0.01)


def test_the_breakdown_adds_up_to_the_iteration(tmp_path):
    prediction = JobInScenario(job_of_program(tmp_path)).predict(Plan())
    parts = prediction.breakdown_us
    assert set(parts) == {"compute", "exposed_communication", "waiting_for_ranks", "unknown", "idle"}
    assert sum(parts.values()) == pytest.approx(prediction.iteration_us)
    assert parts["compute"] == pytest.approx(500)


def test_where_iterations_overlap_the_breakdown_is_no_longer_than_one():
    pred_ptr, pred_idx = csr(np.array([1]), np.array([0]), 2)
    graph = ReplayGraph(
        duration_us=np.array([300.0, 200.0]),
        device=np.array([0, 1], np.int32),
        pred_ptr=pred_ptr,
        pred_idx=pred_idx,
        policy=np.full(2, OrderPolicy.PROGRAM, np.int8),
        rank_of_device=np.zeros(2, np.int32),
        kind=np.full(2, OpKind.FORWARD, np.int8),
        carry_src=np.array([0, 1], np.int32),
        carry_dst=np.array([0, 1], np.int32),
    )
    timeline = replay(graph)
    assert timeline.iteration_us == pytest.approx(300)
    assert mean_breakdown_us(rank_times(timeline))["compute"] == pytest.approx(300), "an iteration's own ops are under way for 500"


def test_diagnose_and_replay_state_one_iteration_and_one_breakdown(tmp_path):
    profile, _ = run(PROGRAM, 7)  # 6 measured iterations: the median lies between two steps
    relus = sorted((record for record in profile.records if record["name"] == "relu"), key=lambda record: record["ts"])
    for number, record in enumerate(relus):
        record["dur"] += number
    job = job_of(read([profile.write(tmp_path / "trace.json")]))
    facts, diagnosis = replayed(job.trace), msgspec.to_builtins(job.diagnose())
    assert diagnosis["iteration_us"] == facts["predicted_iteration_us"]
    assert diagnosis["measured_iteration_us"] == facts["measured_iteration_us"]
    assert diagnosis["breakdown_us"] == facts["breakdown_us"]
    assert all(
        row["predicted_iteration_us"] + row["gain_us"] == pytest.approx(facts["predicted_iteration_us"])
        for row in diagnosis["gains"]
    )


@pytest.mark.parametrize("name", REAL[:2])
def test_real_jobs_are_diagnosed_with_the_iteration_that_is_replayed(name):
    job = job_of(shared_trace(f"kineto_single/{name}.json.gz"))
    assert job.diagnose().iteration_us == job.predict(Plan()).iteration_us


def test_a_held_out_step_is_predicted_without_it(tmp_path):
    profile, _ = run(PROGRAM, 6)
    last = max(record["ts"] for record in profile.records if record["name"] == "relu")
    for record in profile.records:
        if record["name"] == "relu" and record["ts"] == last:
            record["dur"] = 150
    job = profiled(read([profile.write(tmp_path / "trace.json")]))
    held = job.compared(5)
    assert held.measured_us == pytest.approx(held.baseline_us + 50, abs=1)
    assert held.prediction.iteration_us == pytest.approx(held.baseline_us, abs=1)
    assert held.error_pct == pytest.approx((held.prediction.iteration_us / held.measured_us - 1) * 100)


def test_a_step_without_a_measured_iteration_cannot_be_held_out(tmp_path):
    with pytest.raises(InputError, match="--holdout-step 0: steps with a measured iteration are 1 to 5"):
        job_of_program(tmp_path).compared(0)
    with pytest.raises(InputError, match="measured iteration are none"):
        profiled(read([small_job(steps=1).write(tmp_path / "one.json")])).compared(0)


def test_one_step_alone_is_measured_from_its_first_event(tmp_path):
    job = profiled(read([small_job(steps=1).write(tmp_path / "one.json")]))
    assert job.measurement(Scenario()).median_us is None
    (step,) = job.compared(None).steps
    assert (step.measured_us, step.replayed_us) == pytest.approx((155, 155))


@pytest.mark.parametrize("name", REAL)
def test_real_jobs_replayed_from_their_own_durations(name):
    for step in real(name).compared(None).steps:
        assert step.replayed_us == pytest.approx(step.measured_us, rel=1e-3)


@pytest.mark.parametrize("name", REAL)
def test_real_jobs_held_out_steps_are_met_as_well_as_by_the_median_of_the_others(name):
    job = real(name)
    held = [job.compared(step) for step in replay_of(job).measured.iterations_us]
    error, baseline = (np.mean([abs(getattr(h, column)) for h in held]) for column in ("error_pct", "baseline_error_pct"))
    assert error < baseline + 0.5


@pytest.mark.parametrize("name", REAL)
def test_real_jobs_the_ops_and_waits_of_one_step_with_the_durations_of_another_take_what_the_other_took(name):
    """What was inferred to wait for what is no accident of one step."""
    recorded = replay_of(real(name))
    typical, ops = recorded.typical_graph, recorded.steps.ops
    for row, step in enumerate(ops.steps):
        if step in recorded.measured.iterations_us:
            own_replay = replay(graph_of_step(ops, step))
            crossed = replay(replace(typical, duration_us=typical.samples_us[row].astype(float)))
            assert crossed.iteration_us == pytest.approx(own_replay.iteration_us, rel=0.01)


def test_dlrm_eight_ranks_replay_as_they_ran():
    (step,) = profiled(shared_trace("kineto_dlrm_8ranks")).compared(None).steps
    assert step.replayed_us == pytest.approx(step.measured_us, rel=2e-3)


ODD = (None, "", -1, 0, 1e30, 2**70, "7", [], {}, True, 1.5, float("nan"), -5, 1_700_000_000_000_050)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), damages=st.integers(1, 12))
def test_whatever_the_records_hold_there_is_a_prediction_or_an_error_that_says_why(tmp_path_factory, seed, damages):
    rng = random.Random(seed)
    profile, _ = run([*PROGRAM, Launch("copy", 20, 60, stream=9, waits_for=7)], 4)
    for _ in range(damages):
        record = rng.choice(profile.records)
        part = rng.choice([part for part in (record, record.get("args")) if isinstance(part, dict) and part] or [{"x": 1}])
        field = rng.choice(list(part))
        if rng.random() < 0.3 and isinstance(part[field], int | float):
            part[field] += rng.choice([-1000, -100, -1, 1, 100, 1e6])
        else:
            part[field] = rng.choice(ODD)
    path = profile.write(tmp_path_factory.mktemp("damaged") / "trace.json")
    with suppress(DproSearchError):
        job = profiled(read([path]))
        assert times_of(job).iteration_us >= 0
        job.compared(None)
