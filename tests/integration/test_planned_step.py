"""A TensorFlow step under an exported plan: its ops are compiled in the plan's clusters, and it trains as it did."""

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

JOB = Path(__file__).with_name("planned_step_job.py")


def ran(python, out, *folders, **env):
    done = subprocess.run(
        [python, str(JOB), str(out), *map(str, folders)], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def nodes(tensorflow_python, tmp_path_factory):
    """Type of each op of the step, by name."""
    return dict(ran(tensorflow_python, tmp_path_factory.mktemp("names") / "found.json")["nodes"])


@pytest.fixture(scope="module")
def plans(nodes):
    forward = tuple(name for name, op in nodes.items() if name.startswith("block/") and op != "Const")
    backward = tuple(name for name, op in nodes.items() if name.startswith("gradient_tape/block/") and op != "Const")
    products = tuple(name for name, op in nodes.items() if op == "MatMul")
    tanh = next(name for name in forward if nodes[name] == "Tanh")
    used_at_once = next(name for name, op in nodes.items() if op == "Rsqrt")  # by the backward pass, which also needs it later
    total = next(name for name in forward if nodes[name] == "AddV2")
    return {
        "fused": Plan(op_clusters=(forward, backward)),
        "hole": Plan(op_clusters=((tanh, total),)),
        "missing": Plan(op_clusters=((tanh, "nobody"),)),
        "bfloat16": Plan(bfloat16_ops=products),
        "recomputed": Plan(recomputed_ops=(*(name for name in forward if nodes[name] in ("Tanh", "Mul")), used_at_once)),
        "all": Plan(op_clusters=(forward, backward), bfloat16_ops=(*products, tanh)),
    }


@pytest.fixture(scope="module")
def found(tensorflow_python, plans, tmp_path_factory):
    folder = tmp_path_factory.mktemp("planned")
    for name, plan in plans.items():
        export_plan(plan, folder / name, targets_for(plan, HorovodKind.targets))
    env = {"TF_XLA_FLAGS": "--tf_xla_enable_lazy_compilation=false", "XLA_FLAGS": f"--xla_dump_to={folder / 'dump'}"}
    result = ran(tensorflow_python, folder / "found.json", *(folder / name for name in plans), **env)
    return {**result, "dump": sorted(path.name for path in (folder / "dump").iterdir())}


@pytest.mark.parametrize("name", ["fused", "recomputed"])
def test_the_losses_and_gradients_are_those_of_the_step_as_written(found, name):
    np.testing.assert_allclose(found[name]["losses"], found["plain"]["losses"], rtol=1e-5)
    np.testing.assert_allclose(found[name]["norms"], found["plain"]["norms"], rtol=1e-4)


@pytest.mark.parametrize("name", ["bfloat16", "all"])
def test_in_half_precision_they_are_near_and_not_equal(found, name):
    np.testing.assert_allclose(found[name]["losses"], found["plain"]["losses"], rtol=0.05)
    assert found[name]["losses"] != found["plain"]["losses"]


def test_the_plans_clusters_were_compiled(found):
    for number in (0, 1):
        assert any(f"dpro_cluster_{number}" in name for name in found["dump"]), found["dump"][:5]


def test_a_cluster_with_a_hole_is_refused_before_anything_is_compiled(found):
    assert "is not convex" in found["hole"]["refused"]


def test_an_op_that_the_step_does_not_have_is_named(found):
    assert "no op is named 'nobody' (1 of the plan's ops are missing)" in found["missing"]["refused"]
