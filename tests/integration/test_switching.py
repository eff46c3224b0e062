"""A job that changes how it communicates every few steps (`experiments.search.switching`) runs all settings and trains the same."""

import json
from pathlib import Path

import pytest

from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.deploy.jobs import KINDS, RecordedJob
from dpro_search.deploy.losses import compare, tolerance_of
from dpro_search.deploy.targets import JobFacts
from dpro_search.space.plan import Plan
from experiments.search.testbed_jobs import SWITCHING

pytestmark = pytest.mark.integration

DDP_JOB = Path(__file__).with_name("planned_ddp_job.py")


def ran(kind, command, **env):
    spec = JobSpec(command=tuple(map(str, command)), ranks=2, cores=default_cores(2), env={"OMP_NUM_THREADS": "1", **env})
    job = RecordedJob(kind=KINDS[kind], spec=spec, facts=JobFacts(), rate_bps=None, shaped=False)
    return job.run(Plan(), warmup=2)


def settings_file(folder, steps, settings):
    path = folder / "settings"
    path.write_text(json.dumps({"steps": steps, "settings": settings}))
    return path


def test_ddp_has_the_buckets_of_the_last_setting(torch_python, tmp_path):
    buckets = tmp_path / "buckets"
    path = settings_file(tmp_path, 6, [{"bucket_cap_mb": 25}, {"bucket_cap_mb": 1e-6}])
    plain = ran("pytorch-ddp", (torch_python, DDP_JOB))
    switched = ran("pytorch-ddp", (torch_python, SWITCHING, path, DDP_JOB), BUCKETS_TO=str(buckets))
    assert len(buckets.read_text().split(",")) == 10  # a gradient in each
    assert len(switched.times.iteration_us) == len(plain.times.iteration_us)
    found = compare([plain.losses], [switched.losses], tolerance_of(Plan()))
    assert found.verdict == "same", found.reason
