"""An exported plan makes a real two-rank job communicate in exactly its groups, and train as it did before."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpro_search.collect.launch.horovod_gloo import run_horovod_gloo
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.readers.horovod.timeline import TimelinePhase, read_horovod_timeline
from dpro_search.deploy.export import export_plan
from dpro_search.deploy.parts.horovod import HOROVOD
from dpro_search.errors import JobError
from dpro_search.runtime import HOOKS
from dpro_search.space.plan import Plan

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

JOB = Path(__file__).with_name("grouped_job.py")
STEPS = 5
# Two variables are named "twin"; "unused" gets no gradient; the embedding's gradient is sparse.
GRADIENTS = {"embedding#0", "twin#1", "twin#2", "layer2#3", "layer3#4", "layer4#5", "layer5#6"}
GROUPS = (("embedding#0", "layer5#6"), ("twin#1", "layer3#4"), ("twin#2", "layer2#3"))
ALONE = "layer4#5"


@dataclass
class Finished:
    """What a job left behind."""

    ranks: list[dict[str, Any]]
    timeline: Path

    @property
    def names(self) -> dict[str, str]:
        """Lasting name of a gradient, by the name of its tensor in Horovod's timeline."""
        names = {}
        for tensor in read_horovod_timeline(self.timeline).tensors:
            for record in self.ranks[0]["gradients"]:
                if f"/{tensor.name}".endswith(f"/{record['horovod']}"):
                    names[tensor.name] = record["name"]
        return names


def run(python: str, how: str, out: Path, plan: Path | None = None) -> Finished:
    out.mkdir()
    timeline = out / "timeline.json"
    env = {"HOROVOD_TIMELINE": str(timeline), "PYTHONPATH": f"{HOOKS}:{plan}" if plan else str(HOOKS)}
    if plan:
        env |= dict(line.split("=", 1) for line in (plan / "horovod.env").read_text().splitlines())
    run_horovod_gloo(JobSpec(command=(python, str(JOB), how, str(out)), ranks=2, env=env, timeout_s=300), out)
    return Finished([json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)], timeline)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def plain(tensorflow_python: str, folder: Path) -> Finished:
    """The job under Horovod's own tape."""
    return run(tensorflow_python, "plain", folder / "plain")


@pytest.fixture(scope="module")
def planned(tensorflow_python: str, folder: Path) -> Finished:
    """The job under an exported plan of three groups."""
    plan = folder / "plan"
    export_plan(Plan(tensor_groups=GROUPS), plan, (HOROVOD,))
    return run(tensorflow_python, "planned", folder / "planned", plan)


def test_each_gradient_is_recorded_once_under_its_variable(plain: Finished) -> None:
    assert sorted(record["name"] for record in plain.ranks[0]["gradients"]) == sorted(GRADIENTS)


def test_names_do_not_depend_on_the_rank(plain: Finished) -> None:
    assert plain.ranks[0]["gradients"] == plain.ranks[1]["gradients"]


def test_a_keras_optimizer_gives_the_same_names(tensorflow_python: str, folder: Path) -> None:
    job = run(tensorflow_python, "optimizer", folder / "optimizer")
    assert {record["name"] for record in job.ranks[0]["gradients"]} == GRADIENTS


@pytest.mark.parametrize("how", ["plain", "planned"])
def test_each_recorded_gradient_is_found_in_the_timeline(how: str, request: pytest.FixtureRequest) -> None:
    assert sorted(request.getfixturevalue(how).names.values()) == sorted(GRADIENTS)


def test_exactly_the_groups_of_the_plan_travelled_in_every_step(planned: Finished) -> None:
    timeline = read_horovod_timeline(planned.timeline)
    names = planned.names
    collectives = defaultdict(set)
    for i in np.flatnonzero(timeline.phase == TimelinePhase.TRANSFER):
        name = names.get(timeline.tensors[timeline.tensor[i]].name)
        if name is not None:
            collectives[timeline.collective[i]].add(name)
    travelled = sorted(sorted(group) for group in collectives.values())
    assert travelled == sorted(sorted(group) for group in [*GROUPS, (ALONE,)] for _ in range(STEPS))


def test_the_weights_are_those_of_horovods_own_tape(plain: Finished, planned: Finished) -> None:
    for before, after in zip(plain.ranks, planned.ranks, strict=True):
        for old, new in zip(before["weights"], after["weights"], strict=True):
            np.testing.assert_allclose(old, new, rtol=1e-5, atol=1e-7)


def test_all_ranks_end_with_the_same_weights(planned: Finished) -> None:
    assert planned.ranks[0]["weights"] == planned.ranks[1]["weights"]


def test_a_plan_for_another_model_ends_the_job_and_names_the_variable(tensorflow_python: str, folder: Path) -> None:
    plan = folder / "other"
    export_plan(Plan(tensor_groups=(("dense/kernel#0", "twin#1"),)), plan, (HOROVOD,))
    with pytest.raises(JobError, match="made for another model: no variable is 'dense/kernel#0'"):
        run(tensorflow_python, "planned", folder / "refused", plan)


def test_a_job_without_the_exported_environment_is_refused(tensorflow_python: str, folder: Path) -> None:
    plan = folder / "no_environment"
    export_plan(Plan(tensor_groups=GROUPS), plan, (HOROVOD,))
    (plan / "horovod.env").write_text("")
    with pytest.raises(JobError, match=r"set the variables of horovod\.env"):
        run(tensorflow_python, "planned", folder / "merged", plan)
