"""A TensorFlow 1 graph under an exported plan: its clusters are compiled, and it trains as it did."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dpro_search.deploy.export import export_plan
from dpro_search.deploy.targets import targets_for
from dpro_search.kinds.horovod import HorovodKind
from dpro_search.space.plan import Plan

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

JOB = Path(__file__).with_name("graph_mode_job.py")


def ran(python, out, *folders, **env):
    command = [python, str(JOB), str(out), *map(str, folders)]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_the_plans_clusters_are_compiled_and_the_losses_are_the_same(tensorflow_python, tmp_path):
    nodes = ran(tensorflow_python, tmp_path / "names.json")["nodes"]
    of_block = [name for name, op in nodes if "block/" in name and op not in ("Const", "ReadVariableOp")]
    forward = tuple(name for name in of_block if not name.startswith("gradients"))
    recomputed = tuple(name for name in forward if name.endswith("Tanh"))
    for name, plan in {
        "fused": Plan(op_clusters=(forward,)),
        "recomputed": Plan(recomputed_ops=recomputed),
    }.items():
        export_plan(plan, tmp_path / name, targets_for(plan, HorovodKind.targets))
        env = {"TF_XLA_FLAGS": "--tf_xla_enable_lazy_compilation=false", "XLA_FLAGS": f"--xla_dump_to={tmp_path / name / 'dump'}"}
        run = ran(tensorflow_python, tmp_path / f"{name}.json", tmp_path / name, **env)
        np.testing.assert_allclose(run["planned"], run["plain"], rtol=1e-5)
    assert any("dpro_cluster_0" in path.name for path in (tmp_path / "fused" / "dump").iterdir())
