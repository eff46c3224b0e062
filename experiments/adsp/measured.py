"""``Machine().train(case)``: a real job of paced processes, with the library that users add to their script.

Worker processes are Ray actors that stay for the next job; each job has a parameter server of its own. This process asks the server
for the model every `CHECK_S`, computes the loss over all training examples, and ends the job at the target.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import ray
import torch

from dpro_search.deploy.synchronisation import synchronise
from dpro_search.deploy.synchronisation.server import NAMESPACE
from dpro_search.space.synchronisation import parse_scheme
from experiments.adsp.cases import Case
from experiments.adsp.emulate import CHECK_S, reached
from experiments.adsp.workloads import WORKLOADS

LIMIT_S = 180.0


class TrainingProcess:
    """A process that trains one worker of one job after another."""

    def train(self, case: Case, job: str, worker: int) -> dict[str, Any]:
        """Train until the job is told to stop; the worker's facts."""
        import numpy as np

        torch.set_num_threads(1)
        workload, paces = WORKLOADS[case.workload], case.paces
        task = workload.task(case.seed, case.batch)
        optimizer = workload.optimizer(task)
        draws = np.random.default_rng((case.seed, worker))
        sync = synchronise(
            task.model, optimizer, case.scheme, worker=worker, workers=len(paces), job=job, pace=paces[worker], silent_s=10.0
        )
        while sync.running:
            optimizer.zero_grad()
            loss = task.batch_loss(draws)
            loss.backward()
            sync.step(loss)
        sync.close()
        return sync.facts()

    def process(self) -> int:
        """Its process id."""
        import os

        return os.getpid()


class Machine:
    """A local Ray with processes for up to so many workers."""

    def __init__(self, workers: int) -> None:
        ray.init(num_cpus=max(workers, 2), include_dashboard=False, log_to_driver=False)
        torch.set_num_threads(1)
        self._processes = [self._process() for _ in range(workers)]
        ray.get([process.process.remote() for process in self._processes])
        self._jobs = 0

    def close(self) -> None:
        """End all processes."""
        ray.shutdown()

    def train(self, case: Case, kill: Any = lambda now, machine, running: None) -> dict[str, Any]:
        """Train a case to its target; its record.

        Parameters
        ----------
        kill
            Called at each check with the seconds, this machine and the running calls by worker; may kill and restart workers.
        """
        assert not parse_scheme(case.scheme).collective, "the target is checked at the parameter server"
        self._jobs += 1
        job = f"job-{self._jobs}"
        workload = WORKLOADS[case.workload]
        task = workload.task(case.seed)
        running = {i: self._processes[i].train.remote(case, job, i) for i in range(len(case.paces))}
        server = self._server(job, running)
        losses: list[tuple[float, float]] = []
        while not reached(losses, workload.target):
            begun = time.monotonic()
            now, flat = ray.get(server.model.remote())
            if now > LIMIT_S:
                break
            if now > 0:
                torch.nn.utils.vector_to_parameters(torch.tensor(flat), task.model.parameters())
                losses.append((now, task.full_loss()))
                kill(now, (self, case, job), running)
            time.sleep(max(0.0, CHECK_S - (time.monotonic() - begun)))
        facts = ray.get(server.facts.remote())
        ray.get(server.stop.remote())
        workers = []
        for call in running.values():
            with suppress(ray.exceptions.RayError):
                workers.append(ray.get(call, timeout=60))
        ray.kill(server)
        return _record(case, losses, reached(losses, workload.target), facts, workers, len(flat))

    def restart(self, case: Case, job: str, worker: int) -> Any:
        """A new process in place of a worker's that was killed; its running call."""
        self._processes[worker] = self._process()
        return self._processes[worker].train.remote(case, job, worker)

    def process_id(self, worker: int) -> int:
        """The id of a worker's process."""
        found: int = ray.get(self._processes[worker].process.remote())
        return found

    def _process(self) -> Any:
        actor: Any = ray.remote(TrainingProcess)
        return actor.options(num_cpus=0, max_concurrency=2).remote()

    def _server(self, job: str, running: dict[int, Any]) -> Any:
        while True:
            try:
                return ray.get_actor(job, NAMESPACE)
            except ValueError:
                failed, _ = ray.wait(list(running.values()), timeout=0.05)
                if failed:
                    ray.get(failed)


def _record(
    case: Case, losses: list[tuple[float, float]], done: bool, facts: dict[str, Any], workers: list[dict[str, Any]], elements: int
) -> dict[str, Any]:
    commits = [commit for commit in facts["commits"] if commit[0] <= losses[-1][0]]
    steps = sum(each["steps"] for each in workers)
    waited = sum(each["waited_s"] for each in facts["workers"].values())
    return {
        "how": "measured, paced",
        "time_s": losses[-1][0] if done else None,
        "losses": losses,
        "steps": sum(commit[2] for commit in commits),
        "commits": len(commits),
        "bytes": 2 * 4 * elements * len(commits),
        "waiting_share": waited / (losses[-1][0] * len(case.paces)),
        "late_share": sum(each["late_steps"] for each in workers) / max(steps, 1),
        "commit_s": sum(each["commit_s"] or 0.0 for each in workers) / max(len(workers), 1),
        "departures": facts["departures"],
        "applied": commits if case.experiment == "calibration" else [],
    }
