"""A replayed iteration op by op, and its critical path, on programs whose times can be worked out by hand."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
from ddp_jobs import NONE, POST, WAIT, job, programs
from hypothesis import assume, given, settings

from dpro_search.kinds import PlanOptions
from dpro_search.kinds.ddp.job import Ddp
from dpro_search.replay import replay
from dpro_search.replay.ddp.program_replay import iteration_ops
from dpro_search.replay.ddp.timeline import replay_ddp
from dpro_search.replay.outputs import perfetto_json, write_csv
from dpro_search.replay.path.segments import path_segments
from tests.recordings import trace_of

# Buffers are synchronised, then two buckets are filled; the second is exposed.
PROGRAM = [(10, POST, 0), (0, WAIT, 0), (100, POST, 1), (60, POST, 2), (20, WAIT, 1), (5, WAIT, 2), (7, NONE, -1)]
SIZES = [4, 50, 200]


def ops_of(found):
    return iteration_ops(found, replay_ddp(found, iterations=8))


def path_of(found):
    return [(segment.kind, segment.rank, segment.name) for segment in path_segments(ops_of(found))]


def test_the_graph_of_an_iteration_can_be_replayed_and_has_the_times_of_the_machine():
    opened_job = job(PROGRAM, SIZES)
    ops = ops_of(opened_job)
    ops.graph.validate()
    assert replay(ops.graph).makespan_us == pytest.approx(ops.makespan_us)
    assert ops.iteration_us == pytest.approx(ops.makespan_us, rel=0.05)


def test_collectives_of_the_forward_pass_are_told_from_buckets():
    assert job(PROGRAM, SIZES).collective_names == ["buffers 0", "bucket 0", "bucket 1"]
    assert job([*PROGRAM[2:4], (0, WAIT, 1), (0, WAIT, 2)], SIZES).collective_names == ["bucket 0", "bucket 1", "bucket 2"]


def test_the_path_leads_through_what_was_exposed_and_not_through_what_was_hidden():
    segments = path_segments(ops_of(job(PROGRAM, SIZES, broadcast={0})))
    named = {segment.name for segment in segments if segment.kind == "communication"}
    assert "bucket 1" in named
    assert "bucket 0" not in named
    assert segments[-1].kind == "compute"
    ends = [segment.start_us + segment.duration_us for segment in segments]
    np.testing.assert_allclose([segment.start_us for segment in segments[1:]], ends[:-1])  # one after the other, without a gap


def test_a_late_rank_is_named_with_the_time_that_the_others_waited_for_it():
    opened_job = job([(100, POST, 0), (0, WAIT, 0)], [50], scale=(1, 1.5))
    segments = path_segments(ops_of(opened_job))
    assert path_of(opened_job) == [("compute", 1, ""), ("late_rank", 1, "bucket 0"), ("communication", -1, "bucket 0")]
    assert [segment.duration_us for segment in segments] == pytest.approx([100, 50, 51], abs=5)  # a latency of 1 us on average


def test_a_collective_that_waits_for_a_thread_follows_the_one_that_it_waited_for():
    opened_job = job([(100, POST, 0), (0, POST, 1), (0, WAIT, 0), (0, WAIT, 1), (5, NONE, -1)], [50, 50], threads=1)
    ops = ops_of(opened_job)
    second = [op for op in range(len(ops.graph)) if ops.graph.name(op).startswith("bucket 1@")]
    assert (ops.times.start_us - ops.times.ready_us)[second] == pytest.approx([51, 51], abs=5)
    assert path_of(opened_job) == [
        ("compute", 0, ""),
        ("communication", -1, "bucket 0"),
        ("communication", -1, "bucket 1"),
        ("compute", 0, ""),
    ]


@settings(max_examples=100)
@given(programs())
def test_the_path_of_any_program_ends_with_its_iteration(found):
    ops = ops_of(found)
    segments = path_segments(ops)
    assert bool(segments) == (ops.makespan_us > 0)
    assume(segments)
    assert sum(segment.duration_us for segment in segments) == pytest.approx(ops.makespan_us - segments[0].start_us)
    assert segments[0].start_us >= 0


def test_findings_name_the_rank_and_the_bucket_and_the_knob():
    opened_job = job([(100, POST, 0), (0, WAIT, 0)], [50], scale=(1, 1.5))
    gains = [
        SimpleNamespace(what_if="bucket_cap_bytes=1MiB", gain_us=20.0),
        SimpleNamespace(what_if="bandwidth=2", gain_us=25.0),
        SimpleNamespace(what_if="compute=0.9", gain_us=1.0),
    ]
    ddp = Ddp.of(trace_of("ddp_mlp"), PlanOptions())
    exposed, late, link = ddp.findings(path_segments(ops_of(opened_job)), gains, 201.0)
    assert "bucket 0 most" in exposed
    assert "'bucket_cap_bytes=1MiB' would gain" in exposed
    assert "for rank 1" in late
    assert link.startswith("A link twice as fast")


def test_a_rank_without_peers_is_late_for_nobody():
    assert {kind for kind, *_ in path_of(job(PROGRAM, SIZES, ranks=1))} == {"compute", "communication"}


def test_an_iteration_is_written_for_other_programs(tmp_path):
    ops = ops_of(job(PROGRAM, SIZES))
    events = json.loads(perfetto_json(ops))["traceEvents"]
    assert {"bucket 1@0", "bucket 1@1"} <= {event["name"] for event in events if event["ph"] == "X"}
    write_csv(ops, tmp_path / "ops.csv")
    with (tmp_path / "ops.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (len(PROGRAM) + len(SIZES))
    assert all(float(row["end_us"]) >= float(row["start_us"]) for row in rows)
