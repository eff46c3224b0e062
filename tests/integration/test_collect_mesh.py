"""Recorded jobs on the ranks of a mesh: who talks to whom along which axis, and steps that are replayed as they were."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpro_search.collect.trace import CollectiveKind, EventKind, Trace
from dpro_search.kinds import job_of, load_source

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("mesh_job.py")
LAYERS, MICRO_BATCHES, TRACED = 4, 4, 5
MESSAGE_BYTES = 64 // MICRO_BATCHES * 256 * 4


def collected(python, kind, folder, ranks=2):
    out = folder / kind
    command = [sys.executable, "-m", "dpro_search.cli", "collect", "--framework", "pytorch", "--comm", "mesh", "--out", str(out)]
    steps = ["--hosts", str(ranks), "--warmup", "2", "--untraced", "4", "--traced", str(TRACED)]
    job = ["--", python, str(JOB), kind, str(TRACED + 10)]
    done = subprocess.run([*command, *steps, *job], capture_output=True, text=True, check=False, timeout=500, env=os.environ)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def pipeline(torch_python, tmp_path_factory):
    return collected(torch_python, "pipeline", tmp_path_factory.mktemp("recorded"))


def test_messages_between_stages_have_both_ends_and_their_axis(pipeline):
    trace = Trace.load(pipeline)
    events = trace.events
    whole = events.kind == EventKind.COLLECTIVE
    sends = whole & (events.collective_kind == CollectiveKind.SEND)
    receives = whole & (events.collective_kind == CollectiveKind.RECV)
    step = int(np.median(trace.steps.index))
    for rank in (0, 1):
        chosen_events = (events.rank == rank) & (events.step == step)
        assert (chosen_events & sends).sum() == (chosen_events & receives).sum() == MICRO_BATCHES
        other = events.collective[(events.rank == 1 - rank) & receives]
        assert set(events.collective[chosen_events & sends]) <= set(other)
    assert set(events.size_bytes[sends | receives]) == {MESSAGE_BYTES}
    (group,) = trace.groups
    assert (group.description, group.ranks) == ("mesh_pp", (0, 1))
    assert {trace.names[name] for name in events.name[sends]} == {"gloo:send to rank 1", "gloo:send to rank 0"}


def test_recorded_steps_of_a_pipeline_are_replayed_as_they_were(pipeline):
    """With the durations that each step had: what a message waits for is known."""
    job = job_of(load_source(pipeline))
    steps = job.job.compared(None).steps
    assert len(steps) >= TRACED - 2
    assert float(np.median([abs(step.error_pct) for step in steps])) < 5


def test_diagnosis_names_the_rank_that_a_stage_waits_for(pipeline):
    command = [sys.executable, "-m", "dpro_search.cli", "diagnose", str(pipeline), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    assert "to rank" in done.stdout or "from rank" in done.stdout


@pytest.mark.parametrize(("kind", "axis", "counts"), [("tensor", "tp", {CollectiveKind.ALL_REDUCE: 2 * LAYERS})])
def test_collectives_are_those_of_their_axis(torch_python, tmp_path, kind, axis, counts):
    trace = Trace.load(collected(torch_python, kind, tmp_path))
    events = trace.events
    assert [(group.description, group.ranks) for group in trace.groups] == [(f"mesh_{axis}", (0, 1))]
    step = int(np.median(trace.steps.index))
    chosen_events = (events.kind == EventKind.COLLECTIVE) & (events.rank == 0) & (events.step == step)
    for collective, count in counts.items():
        assert (chosen_events & (events.collective_kind == collective)).sum() == count
    assert (events.group[chosen_events] == 0).all()
