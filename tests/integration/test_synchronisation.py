"""Synchronisation schemes in real PyTorch jobs on Ray and on Gloo: unequal speed, and workers that are killed and come back."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dpro_search.collect.launch.ranks import free_port
from dpro_search.runtime.synchronisation.server import NAMESPACE
from dpro_search.space.plan import Plan

pytestmark = [pytest.mark.integration, pytest.mark.one_core]

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("synchronised_job.py")
_DEADLINE_S = 90.0
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass
class Starter:
    """A process that starts workers by forking."""

    process: subprocess.Popen[str]

    def start(self, **worker: Any) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(worker) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@dataclass
class Job:
    """The workers of one job."""

    starter: Starter
    folder: Path
    environment: dict[str, str]
    scheme: str
    workers: int
    steps: int
    processes: dict[int, int] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    all_processes: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.name

    def start(self, worker: int, step_s: float = 0.01, *options: str) -> None:
        self.starts[worker] = self.starts.get(worker, 0) + 1
        environment = self.environment | {"RANK": str(worker), "WORLD_SIZE": str(self.workers)}
        arguments = [self.scheme, self.name, str(self.steps), str(step_s), *options]
        output = str(self._output(worker))
        self.processes[worker] = self.starter.start(arguments=arguments, environment=environment, output=output)
        self.all_processes.append(self.processes[worker])

    def wait_for(self, worker: int, event: str) -> dict[str, Any]:
        """The facts of an event of the worker's newest process."""
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            output = self._output(worker)
            text = output.read_text() if output.is_file() else ""
            facts = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
            if matching := [each for each in facts if each["event"] == event]:
                return dict(matching[0])
            assert not any(each["event"] == "ended" for each in facts), text
            time.sleep(0.02)
        raise AssertionError(f"no event {event!r} of worker {worker}: {text}")

    def kill(self, worker: int) -> None:
        os.kill(self.processes[worker], signal.SIGKILL)

    def _output(self, worker: int) -> Path:
        return self.folder / f"worker-{worker}-{self.starts[worker]}"


@contextmanager
def _starter(python: str, environment: dict[str, str]) -> Iterator[Starter]:
    command = [python, str(JOB), "--serve"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        yield Starter(process)
        assert process.stdin is not None
        process.stdin.close()


def _end(jobs: list[Job]) -> None:
    for process in (process for job in jobs for process in job.all_processes):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="module")
