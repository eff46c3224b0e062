"""Clusters of a small network, drawn, compiled by XLA and timed in a real TensorFlow."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dpro_search.collect.tables.clusters import read_table
from dpro_search.errors import InputError, JobError
from dpro_search.measure.clusters import CollectRequest, collect_clusters

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

WORKLOADS = """
    import os

    import tensorflow as tf


    def mlp(batch=16):
        layers = tf.keras.layers
        stack = [layers.Input((32,)), layers.Dense(64, activation="gelu"), layers.LayerNormalization()]
        model = tf.keras.Sequential([*stack, layers.Dense(10, activation="softmax")])
        return model, (tf.random.normal((batch, 32)), tf.zeros((batch,), tf.int32))


    def crashing(batch=16):
        os.abort()


    BUILDERS = {"mlp": mlp, "crashing": crashing}
"""


@pytest.fixture
def workloads(tmp_path):
    path = tmp_path / "workloads.py"
    path.write_text(textwrap.dedent(WORKLOADS))
    return path


def test_clusters_are_measured_and_a_second_call_goes_on(tensorflow_python, workloads, tmp_path):
    table = tmp_path / "clusters.jsonl"
    command = [sys.executable, "-m", "dpro_search.cli", "fit", "--collect", "xla", "--out", str(table), "--json"]
    command += ["--python", tensorflow_python, "--workloads", str(workloads), "--models", "mlp"]
    for limit, new in ((3, 3), (5, 2)):
        done = subprocess.run([*command, "--limit", str(limit)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        facts = json.loads(done.stdout)
        assert (facts["rows"], facts["new"]) == (limit, new)
        assert set(facts["spent_s"]) == {"start", "build", "compile", "calls", "profile", "read"}
    rows = read_table(table).measured
    assert len({row.cluster.fingerprint for row in rows}) == 5
    for row in rows:
        assert row.fused_us > 0
        assert row.unfused_us > 0
        assert row.xla_run_us > 0
        assert sum(row.cluster.op_us) > 0
        assert row.model == "mlp"
        assert len(row.cluster.step_op_us) == len(row.cluster.ops)
        assert not any(row.cluster.left_out)
    measured_clusters = [row.cluster for row in rows]
    assert sum(sum(cluster.step_op_us) for cluster in measured_clusters) > 0
    assert {op.ran_as for cluster in measured_clusters for op in cluster.ops} - {""}
    assert any(tensor.value for cluster in measured_clusters for tensor in cluster.tensors if tensor.role == "const")


def test_a_model_that_ends_its_process_costs_only_itself(tensorflow_python, workloads, tmp_path):
    request = CollectRequest(
        python=tensorflow_python, workloads=workloads, models=("crashing", "mlp"), limit=2, batch_scales=(1.0,)
    )
    progress = collect_clusters(request, tmp_path / "clusters.jsonl")
    assert progress.rows == 2


def test_a_model_that_cannot_be_built_is_told(tensorflow_python, workloads, tmp_path):
    request = CollectRequest(python=tensorflow_python, workloads=workloads, models=("nothing",), limit=2, batch_scales=(1.0,))
    with pytest.raises(JobError, match="nothing"):
        collect_clusters(request, tmp_path / "clusters.jsonl")


def test_a_missing_workloads_file_is_told(tensorflow_python, tmp_path):
    request = CollectRequest(python=tensorflow_python, workloads=Path("missing.py"), models=("mlp",), limit=2)
    with pytest.raises(InputError, match=r"missing\.py"):
        collect_clusters(request, tmp_path / "clusters.jsonl")
