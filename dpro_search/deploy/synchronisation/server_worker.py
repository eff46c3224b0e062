"""`ServerWorker`: one worker of a job with a parameter server, which is a Ray actor with the job's name."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from dpro_search.deploy.synchronisation.recording import RecordedCommit
from dpro_search.deploy.synchronisation.server import NAMESPACE, ParameterServer, Reply
from dpro_search.deploy.synchronisation.worker import Part, Worker
from dpro_search.errors import InputError, JobError, MissingCapabilityError
from dpro_search.space.synchronisation import Goal, Order, Scheme

if TYPE_CHECKING:
    import torch

_CALL_S = 60.0  # an answer that takes longer is asked for again: commits have numbers, so that this applies none twice
_START_S = 120.0  # workers that have not come after so long are not waited for
_TRIES = 5  # to reach the server of a new job
_SMOOTHING = 0.3  # weight of the newest of several durations


class ServerWorker(Worker):
    """See `Synchronised` for the methods."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, part: Part) -> None:
        super().__init__(model, optimizer, part)
        self._sequence = 0
        self._commit_s: float | None = None
        self._ended = threading.Event()
        reply = self._join()
        self._incarnation, self.run = reply.incarnation, reply.run
        self._take(reply)
        self._pacer.start(reply.job_s)

    def step(self, loss: Any = None) -> None:
        if loss is None and (self._scheme.needs_loss or self._part.goal.target_loss is not None):
            why = "a target loss was given" if not self._scheme.needs_loss else f"{self._scheme.name} decides by the training loss"
            hint = ", or give the rate, as in 'adsp(commits=2)'" if self._scheme.name == "adsp" else ""
            raise InputError(f"synchronise: {why}: call step(loss){hint}")
        self._optimizer.step()
        self._stepped(loss)
        if self._order.due(self._steps, time.monotonic() - self._received, (self._commit_s or 0.0) / 2):
            self.commit()

    def commit(self) -> None:
        """Send the local update and take the global model, now. `step` calls it when it is due."""
        begun = time.monotonic()
        self._pacer.half_commit()
        self._sequence += 1
        update = (self._flat() - self._anchor).numpy()
        loss = self._loss
        told: dict[str, Any] = {"steps": self._steps, "loss": loss, "step_s": self._step_s, "commit_s": self._commit_s}
        reply: Reply = _asked(lambda: self._server.commit.remote(self._worker, self._incarnation, self._sequence, update, **told))
        if reply.replaced:
            raise JobError(f"synchronise: worker {self._worker} was started again elsewhere; this process is not part of the job")
        self._take(reply)
        self._pacer.half_commit()
        took = time.monotonic() - begun - reply.waited_s
        self._commit_s = took if self._commit_s is None else self._commit_s + _SMOOTHING * (took - self._commit_s)
        time_s, weight, behind = reply.applied
        self._committed(RecordedCommit(time_s, self._steps, weight, behind, loss, took, reply.waited_s))

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "commit_s": self._commit_s}

    def _leave(self) -> None:
        import ray

        self._ended.set()
        with suppress(ray.exceptions.RayError):
            ray.get(self._server.leave.remote(self._worker), timeout=_CALL_S)

    def _join(self) -> Reply:
        """The first reply of the job's parameter server; a server of the same name whose job is over makes room."""
        job, workers, silent_s = self._part.job, self._part.workers, self._part.silent_s
        beats = threading.Thread(target=self._beat, args=(silent_s / 4,), daemon=True)
        for _ in range(_TRIES):
            self._server = server_of(job, self._scheme, workers, self._flat().numpy(), silent_s=silent_s, goal=self._part.goal)
            if not beats.ident:
                beats.start()  # the server waits for the others before it replies
            try:
                reply: Reply | None = _asked(partial(self._server.join.remote, self._worker, str(self._scheme), workers))
            except JobError:  # another worker has just ended it, to begin anew
                continue
            if reply is not None:
                return reply
            _end(self._server)
        raise JobError(f"synchronise: the parameter server of '{job}' ended {_TRIES} times before it answered")

    def _take(self, reply: Reply) -> None:
        import torch

        self._received = time.monotonic()
        self._order: Order = reply.order
        self._anchor = torch.tensor(reply.parameters)
        self._put(self._anchor)
        self.running = not reply.stop

    def _beat(self, period_s: float) -> None:
        import ray

        while not self._ended.wait(period_s):
            with suppress(ray.exceptions.RayError):
                self._server.beat.remote(self._worker)


def _end(server: Any) -> None:
    import ray

    ray.kill(server)


def _asked(call: Callable[[], Any]) -> Any:
    """The answer of the parameter server, however long it takes."""
    import ray

    while True:
        try:
            return ray.get(call(), timeout=_CALL_S)
        except ray.exceptions.GetTimeoutError:
            continue
        except ray.exceptions.RayActorError as error:
            raise JobError(f"synchronise: the parameter server has ended; start the job again ({error})") from error
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, InputError):
                raise InputError(str(error.cause)) from None
            raise


def server_of(
    job: str,
    scheme: Scheme,
    workers: int,
    parameters: Any,
    *,
    silent_s: float,
    start_s: float = _START_S,
    goal: Goal = Goal(),  # noqa: B008 (a frozen value)
) -> Any:
    """The actor of a job, which the first caller creates with these parameters; it connects to Ray where nothing has."""
    try:
        import ray
    except ImportError:
        raise MissingCapabilityError(f"synchronise: {scheme.name} needs Ray: pip install 'dpro-search[ray]'") from None
    if not ray.is_initialized():
        try:
            ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False, logging_level=logging.WARNING)
        except ConnectionError as error:
            raise JobError(f"synchronise: no Ray cluster is running; start one with `ray start --head` ({error})") from error
    actor: Any = ray.remote(ParameterServer)
    return actor.options(
        name=job, namespace=NAMESPACE, get_if_exists=True, lifetime="detached", num_cpus=0, max_concurrency=1000
    ).remote(str(scheme), workers, parameters, silent_s, start_s, goal)
