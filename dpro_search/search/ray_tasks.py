"""Workers as tasks of a running Ray cluster, at `RAY_ADDRESS`.

The objective is put into Ray's object store once, and each node fetches it once. Tasks of a lost process or node are started again
elsewhere. Every node needs the same version of this package.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec

from dpro_search.errors import MissingCapabilityError
from dpro_search.search.evaluation import Losses, WorkerEvaluator, answer_to
from dpro_search.search.objective import Objective
from dpro_search.space.plan import Plan

_CONNECT_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 5.0  # for the cluster, while no task ends: Ray itself would end this process after a minute without it


class RayEvaluator(WorkerEvaluator):
    """Evaluates plans as tasks that take one processor each, at most `workers` of them at a time.

    Raises
    ------
    MissingCapabilityError
        Ray is not installed, or there is no cluster.
    """

    def __init__(self, objective: Objective, workers: int, losses: Losses) -> None:
        super().__init__(losses)
        self._ray = _connected()
        self._address: str = self._ray.get_runtime_context().gcs_address
        self._gone = False
        self._objective = self._ray.put(objective)
        self._evaluate = self._ray.remote(num_cpus=1, max_retries=0)(answer_to)  # `_lose` starts a lost plan again, and counts
        self._running: dict[Any, Plan] = {}
        self._most = workers

    def close(self) -> None:
        for task in () if self._gone else self._running:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()

    def _start(self, plan: Plan) -> bool:
        if len(self._running) == self._most:
            return False
        self._running[self._evaluate.remote(self._objective, msgspec.json.encode(plan))] = plan
        return True

    def _receive(self) -> tuple[Plan, bytes] | None:
        task = self._ended()
        plan = self._running.pop(task)
        try:
            return plan, self._ray.get(task)
        except (self._ray.exceptions.WorkerCrashedError, self._ray.exceptions.NodeDiedError, self._ray.exceptions.OutOfMemoryError):
            self._lose(plan)
            return None
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise MissingCapabilityError(f"--engine ray: a task failed ({reason}); every node needs this dpro-search") from error

    def _ended(self) -> Any:
        """A task that has ended; raises `MissingCapabilityError` if the cluster is gone."""
        while True:
            ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_LOOK_EVERY_S)
            if ready:
                return ready[0]
            try:
                _check_port(self._address)
            except OSError as error:
                self._gone = True
                raise MissingCapabilityError(
                    f"--engine ray: the cluster at {self._address} is gone ({error.strerror}); start it again and run the same"
                    " command to continue"
                ) from error


def _connected() -> Any:
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise MissingCapabilityError(
            "--engine ray: RAY_ADDRESS is not set; set it to the cluster's host:port, or to 'auto' on one of its nodes"
        )
    try:
        import ray
    except ImportError as error:
        raise MissingCapabilityError("--engine ray: Ray is not installed; pip install 'dpro-search[ray]'") from error
    try:
        _check_port(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise MissingCapabilityError(
            f"--engine ray: no cluster at RAY_ADDRESS={address} ({reason}); start one with 'ray start --head'"
        ) from error
    return ray


def _check_port(address: str) -> None:
    """Raise `OSError` if no process listens there: Ray itself would retry for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
