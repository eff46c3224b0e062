"""Replays of a real pipeline-parallel job: from each step's own durations, and from all other steps."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError
from dpro_search.kinds import JobInScenario
from dpro_search.kinds.imported.job import PipelineSteps
from dpro_search.kinds.recorded.steps import RecordedSteps
from dpro_search.replay import replay
from dpro_search.space.recorded.pipeline_parallel import pipeline_graph
from tests.profiles import profiled, replay_of

RECORDED = Path(__file__).resolve().parents[3] / "shared" / "traces" / "stragglers"
pytestmark = pytest.mark.skipif(not RECORDED.is_dir(), reason="real traces are not beside the repository (shared/traces)")


@functools.cache
def recorded() -> Trace:
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow (extra 'parquet')")
    from dpro_search.collect.readers.straggler_analysis import read

    return read([RECORDED / "trace-ST.parquet"])


def test_without_launch_delays_it_is_as_near_as_the_publishers_own_replay():
    result = json.loads((RECORDED / "result-ST.json").read_text())
    published = [1 - result["step_t_nodelay"][step] / us for step, us in result["step_t_base"].items()]
    measured = replay_of(profiled(recorded())).measured.iterations_us
    replayed_us = {step: replay(pipeline_graph(recorded(), [step], launch_delays=False)).iteration_us for step in measured}
    errors = np.array([abs(replayed_us[step] / us - 1) for step, us in measured.items()])
    assert errors.mean() <= np.mean(published)
    assert errors.max() <= np.max(published)


def test_the_steps_follow_the_format():
    assert type(profiled(recorded()).recorded_steps) is PipelineSteps
    other = replace(recorded(), meta=msgspec.structs.replace(recorded().meta, format="kineto"))
    assert type(profiled(other).recorded_steps) is RecordedSteps


def test_with_launch_delays_every_step_is_met():
    steps = profiled(recorded()).compared(None).steps
    assert len(steps) == 32
    assert max(abs(step.error_pct) for step in steps) < 0.1


def test_a_step_is_predicted_from_all_others():
    job = profiled(recorded())
    held = [job.compared(step) for step in list(replay_of(job).measured.iterations_us)[::4]]
    assert np.median([abs(step.error_pct) for step in held]) < 1.0
    with pytest.raises(InputError, match="--holdout-step 24: 32 steps were recorded, from 23 to 1048"):
        job.compared(24)


def test_what_if_compute_were_faster():
    job = profiled(recorded())
    base, faster = (replay_of(job, *speeds, steps=[23]).iterations() for speeds in ((), ("compute=0.5",)))  # one step is enough
    assert 0.4 * base.iteration_us < faster.iteration_us < base.iteration_us
    assert set(base.breakdown_us) == {"compute", "exposed_communication", "waiting_for_ranks", "unknown", "idle"}


def test_uneven_stages_are_what_a_diagnosis_finds_first():
    facts = msgspec.to_builtins(JobInScenario(profiled(recorded())).diagnose())
    assert facts["findings"][0].startswith("The stages of the pipeline are uneven: of an iteration, ranks 6, 7 compute for 1.4")
    even = next(row for row in facts["gains"] if row["what_if"] == "stages=even")
    assert 10 < even["gain_pct"] < 16
    assert not any("FSDP" in sentence for sentence in facts["findings"])
