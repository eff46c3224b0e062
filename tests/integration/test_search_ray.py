"""`--engine ray` on a real cluster of two nodes, one of which is lost in the middle."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bus_objective import BusObjective, tensors_of

from dpro_search.errors import InputError, MissingCapabilityError
from dpro_search.search import Trial, run_search
from dpro_search.search.evaluation import Evaluations, Losses
from dpro_search.search.ray_tasks import RayEvaluator
from dpro_search.space.plan import Plan, Prediction
from tests.faults.kills import whole_lines

pytest.importorskip("ray", reason="Ray is not installed: pip install 'dpro-search[ray]'")

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

ROOT = Path(__file__).parents[2]
OBJECTIVE = BusObjective(tensors_of([40_000] * 8))


class Refusing(BusObjective):
    def predict(self, plan: Plan) -> Prediction:
        if plan.get("cycle_time_us") == 777.0:
            raise InputError("plan: no such tensor")
        return super().predict(plan)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and a second node, of one processor each; their processes find the package and this test's helpers."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'search'}:{Path(__file__).parent}")
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        from ray.cluster_utils import Cluster

        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        try:
            environment.setenv("RAY_ADDRESS", nodes.address)
            nodes.add_node(num_cpus=1)
            nodes.wait_for_nodes()
            yield nodes
        finally:
            nodes.shutdown()


def test_what_goes_wrong_in_a_task_is_said_here(cluster: Any) -> None:
    with closing(RayEvaluator(Refusing(OBJECTIVE.tensors), 2, Losses())) as evaluator:
        evaluations = Evaluations(evaluator)
        evaluations.request(Plan.of(cycle_time_us=776.0))
        assert evaluations.wait(Plan.of(cycle_time_us=776.0)) == OBJECTIVE.predict(Plan.of(cycle_time_us=776.0))
        evaluations.request(Plan.of(cycle_time_us=777.0))
        with pytest.raises(InputError, match="plan: no such tensor"):
            evaluations.wait(Plan.of(cycle_time_us=777.0))


def test_tasks_find_what_processes_find_though_a_node_is_lost(cluster: Any, tmp_path: Path) -> None:
    def lose_a_node(trial: Trial) -> None:
        if trial.number == 20:
            cluster.remove_node(max(cluster.worker_nodes, key=id), allow_graceful=False)

    for engine in ("local", "ray"):
        run_search(
            OBJECTIVE,
            trials=80,
            sampler="critical-path",  # of others, workers on one machine have several
            seed=5,
            out=tmp_path / engine,
            trace_digest="bus",
            workers=2,
            engine=engine,
            on_trial=lose_a_node if engine == "ray" else None,
        )
    assert (tmp_path / "ray" / "trials.jsonl").read_bytes() == (tmp_path / "local" / "trials.jsonl").read_bytes()
    assert not cluster.worker_nodes


SCRIPT = ROOT / "tests" / "search" / "killed_search.py"


def search(out: Path, engine: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """60 trials in a process of its own; a search that is killed has return code -9."""
    command = [sys.executable, str(SCRIPT), str(out), "60", "2"]
    known = {**os.environ, "SAMPLER": "critical-path", "ENGINE": engine, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=known)


def test_a_search_that_was_killed_continues_on_the_cluster_with_the_same_plans(cluster: Any, tmp_path: Path) -> None:
    assert search(tmp_path / "local", "local").returncode == 0
    assert search(tmp_path / "ray", "ray", KILL_SEARCH="20").returncode == -signal.SIGKILL
    assert search(tmp_path / "ray", "ray").returncode == 0
    assert (tmp_path / "ray" / "trials.jsonl").read_bytes() == (tmp_path / "local" / "trials.jsonl").read_bytes()


@dataclass(frozen=True)
class Signing(BusObjective):
    """Notes in a folder the process that predicts."""

    signatures: Path = Path()

    def predict(self, plan: Plan) -> Prediction:
        (self.signatures / str(os.getpid())).touch()
        return super().predict(plan)


def test_a_worker_that_is_killed_is_replaced(cluster: Any, tmp_path: Path) -> None:
    killed: set[int] = set()

    def have_predicted() -> set[int]:
        return {int(path.name) for path in signatures.iterdir()} - {os.getpid()}

    def kill_the_workers(trial: Trial) -> None:
        if trial.number >= 10 and not killed:
            killed.update(have_predicted())
            for pid in killed:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    for engine in ("local", "ray"):
        signatures = tmp_path / f"{engine}-workers"
        signatures.mkdir()
        run_search(
            Signing(OBJECTIVE.tensors, signatures=signatures),
            trials=60,
            sampler="critical-path",
            seed=5,
            out=tmp_path / engine,
            trace_digest="bus",
            workers=2,
            engine=engine,
            on_trial=kill_the_workers if engine == "ray" else None,
        )
    assert killed
    assert killed < have_predicted()
    assert (tmp_path / "ray" / "trials.jsonl").read_bytes() == (tmp_path / "local" / "trials.jsonl").read_bytes()


@dataclass(frozen=True)
class Mortal(BusObjective):
    """Plans end the worker that evaluates them: one the first, the other every one."""

    folder: Path = Path()

    def predict(self, plan: Plan) -> Prediction:
        cycle_us, ended_one = plan.get("cycle_time_us"), self.folder / "ended"
        if cycle_us == 666.0 or (cycle_us == 777.0 and not ended_one.exists()):
            ended_one.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().predict(plan)


def test_workers_lost_at_work_are_counted_and_a_plan_that_ends_two_is_refused(cluster: Any, tmp_path: Path) -> None:
    losses = Losses()
    with closing(RayEvaluator(Mortal(OBJECTIVE.tensors, folder=tmp_path), 2, losses)) as evaluator:
        evaluations = Evaluations(evaluator)
        evaluations.request(Plan.of(cycle_time_us=777.0))
        assert evaluations.wait(Plan.of(cycle_time_us=777.0)) == OBJECTIVE.predict(Plan.of(cycle_time_us=777.0))
        assert losses.workers == 1
        evaluations.request(Plan.of(cycle_time_us=666.0))
        with pytest.raises(MissingCapabilityError, match=r'2 workers were lost while evaluating one plan .*"cycle_time_us": 666.0'):
            evaluations.wait(Plan.of(cycle_time_us=666.0))
        assert losses.workers == 3


def test_a_cluster_that_is_lost_ends_the_search_with_one_line(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        lost = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path / "run"), "100000", "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'search'}:{Path(__file__).parent}",
                "ENGINE": "ray",
                "RAY_ADDRESS": nodes.address,
            },
        )
        assert lost.stdout is not None
        for _ in range(10):
            assert lost.stdout.readline()
        for group in list(nodes.head_node.all_processes.values()):
            for info in group:
                info.process.kill()
        _, said = lost.communicate(timeout=120)
        assert lost.returncode == 1, said
        assert said.splitlines()[-1].startswith("--engine ray: the cluster at ")  # Ray's own threads may have written before
        assert whole_lines(tmp_path / "run" / "trials.jsonl").count(b"\n") >= 10
    finally:
        nodes.shutdown()


@pytest.mark.parametrize(
    ("address", "advice"), [("127.0.0.1:{unused}", "start one with 'ray start --head'"), ("", "RAY_ADDRESS is not set; set it to")]
)
def test_without_a_cluster_the_message_says_what_to_do(address: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        unused = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", address.format(unused=unused))
    with pytest.raises(MissingCapabilityError, match=advice) as raised:
        RayEvaluator(OBJECTIVE, 2, Losses())
    assert "\n" not in str(raised.value)
