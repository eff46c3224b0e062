"""A job that changes how it communicates every few steps (`experiments.search.switching`) runs all settings and trains the same."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.readers.horovod.timeline import TimelinePhase, read_horovod_timeline
from dpro_search.deploy.jobs import RecordedJob
from dpro_search.deploy.losses import compare, tolerance_of
from dpro_search.deploy.parts.part import JobFacts
from dpro_search.kinds import launchers
from dpro_search.space.plan import Plan
from experiments.search.testbed_jobs import SCHEMES, SWITCHING

pytestmark = pytest.mark.integration

DDP_JOB = Path(__file__).with_name("planned_ddp_job.py")


def ran(kind, command, **env):
    spec = JobSpec(command=tuple(map(str, command)), ranks=2, cores=default_cores(2), env={"OMP_NUM_THREADS": "1", **env})
    launcher = next(each for each in launchers() if each.format == kind)
    job = RecordedJob(launcher=launcher, targets=(), spec=spec, facts=JobFacts(), rate_bps=None, shaped=False)
    return job.run(Plan(), warmup=2)


def settings_file(folder, steps, settings):
    path = folder / "settings"
    path.write_text(json.dumps({"steps": steps, "settings": settings}))
    return path


def most_fused(path):
    """Tensors of the largest collective, step by step: a tensor's n-th transfer is in step n."""
    timeline = read_horovod_timeline(path)
    transfers = np.flatnonzero(timeline.phase == TimelinePhase.TRANSFER)
    tensors_of = Counter(timeline.collective[transfers].tolist())
    step_of, largest = Counter(), Counter()
    for row in transfers:
        step = step_of[timeline.tensor[row]]
        step_of[timeline.tensor[row]] += 1
        largest[step] = max(largest[step], tensors_of[timeline.collective[row]])
    return [largest[step] for step in sorted(largest)]


def test_ddp_has_the_buckets_of_the_last_setting(torch_python, tmp_path):
    buckets = tmp_path / "buckets"
    path = settings_file(tmp_path, 6, [{"bucket_cap_mb": 25}, {"bucket_cap_mb": 1e-6}])
    plain = ran("pytorch-ddp", (torch_python, DDP_JOB))
    switched = ran("pytorch-ddp", (torch_python, SWITCHING, path, DDP_JOB), BUCKETS_TO=str(buckets))
    assert len(buckets.read_text().split(",")) == 10  # a gradient in each
    assert len(switched.times.iteration_us) == len(plain.times.iteration_us)
    comparison = compare([plain.losses], [switched.losses], tolerance_of(Plan()))
    assert comparison.verdict == "same", comparison.reason


def test_horovod_fuses_up_to_the_threshold_of_the_setting(tensorflow_python, tmp_path):
    steps, timeline = 5, tmp_path / "timeline.json"
    settings = [{"threshold_bytes": size, "cycle_time_ms": 2.0} for size in (0, 2**26, 0)]
    path = settings_file(tmp_path, steps, settings)
    knobs = {"HOROVOD_FUSION_THRESHOLD": str(2**20), "HOROVOD_CYCLE_TIME": "5"}
    command = SCHEMES["tensorflow"].command(tensorflow_python, "many_small", 3 * steps + 3, switched=path)
    ran("tensorflow-horovod", command, HOROVOD_TIMELINE=str(timeline), **knobs)
    first, second, third = (most_fused(timeline)[1 + i * steps : 1 + (i + 1) * steps] for i in range(3))  # one step compiles
    assert set(first) == set(third) == {1}
    assert min(second) > 1
