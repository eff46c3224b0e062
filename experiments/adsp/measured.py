"""``Machine().train(case)``: a real job, with the library that users add to their script.

Workers are paced, or have CPU quotas. Their processes are Ray actors that stay for the next job; each job has a parameter server,
or a store for its process group, of its own. This process asks for the job's model every `Case.check_s`: at the server, or, where
models are averaged among workers, at the first worker, which has that of the newest round. It computes the loss over all training
examples, and ends the job at the target.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from dpro_search.collect.launch.cpu_quota import CpuQuotas
from dpro_search.kinds.synchronised.recording import recorded_runs
from dpro_search.runtime.schemes import parse_scheme
from dpro_search.runtime.synchronisation import synchronise
from dpro_search.runtime.synchronisation.server import NAMESPACE
from experiments.adsp.cases import Case
from experiments.adsp.emulate import reached
from experiments.adsp.workloads import WORKLOADS

LIMIT_S = 180.0


class TrainingProcess:
    """A process that trains one worker of one job after another."""

    def __init__(self) -> None:
        self._sync: Any = None

    def train(self, case: Case, job: str, worker: int, store: Mapping[str, str], record: str | None) -> dict[str, Any]:
        """Train until the job is told to stop; the worker's facts.

        Parameters
        ----------
        store
            Variables that name the job's store, where it has one.
        record
            File for `synchronise(record=)`.
        """
        torch.set_num_threads(1)
        os.environ.update(store)
        workload, paces = WORKLOADS[case.workload], case.paces
        task = workload.task(case.seed, case.batch)
        optimizer = workload.optimizer(task)
        draws = np.random.default_rng((case.seed, worker))
        pace = None if case.cpus else paces[worker]
        sync = synchronise(
            task.model,
            optimizer,
            case.scheme,
            worker=worker,
            workers=len(paces),
            job=job,
            pace=pace,
            silent_s=10.0,
            record=record,
        )
        self._sync = sync
        while sync.running:
            optimizer.zero_grad()
            loss = task.batch_loss(draws)
            loss.backward()
            sync.step(loss)
        self._sync = None
        sync.close()
        return sync.facts()

    def model(self) -> tuple[float, Any]:
        """Of a job without a server, seconds since it began and the group's model, float32, [elements]; 0 before."""
        sync = self._sync
        if sync is None:
            return 0.0, None
        now, flat = sync.model()
        return now, flat.numpy()

    def stop(self) -> None:
        """End a job without a server."""
        sync = self._sync
        if sync is not None:
            sync.stop()

    def process(self) -> int:
        """Its process id."""
        return os.getpid()


class Machine:
    """A local Ray with processes for up to so many workers; a context manager. `cpus`: their CPU quotas, empty for none."""

    def __init__(self, workers: int, cpus: tuple[float, ...] = ()) -> None:
        self._workers, self._cpus = workers, cpus
        self._processes: list[Any] = []
        self._quotas: CpuQuotas | None = None
        self._held = ExitStack()
        self._jobs = 0

    def __enter__(self) -> Machine:
        torch.set_num_threads(1)
        with ExitStack() as held:
            if self._cpus:
                self._quotas = held.enter_context(CpuQuotas(self._workers, self._cpus))
            held.callback(ray.shutdown)
            ray.init("local", num_cpus=max(self._workers, 2), include_dashboard=False, log_to_driver=False)
            self._processes = [self._process() for _ in range(self._workers)]
            for worker in range(self._workers):
                process_id = self.process_id(worker)
                if self._quotas is not None:
                    self._quotas.put(worker, process_id)
            self._held = held.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def train(self, case: Case, kill: Any = lambda now, machine, running: None) -> dict[str, Any]:
        """Train a case to its target; its record.

        Parameters
        ----------
        kill
            Called at each check with the seconds, this machine and the running calls by worker; may kill and restart workers.
        """
        self._jobs += 1
        job = f"job-{self._jobs}"
        if parse_scheme(case.scheme).collective:
            return self._train_group(case, job)
        running = {i: self._processes[i].train.remote(case, job, i, {}, None) for i in range(len(case.paces))}
        server = self._server(job, running)
        losses = _checked(case, server, running, lambda now: kill(now, (self, case, job), running))
        facts = ray.get(server.facts.remote())
        ray.get(server.stop.remote())
        workers = _ended(running)
        ray.kill(server)
        return _record(case, losses, workers) | _server_facts(case, losses, facts)

    def _train_group(self, case: Case, job: str) -> dict[str, Any]:
        """Train by a scheme whose workers average among themselves; the store of their group is in this process."""
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        named = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "run.jsonl"
            running = {
                i: self._processes[i].train.remote(case, job, i, {**named, "GLOO_SOCKET_IFNAME": "lo"}, str(record))
                for i in range(len(case.paces))
            }
            losses = _checked(case, self._processes[0], running)
            ray.get(self._processes[0].stop.remote())
            workers = _ended(running)
            return _record(case, losses, workers) | _group_facts(losses, record)

    def restart(self, case: Case, job: str, worker: int) -> Any:
        """A new process in place of a worker's that was killed; its running call."""
        self._processes[worker] = self._process()
        return self._processes[worker].train.remote(case, job, worker, {}, None)

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


