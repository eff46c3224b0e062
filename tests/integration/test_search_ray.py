"""`--engine ray` on a real cluster of two nodes, one of which is lost in the middle."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bus_objective import BusObjective, tensors_of

from dpro_search.errors import InputError, MissingCapabilityError
from dpro_search.search import Trial, run_search
from dpro_search.search.evaluation import Evaluations
from dpro_search.search.ray_tasks import RayEvaluator
from dpro_search.space.plan import Plan, Prediction

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
    with RayEvaluator(Refusing(OBJECTIVE.tensors), 2) as evaluator:
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


@pytest.mark.parametrize(
    ("address", "advice"), [("127.0.0.1:{unused}", "start one with 'ray start --head'"), ("", "RAY_ADDRESS is not set; set it to")]
)
def test_without_a_cluster_the_message_says_what_to_do(address: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        unused = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", address.format(unused=unused))
    with pytest.raises(MissingCapabilityError, match=advice) as raised:
        RayEvaluator(OBJECTIVE, 2)
    assert "\n" not in str(raised.value)
