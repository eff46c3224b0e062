"""Kineto profiles as traces: what the events are, and the steps of written and of real jobs."""

import numpy as np
import pytest
from importer_kit import ImporterConformance, check_trace, shared_trace
from kineto_files import MAIN, START, STREAM, Profile, collective_job, distributed, small_job

from dpro_search.collect.readers.kineto.importer import IMPORTER, read
from dpro_search.collect.trace import DependencyKind, EventKind


class TestConformance(ImporterConformance):
    importer = IMPORTER

    @pytest.fixture
    def files(self, tmp_path):
        return [small_job().write(tmp_path / "trace.json", indent=1)]


class TestConformanceOfCollectives(ImporterConformance):
    """Two ranks, of which one file is damaged."""

    importer = IMPORTER

    @pytest.fixture
    def files(self, tmp_path):
        return [collective_job(rank).write(tmp_path / f"rank{rank}.json", header=distributed(rank, 2)) for rank in range(2)]


def test_events_become_streams_threads_kinds_and_steps(tmp_path):
    trace = read([small_job().write(tmp_path / "trace.json")])
    check_trace(trace)
    events = trace.events
    kinds = {EventKind(kind).name: number for kind, number in zip(*np.unique(events.kind, return_counts=True), strict=True)}
    assert kinds == {"OP": 3, "KERNEL": 6, "RUNTIME": 6}
    assert set(events.stream[events.kind == EventKind.KERNEL]) == {STREAM}
    assert set(events.stream[events.kind != EventKind.KERNEL]) == {-1}
    assert set(events.step) == {0, 1, 2}
    assert trace.meta.dropped == {"device copies of annotations": 3}


def test_iterations_are_measured_between_device_ends_not_host_marks(tmp_path):
    profile = small_job()
    for record in profile.records:  # the host runs ahead: its steps are short
        if record["name"].startswith("ProfilerStep"):
            record["dur"] = 60
    trace = read([profile.write(tmp_path / "trace.json")])
    np.testing.assert_allclose(np.diff(trace.steps.end_us), 200)


def test_steps_without_marks_end_with_the_optimizer(tmp_path):
    profile = small_job()
    profile.records = [record for record in profile.records if not record["name"].startswith("ProfilerStep")]
    for number in range(3):
        profile.op("Optimizer.step#SGD.step", START + 200 * number + 40, 20)
    trace = read([profile.write(tmp_path / "trace.json")])
    assert trace.steps.index.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "steps", "iteration_us"),
    [
        ("convnet_v100_ns_timestamps", 5, 95_600),
        ("ddp_resnet50_a100_rank0of2", 3, 222_000),
        ("resnet50_v100_workers0", 6, 155_000),
        ("resnet50_v100_workers4", 6, 174_000),
        ("torchrec_a100_rank3of8", 6, 77_000),
    ],
)
def test_real_profiles_have_their_steps(name, steps, iteration_us):
    trace = shared_trace(f"kineto_single/{name}.json.gz")
    check_trace(trace)
    assert len(trace.steps) == steps
    assert np.median(np.diff(trace.steps.end_us)) == pytest.approx(iteration_us, rel=0.02)


def test_a_profile_without_a_device_has_the_steps_that_the_script_marked(tmp_path):
    profile = Profile()
    for number in range(3):
        profile.step(number, START + 1000 * number, 990)
        profile.op("aten::mm", START + 1000 * number + 10, 400)
        profile.op("aten::addmm", START + 1000 * number + 20, 300)
    trace = read([profile.write(tmp_path / "trace.json")])
    check_trace(trace)
    np.testing.assert_allclose(np.diff(trace.steps.end_us), 1000)


@pytest.mark.parametrize("one_id", [False, True], ids=["an id for each call", "one id for all calls, a step for each"])
def test_forty_thousand_calls_are_launches_of_their_kernels(tmp_path, one_id):
    """A round over all ops for each call of an id, or one over all events for each step, would take minutes here."""
    calls = 40_000
    profile = Profile()
    for number in range(calls):
        ids = {"correlation": 1 if one_id else number + 1}
        profile.add("cuda_runtime", "cudaLaunchKernel", START + 10 * number, 5, MAIN, ids)
        profile.add("kernel", "k", START + 10 * number - 2, 1, STREAM, {**ids, "stream": 7}, profile.device)
        if one_id or number == 0:
            profile.step(number, START + 10 * number, 10 if one_id else 10 * calls)
    trace = read([profile.write(tmp_path / "trace.json")])
    launched = trace.dependencies.kind == DependencyKind.LAUNCH
    late_us = trace.events.start_us[trace.dependencies.target] - trace.events.start_us[trace.dependencies.source]
    assert np.count_nonzero(launched) == calls
    assert set(late_us[launched]) == {-2.0}
    assert len(trace.steps) == (calls if one_id else 1)