def _checked(case: Case, holder: Any, running: dict[int, Any], each: Any = lambda now: None) -> list[tuple[float, float]]:
    """(seconds, loss over all training examples) of the job's model until the target or the limit; `holder` has the model."""
    workload = WORKLOADS[case.workload]
    task = workload.task(case.seed)
    losses: list[tuple[float, float]] = []
    while not reached(losses, workload.target):
        begun = time.monotonic()
        now, flat = ray.get(holder.model.remote())
        if now > LIMIT_S:
            break
        if now > 0:
            torch.nn.utils.vector_to_parameters(torch.tensor(flat), task.model.parameters())
            losses.append((now, task.full_loss()))
            each(now)
        elif failed := ray.wait(list(running.values()), timeout=0)[0]:
            ray.get(failed)
        time.sleep(max(0.0, case.check_s - (time.monotonic() - begun)))
    return losses


def _ended(running: dict[int, Any]) -> list[dict[str, Any]]:
    """Facts of the workers that ended well."""
    workers = []
    for call in running.values():
        with suppress(ray.exceptions.RayError):
            workers.append(ray.get(call, timeout=60))
    return workers


def _record(case: Case, losses: list[tuple[float, float]], workers: list[dict[str, Any]]) -> dict[str, Any]:
    """What all schemes have."""
    steps = sum(each["steps"] for each in workers)
    return {
        "how": "measured, CPU quotas" if case.cpus else "measured, paced",
        "time_s": losses[-1][0] if reached(losses, WORKLOADS[case.workload].target) else None,
        "losses": losses,
        "late_share": sum(each["late_steps"] for each in workers) / max(steps, 1),
        "step_s": {each["worker"]: each["step_s"] for each in workers},
        "commit_s": sum(each.get("commit_s") or 0.0 for each in workers) / max(len(workers), 1),
    }


def _server_facts(case: Case, losses: list[tuple[float, float]], facts: dict[str, Any]) -> dict[str, Any]:
    commits = [commit for commit in facts["commits"] if commit[0] <= losses[-1][0]]
    waited = sum(each["waited_s"] for each in facts["workers"].values())
    return {
        "steps": sum(commit[2] for commit in commits),
        "commits": len(commits),
        "bytes": 2 * 4 * _elements(case) * len(commits),
        "waiting_share": waited / (losses[-1][0] * len(case.paces)),
        "departures": facts["departures"],
        "applied": commits if case.experiment == "calibration" else [],
    }


def _group_facts(losses: list[tuple[float, float]], record: Path) -> dict[str, Any]:
    found = recorded_runs(record)
    assert found is not None
    (run,) = found.runs
    until = run.time_s <= losses[-1][0]
    return {
        "steps": int(run.steps[until].sum()),
        "commits": int(until.sum()),
        "bytes": 2 * 4 * run.elements * int(until.sum()),
        "waiting_share": run.waiting_share,
        "commit_s": run.commit_s,
        "departures": 0,
        "applied": [],
    }


def _elements(case: Case) -> int:
    return sum(parameter.numel() for parameter in WORKLOADS[case.workload].task(case.seed).model.parameters())