def ray_environment(synchronisation_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables of processes that connect to a Ray of these tests; its token is in a file of theirs, not of the user."""
    token = tmp_path_factory.mktemp("ray") / "token"
    token.write_text(secrets.token_hex(32))
    starts = (
        "import ray, sys; head = ray.init('local', num_cpus=2, include_dashboard=False); "
        "print(head.address_info['address'], flush=True); sys.stdin.read()"
    )
    environment = _ENVIRONMENT | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    command = [synchronisation_python, "-c", starts]
    with subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as head:
        assert head.stdout is not None
        assert head.stdin is not None
        yield environment | {"RAY_ADDRESS": head.stdout.readline().strip()}
        head.stdin.close()


@pytest.fixture(scope="module")
def ray_starter(synchronisation_python: str, ray_environment: dict[str, str]) -> Iterator[Starter]:
    with _starter(synchronisation_python, ray_environment) as starter:
        yield starter


@pytest.fixture(scope="module")
def gloo_starter(torch_python: str) -> Iterator[Starter]:
    with _starter(torch_python, _ENVIRONMENT) as starter:
        yield starter


@pytest.fixture
def on_ray(ray_starter: Starter, ray_environment: dict[str, str], tmp_path: Path) -> Iterator[Any]:
    started: list[Job] = []

    def job(scheme: str, workers: int, steps: int) -> Job:
        started.append(Job(ray_starter, tmp_path, ray_environment, scheme, workers, steps))
        return started[-1]

    yield job
    _end(started)


@pytest.fixture
def on_gloo(gloo_starter: Starter, torch_python: str, tmp_path: Path) -> Iterator[Any]:
    """Jobs whose store outlives each worker, as torchrun's does."""
    started: list[Job] = []
    port = free_port()
    serves = f"import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', {port}, is_master=True, wait_for_workers=False); "
    with subprocess.Popen([torch_python, "-c", serves + "sys.stdin.read()"], stdin=subprocess.PIPE) as store:

        def job(scheme: str, workers: int, steps: int) -> Job:
            at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            started.append(Job(gloo_starter, tmp_path, _ENVIRONMENT | at, scheme, workers, steps))
            return started[-1]

        yield job
        _end(started)
        assert store.stdin is not None
        store.stdin.close()


def _server_facts(python: str, environment: dict[str, str], job: str) -> dict[str, Any]:
    """What the parameter server of a job says about it."""
    asks = (
        "import json, ray, sys; ray.init(log_to_driver=False); "
        "print(json.dumps(ray.get(ray.get_actor(sys.argv[1], sys.argv[2]).facts.remote())))"
    )
    command = [python, "-c", asks, job, NAMESPACE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_a_killed_worker_of_a_synchronous_job_comes_back_and_each_commit_counts_once(
    on_ray: Any, synchronisation_python: str, ray_environment: dict[str, str]
) -> None:
    job = on_ray("bsp", 3, steps=100)
    for worker in range(3):
        job.start(worker)
    job.wait_for(2, "training")
    job.kill(2)
    job.start(2)
    job.wait_for(2, "training")
    done = [job.wait_for(worker, "done") for worker in range(3)]
    facts = _server_facts(synchronisation_python, ray_environment, job.name)
    commits_of_worker = {worker: sum(1 for commit in facts["commits"] if commit[1] == worker) for worker in range(3)}
    assert commits_of_worker[0] == commits_of_worker[1] == 100  # no commit of the others was lost or counted twice
    assert commits_of_worker[2] > done[2]["commits"] == 100  # those before the kill, and those after
    assert facts["workers"]["2"]["incarnation"] == 2
    assert max(each["loss"] for each in done) < 1e-3


def test_adsp_lets_fast_and_slow_workers_commit_equally_often_without_waiting(
    on_ray: Any, synchronisation_python: str, ray_environment: dict[str, str]
) -> None:
    job = on_ray("adsp(commits=4, period_s=0.8)", 2, steps=200)
    job.start(0, 0.01)
    job.start(1, 0.04)
    fast = job.wait_for(0, "done")
    facts = _server_facts(synchronisation_python, ray_environment, job.name)
    both_run = max(commit[0] for commit in facts["commits"] if commit[1] == 0)
    commits = [sum(1 for commit in facts["commits"] if commit[1] == worker and commit[0] <= both_run) for worker in range(2)]
    assert abs(commits[0] - commits[1]) <= 2
    assert fast["steps"] > 4 * fast["commits"]
    assert fast["waited_s"] < 0.5


def test_a_scheme_that_decides_by_the_loss_asks_for_it(on_ray: Any) -> None:
    job = on_ray("adsp", 1, steps=2)
    job.start(0, 0.01, "--no-loss")
    assert "call step(loss)" in job.wait_for(0, "failed")["error"]
    assert job.wait_for(0, "ended")["code"] == 2


def test_a_job_begins_anew_when_it_is_over_and_refuses_another_scheme_while_it_is_not(on_ray: Any) -> None:
    job = on_ray("asp", 1, steps=3)
    for _ in range(2):
        job.start(0)
        assert job.wait_for(0, "done")["commits"] == 3
        job.wait_for(0, "ended")
    job.steps = 10_000
    job.start(0)
    job.wait_for(0, "training")
    job.scheme = "ssp"
    job.start(0)
    assert "the job runs asp with 1 workers" in job.wait_for(0, "failed")["error"]


@pytest.mark.parametrize("scheme", ["diloco(steps=4)", "accumulation"])
def test_collective_schemes_go_on_without_a_killed_worker_and_with_one_that_comes_back(on_gloo: Any, scheme: str) -> None:
    job = on_gloo(scheme, 3, steps=160)
    for worker, step_s in enumerate((0.01, 0.01, 0.02)):
        job.start(worker, step_s)
    job.wait_for(1, "training")
    job.kill(1)
    job.start(1)
    job.wait_for(1, "training")
    done = [job.wait_for(worker, "done") for worker in range(3)]
    assert max(each["loss"] for each in done) < 1.0  # 55 before training


def test_the_search_finds_a_scheme_from_short_runs_that_a_second_command_does_not_repeat(
    synchronisation_python: str, tmp_path: Path
) -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        line = [synchronisation_python, "-m", "experiments.adsp", *words]
        return subprocess.run(line, env=_ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, check=False)

    runs, plan = str(tmp_path / "runs.jsonl"), tmp_path / "plan.json"
    train = ("emulate", "--out", runs, "--only", "calibration", "--workload", "cancer-logistic")
    assert "[6/6]" in command(*train).stderr
    assert command(*train).stderr == ""
    run = command("search", runs, "--workload", "cancer-logistic", "--speeds", "1:1:2:3", "--out", str(plan), "--json")
    best = json.loads(run.stdout)["schemes"][0]
    assert best["synchronisation"].startswith("adsp")
    assert Plan.load(plan).synchronisation == best["synchronisation"]
    failed = command("search", runs, "--workload", "digits-cnn")
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1)
