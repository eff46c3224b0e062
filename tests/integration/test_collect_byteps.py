"""Recording a real job of MXNet with BytePS, without a line added to its script."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpro_search.collect.launch.parameter_servers import byteps_servers, run_with_servers
from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.launch.step_times import StepSchedule
from dpro_search.collect.launchers import MXNET_BYTEPS
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.errors import JobError
from dpro_search.replay import replay
from dpro_search.space.servers.byteps_job import byteps_graph
from dpro_search.space.servers.byteps_recorded import recorded_byteps_job

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("byteps_job.py")
TENSORS = 6


def spec(python: str, steps: int = 14, **env: str) -> JobSpec:
    return JobSpec(command=(python, str(JOB), str(steps)), ranks=2, cores=default_cores(2), env=env, timeout_s=120)


def test_a_recorded_job_can_be_replayed(byteps_python, tmp_path):
    schedule = StepSchedule(warmup=3, untraced=4, traced=3)
    partitions = {"BYTEPS_PARTITION_BYTES": "8192", "DMLC_NUM_SERVER": "1"}
    trace = MXNET_BYTEPS.record(spec(byteps_python, **partitions), tmp_path / "trace", schedule=schedule)
    assert (trace.meta.format, trace.meta.ranks, len(trace.tensors)) == ("mxnet-byteps", 3, TENSORS)
    comm = trace.events.select(trace.events.kind == EventKind.COMM)
    assert len(comm) == 2 * TENSORS * 3
    assert Trace.load(tmp_path / "trace").meta == trace.meta
    assert replay(byteps_graph(recorded_byteps_job(trace))).iteration_us > 0


def test_halves_are_seen_and_cut_by_their_own_length(byteps_python, tmp_path):
    schedule = StepSchedule(warmup=3, untraced=4, traced=3)
    plain = spec(byteps_python, BYTEPS_PARTITION_BYTES="8192", DMLC_NUM_SERVER="1")
    trace = MXNET_BYTEPS.record(replace(plain, command=(*plain.command, "fp16")), tmp_path / "trace", schedule=schedule)
    assert trace.meta.knobs["compression"] == "fp16"
    job = recorded_byteps_job(trace)
    pushes = {trace.names[name] for name in trace.events.name if trace.names[name].endswith(" PUSH")}
    parts = {tensor.name: sum(name.startswith(f"{tensor.name}[") for name in pushes) for tensor in trace.tensors}
    assert list(parts.values()) == [len(job.parts(tensor)) for tensor in range(TENSORS)]
    assert max(parts.values()) > 1


def test_sums_of_halves_are_right_to_the_last_bit(byteps_python, tmp_path):
    script = str(JOB.with_name("byteps_sums_job.py"))
    run_with_servers(replace(spec(byteps_python), command=(byteps_python, script)), tmp_path, byteps_servers(2))
    for rank in range(2):
        assert "wrong: 0" in (tmp_path / f"rank{rank}" / "log").read_text().splitlines()


def test_a_job_can_be_timed(byteps_python):
    times = MXNET_BYTEPS.time(spec(byteps_python, steps=10), warmup=3)
    assert len(times.iteration_us) == 6
    assert (times.iteration_us > 0).all()
    assert np.isfinite(times.median_us)


def test_a_job_that_fails_is_reported(byteps_python, tmp_path):
    broken = JobSpec(command=(byteps_python, "-c", "raise SystemExit('on its own')"), ranks=2, cores=default_cores(2))
    with pytest.raises(JobError, match="on its own"):
        MXNET_BYTEPS.record(broken, tmp_path / "trace")
    assert not (tmp_path / "trace").exists()
