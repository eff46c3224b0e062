"""Reports of imported GPU traces: how much work they take, and what they show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from importer_kit import shared_trace
from kineto_machine import Launch, Synchronize, run

from dpro_search.collect.readers.kineto.importer import read
from dpro_search.collect.trace import Trace
from dpro_search.kinds import job_of
from dpro_search.kinds.recorded import steps as recorded_steps
from dpro_search.kinds.recorded.replay import RecordedReplay
from dpro_search.report import render, units
from dpro_search.report.gathered import facts_of_source
from dpro_search.space.plan import Plan

STEPS = 20


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("imported")
    profile, _ = run([Launch("gemm", 10, 400), Launch("relu", 10, 100), Synchronize(50)], STEPS)
    read([profile.write(folder / "profile.json")]).save(folder / "T")
    return folder / "T"


def test_a_report_makes_ops_once_and_replays_each_step_once(trace, monkeypatch):
    calls = {"recorded_ops": 0, "unchanged": 0}
    ops_of, graph_of = recorded_steps.recorded_ops, RecordedReplay.graph

    def counted_ops(trace):
        calls["recorded_ops"] += 1
        return ops_of(trace)

    def counted_graph(self, step):
        calls["unchanged"] += not self.scales
        return graph_of(self, step)

    monkeypatch.setattr(recorded_steps, "recorded_ops", counted_ops)
    monkeypatch.setattr(RecordedReplay, "graph", counted_graph)
    facts = facts_of_source(trace)
    assert len(facts.held_out) == 6
    assert calls["recorded_ops"] == 1
    middle = 2 * (len(facts.held_out) + 4)  # one or two steps, of which each prediction has its breakdown and the timeline is
    assert calls["unchanged"] <= STEPS + middle


def test_a_long_report_says_what_it_does(trace):
    parts = []
    facts_of_source(trace, parts.append)
    assert parts[:4] == ["reading the trace", "replaying the recording", "making the timeline of a step", "asking what would gain"]
    assert len(parts) == 4 + 6
    assert all(part.startswith("predicting step ") for part in parts[4:])


def test_lanes_of_replay_and_recording_have_the_same_names(trace):
    lanes = facts_of_source(trace).timeline.lanes
    names = [{lane.name for lane in lanes if lane.measured is side} for side in (False, True)]
    assert names[0] - {"launches"} == names[1]
    assert any(name.startswith("host thread ") for name in names[1])


@pytest.mark.parametrize("name", ["kineto_dlrm_8ranks", "kineto_single/torchrec_a100_rank3of8.json.gz"])
def test_a_real_trace_is_shown_with_names_that_people_read(name, tmp_path):
    shared_trace(name).save(tmp_path / "T")
    facts = facts_of_source(tmp_path / "T")
    job = job_of(Trace.load(tmp_path / "T"))
    page = render(facts)
    visible = re.sub(r'data-tip="[^"]*"|<script.*?</script>|<details.*?</details>', "", page, flags=re.DOTALL)
    assert "at::native" not in visible
    assert "(anonymous namespace)" not in visible
    assert not re.search(r"[-\N{MINUS SIGN}]0\.0 ", visible)
    assert {lane.name for lane in facts.timeline.lanes if lane.measured and lane.name == "communication"} == set()
    # One number, one home: the page, `replay` and `diagnose`.
    assert facts.replay.iteration_us == facts.diagnosis.iteration_us == job.predict(Plan()).iteration_us
    assert facts.replay.breakdown_us == facts.diagnosis.breakdown_us == job.predict(Plan()).breakdown_us
    for row in facts.diagnosis.ranks:
        if row.exposed_communication_us:
            assert f"exposed communication: {units.duration(row.exposed_communication_us)}" in page
