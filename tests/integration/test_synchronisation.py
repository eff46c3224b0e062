"""Synchronisation schemes in real PyTorch jobs on Ray and on Gloo: unequal speed, and workers that are killed and come back."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dpro_search.collect.launch.ports import free_port
from dpro_search.deploy.synchronisation.server import NAMESPACE

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("synchronised_job.py")


@dataclass
class Job:
    """Started workers of one job."""

    python: str
    environment: dict[str, str]
    name: str
    scheme: str
    workers: int
    steps: int = 60
    running: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, worker: int, step_s: float = 0.01, *options: str) -> None:
        command = [self.python, str(JOB), self.scheme, self.name, str(self.steps), str(step_s), *options]
        environment = self.environment | {"RANK": str(worker), "WORLD_SIZE": str(self.workers)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.running[worker] = subprocess.Popen(command, env=environment, text=True, **pipes)

    def wait_for(self, worker: int, event: str) -> None:
        stdout = self.running[worker].stdout
        assert stdout is not None
        for line in stdout:
            if json.loads(line)["event"] == event:
                return
        raise AssertionError(self.running[worker].communicate()[1])

    def done(self, worker: int) -> dict[str, Any]:
        out, errors = self.running[worker].communicate(timeout=60)
        assert self.running[worker].returncode == 0, errors
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found

    def kill(self, worker: int) -> None:
        self.running[worker].send_signal(signal.SIGKILL)
        self.running[worker].wait()


@dataclass
class Ray:
    """A running Ray: how a process connects to it."""

    python: str
    environment: dict[str, str]


@pytest.fixture(scope="module")
def ray_of_tests(synchronisation_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ray]:
    """A Ray of its own, in the environment that has PyTorch as well; its token is in a file of the tests, not of the user."""
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(32))
    starts = (
        "import ray, sys; head = ray.init(num_cpus=2, include_dashboard=False); "
        "print(head.address_info['address'], flush=True); sys.stdin.read()"
    )
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", **auth}
    command = [synchronisation_python, "-c", starts]
    with subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as head:
        assert head.stdout is not None
        assert head.stdin is not None
        address = head.stdout.readline().strip()
        yield Ray(synchronisation_python, environment | {"RAY_ADDRESS": address})
        head.stdin.close()
        head.wait(timeout=30)


@pytest.fixture
def on_ray(request: pytest.FixtureRequest, ray_of_tests: Ray) -> Iterator[Any]:
    started: list[Job] = []

    def job(scheme: str, workers: int, steps: int = 60) -> Job:
        name = f"{request.node.name}-{len(started)}"
        started.append(Job(ray_of_tests.python, ray_of_tests.environment, name, scheme, workers, steps))
        return started[-1]

    yield job
    _end(started)


@pytest.fixture
def on_gloo(torch_python: str) -> Iterator[Any]:
    """Jobs whose store outlives each worker, as torchrun's does."""
    started: list[Job] = []
    stores: list[subprocess.Popen[bytes]] = []

    def job(scheme: str, workers: int, steps: int = 60) -> Job:
        port = free_port()
        serve = f"import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', {port}, is_master=True, wait_for_workers=False); "
        stores.append(subprocess.Popen([torch_python, "-c", serve + "sys.stdin.read()"], stdin=subprocess.PIPE))
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        started.append(Job(torch_python, {**os.environ, "PYTHONPATH": str(ROOT), **at}, "job", scheme, workers, steps))
        return started[-1]

    yield job
    _end(started)
    for store in stores:
        assert store.stdin is not None
        store.stdin.close()
        store.wait(timeout=30)


def _end(jobs: list[Job]) -> None:
    for process in (process for job in jobs for process in job.running.values()):
        if process.poll() is None:
            process.kill()
        process.communicate()


def _server_facts(ray: Ray, job: str) -> dict[str, Any]:
    """What the parameter server of a job says about it."""
    asks = (
        "import json, ray, sys; ray.init(log_to_driver=False); "
        "print(json.dumps(ray.get(ray.get_actor(sys.argv[1], sys.argv[2]).facts.remote())))"
    )
    command = [ray.python, "-c", asks, job, NAMESPACE]
    done = subprocess.run(command, env=ray.environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_killed_worker_of_a_synchronous_job_comes_back_and_each_commit_counts_once(on_ray: Any, ray_of_tests: Ray) -> None:
    job = on_ray("bsp", 3, steps=100)
    for worker in range(3):
        job.start(worker)
    job.wait_for(2, "training")
    job.kill(2)
    job.start(2)
    job.wait_for(2, "training")
    done = [job.done(worker) for worker in range(3)]
    facts = _server_facts(ray_of_tests, job.name)
    own = {worker: sum(1 for commit in facts["commits"] if commit[1] == worker) for worker in range(3)}
    assert own[0] == own[1] == 100  # no commit of the others was lost or counted twice
    assert own[2] > done[2]["commits"] == 100  # those before the kill, and those after
    assert facts["workers"]["2"]["incarnation"] == 2
    assert max(each["loss"] for each in done) < 1e-3


def test_adsp_lets_fast_and_slow_workers_commit_equally_often_without_waiting(on_ray: Any, ray_of_tests: Ray) -> None:
    job = on_ray("adsp(commits=4, period_s=0.8)", 2, steps=200)
    job.start(0, 0.01)
    job.start(1, 0.04)
    fast = job.done(0)
    facts = _server_facts(ray_of_tests, job.name)
    both_run = max(commit[0] for commit in facts["commits"] if commit[1] == 0)
    commits = [sum(1 for commit in facts["commits"] if commit[1] == worker and commit[0] <= both_run) for worker in range(2)]
    assert abs(commits[0] - commits[1]) <= 2
    assert fast["steps"] > 4 * fast["commits"]
    assert fast["waited_s"] < 0.5
    job.kill(1)


def test_a_scheme_that_decides_by_the_loss_asks_for_it(on_ray: Any) -> None:
    job = on_ray("adsp", 1)
    job.start(0, 0.01, "--no-loss")
    assert "call step(loss)" in job.running[0].communicate(timeout=60)[1]
    assert job.running[0].returncode == 2


@pytest.mark.parametrize("scheme", ["diloco(steps=4)", "accumulation"])
def test_collective_schemes_go_on_without_a_killed_worker_and_with_one_that_comes_back(on_gloo: Any, scheme: str) -> None:
    job = on_gloo(scheme, 3, steps=160)
    for worker, step_s in enumerate((0.01, 0.01, 0.02)):
        job.start(worker, step_s)
    job.wait_for(1, "training")
    job.kill(1)
    job.start(1)
    job.wait_for(1, "training")
    done = [job.done(worker) for worker in (0, 1)]
    assert max(each["loss"] for each in done) < 1.0  # 55 before training
    job.done(2)
