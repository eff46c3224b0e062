"""The predicted peak memory of a real step, beside what the framework's allocator counted."""

from pathlib import Path

import pytest

from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.launch.step_times import StepSchedule
from dpro_search.collect.launchers import TENSORFLOW_HOROVOD
from dpro_search.costmodel.memory import peak_bytes
from dpro_search.graph.build import build_graph
from experiments.costmodel.best_fit import allocator_peak_bytes

pytestmark = pytest.mark.integration

TRAIN = Path(__file__).parents[2] / "experiments" / "workloads" / "train.py"


def test_the_predicted_peak_is_what_the_allocator_counted(tensorflow_python, tmp_path):
    command = (tensorflow_python, str(TRAIN), "--model", "vgg16", "--batch", "8", "--steps", "13")
    # oneDNN brings the allocator that notes its pieces. TensorFlow uses it by default only on processors with AVX-512 VNNI.
    spec = JobSpec(command=command, ranks=2, env={"OMP_NUM_THREADS": "1", "TF_ENABLE_ONEDNN_OPTS": "1"})
    trace = TENSORFLOW_HOROVOD.record(spec, tmp_path / "trace", schedule=StepSchedule(warmup=3, untraced=3, traced=5))
    step, counted = build_graph(trace).memory, trace.meta.allocator
    assert counted.name == "mklcpu"
    assert step.batch == 8
    buffer = trace.horovod_settings.fusion_threshold_bytes
    predicted = peak_bytes(step, fusion_buffer_bytes=buffer, smallest_bytes=2**18)
    assert predicted.bytes == pytest.approx(counted.requested_peak_bytes, rel=0.1)
    pieces = allocator_peak_bytes(step, counted=counted, smallest_bytes=2**18)
    assert pieces == pytest.approx(counted.peak_bytes, rel=0.1)
