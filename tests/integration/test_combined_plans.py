"""Plans of several fields at once, exported into one folder: a real two-rank job follows all of them, and trains as it did."""

import functools
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dpro_search.collect.launch.horovod_gloo import run_horovod_gloo
from dpro_search.collect.launch.ranks import JobSpec, default_cores
from dpro_search.collect.readers.horovod.timeline import TimelinePhase, read_horovod_timeline
from dpro_search.deploy.losses import Losses, compare, read_losses, tolerance_of
from dpro_search.runtime import TIMED
from dpro_search.space.plan import Plan

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

JOB = Path(__file__).with_name("planned_horovod_job.py")
AGAIN = tuple(f"block_{i}/{name}" for i in (0, 1) for name in ("Tanh", "Sigmoid"))
HALF = ("block_2/left_2/MatMul", "gradient_tape/block_2/left_2/MatMul/MatMul")
FUSED = (("block_4/Tanh", "block_4/Sigmoid", "block_4/add"), ("block_5/Tanh", "block_5/Sigmoid", "block_5/add"))
GROUPS = (("last/bias#25", "last/kernel#24", "block_5/right_5/bias#23"), ("block_0/left_0/kernel#0", "block_0/left_0/bias#1"))
GRADIENTS = 26
PLANS = {
    "groups": Plan(recomputed_ops=AGAIN, bfloat16_ops=HALF, tensor_groups=GROUPS),
    "parts": Plan.of(op_clusters=FUSED, fusion_threshold_bytes=0, micro_batches=2),
    "all": Plan(op_clusters=FUSED, recomputed_ops=AGAIN, bfloat16_ops=HALF, tensor_groups=GROUPS, micro_batches=2),
}


@dataclass
class Finished:
    """What a job left behind: losses, ops of its step, names of what XLA compiled, tensors of each collective, helpers it used."""

    losses: Losses
    graph: set[str]
    compiled: set[str]
    collectives: list[set[str]]
    used: set[str]


def run(python: str, out: Path, plan: Path | None = None) -> Finished:
    for name in ("report", "graph"):
        (out / name).mkdir(parents=True)
    env = {"OMP_NUM_THREADS": "1", "GRAPH_TO": str(out / "graph"), "DPRO_SEARCH_REPORT": str(out / "report")}
    env["XLA_FLAGS"] = f"--xla_dump_to={out / 'dump'}"
    env |= {"HOROVOD_TIMELINE": str(out / "timeline.json"), "PYTHONPATH": str(TIMED)}
    if plan is not None:
        env["DPRO_SEARCH_PLAN"] = str(plan)
        env |= dict(line.split("=", 1) for file in plan.glob("*.env") for line in file.read_text().splitlines())
    run_horovod_gloo(JobSpec(command=(python, str(JOB)), ranks=2, cores=default_cores(2), env=env, timeout_s=300), out)
    timeline = read_horovod_timeline(out / "timeline.json")
    collectives = defaultdict(set)
    for i in np.flatnonzero(timeline.phase == TimelinePhase.TRANSFER):
        collectives[timeline.collective[i]].add(timeline.tensors[timeline.tensor[i]].name)
    return Finished(
        losses=read_losses(out / "report"),
        graph=set((out / "graph" / "rank0").read_text().splitlines()),
        compiled={name for path in (out / "dump").glob("*") for name in re.findall(r"dpro_cluster_\d+", path.name)},
        collectives=list(collectives.values()),
        used={path.name.removeprefix("used-") for path in (out / "report").glob("used-*")},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("combined")


@pytest.fixture(scope="module")
def plain(tensorflow_python, folder):
    return run(tensorflow_python, folder / "plain")


@pytest.fixture(scope="module")
def followed(tensorflow_python, folder):
    """The job under a plan that the command exported, by the plan's name; it runs once."""

    @functools.cache
    def under(name):
        (folder / f"{name}.json").write_bytes(PLANS[name].to_json())
        command = [sys.executable, "-c", "from dpro_search.cli import main; main()", "export"]
        subprocess.run([*command, str(folder / f"{name}.json"), "--out", str(folder / name)], check=True)
        return run(tensorflow_python, folder / f"{name}-run", folder / name)

    return under


@pytest.mark.parametrize("name", PLANS)
def test_the_losses_are_within_what_the_plan_promises(plain, followed, name):
    comparison = compare([plain.losses], [followed(name).losses], tolerance_of(PLANS[name]))
    assert comparison.compared == 20
    assert comparison.verdict == "same", comparison.reason


@pytest.mark.parametrize(
    ("name", "helpers"),
    [("groups", "tape.py xla.py"), ("parts", "micro_batches.py xla.py"), ("all", "micro_batches.py tape.py xla.py")],
)
def test_the_job_used_every_helper_of_its_plan(followed, name, helpers):
    assert followed(name).used == set(helpers.split())


@pytest.mark.parametrize(("name", "parts"), [("groups", ("",)), ("all", ("", "micro_batch_1/"))])
def test_ops_ran_again_in_every_part(plain, followed, name, parts):
    assert {op for op in followed(name).graph if op.endswith("/recomputed")} == {
        f"{part}{op}/recomputed" for part in parts for op in AGAIN
    }
    assert not any(op.endswith("/recomputed") for op in plain.graph)


@pytest.mark.parametrize("name", ["groups", "all"])
def test_ops_computed_in_bfloat16(plain, followed, name):
    assert {f"{op}/bfloat16_0" for op in HALF} <= followed(name).graph
    assert not any("bfloat16" in op for op in plain.graph)


@pytest.mark.parametrize("name", ["parts", "all"])
def test_each_parts_clusters_were_compiled(followed, name):
    assert {f"dpro_cluster_{number}" for number in range(4)} <= followed(name).compiled


def test_a_threshold_of_none_sends_each_gradient_alone(plain, followed):
    assert max(map(len, plain.collectives)) > 1
    assert {len(sent) for sent in followed("parts").collectives} == {1}


@pytest.mark.parametrize("name", ["groups", "all"])
def test_exactly_the_groups_travelled(followed, name):
    """Horovod calls a tensor of a group `planned_group_<group>_<tensor>of<tensors>`; the other gradients are groups of one."""
    groups = [frozenset(f"planned_group_{g}_{i + 1}of{len(group)}" for i in range(len(group))) for g, group in enumerate(GROUPS)]
    alone = [frozenset((f"planned_group_{g}_1of1",)) for g in range(len(groups), GRADIENTS - sum(map(len, GROUPS)) + len(groups))]
    assert {frozenset(sent) for sent in followed(name).collectives} == {*groups, *alone}
