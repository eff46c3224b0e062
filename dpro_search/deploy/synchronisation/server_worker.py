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

from dpro_search.deploy.synchronisation.losses import number_of
from dpro_search.deploy.synchronisation.pacing import Pacer
from dpro_search.deploy.synchronisation.server import NAMESPACE, ParameterServer, Reply
from dpro_search.errors import InputError, JobError, MissingCapabilityError
from dpro_search.space.synchronisation import Order, Pace, Scheme

if TYPE_CHECKING:
    import torch

_CALL_S = 60.0  # an answer that takes longer is asked for again: commits have numbers, so that this applies none twice
_START_S = 120.0  # workers that have not come after so long are not waited for
_TRIES = 5  # to reach the server of a new job
_SMOOTHING = 0.3  # weight of the newest of several durations


class ServerWorker:
    """See `Synchronised` for the methods."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheme: Scheme,
        worker: int,
        workers: int,
        *,
        job: str,
        pace: Pace | None,
        silent_s: float,
    ) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer, self._scheme, self._worker = optimizer, scheme, worker
        self._pacer, self._paced = Pacer(pace), pace is not None
        self._sequence = self._steps = self._commits = self._all_steps = 0
        self._losses: list[float] = []
        self._commit_s: float | None = None
        self._waited_s = 0.0
        self.running = True
        self._ended = threading.Event()
        reply = self._join(job, workers, silent_s)
        self._incarnation = reply.incarnation
        self._take(reply)
        self._pacer.start(reply.job_s)

    def step(self, loss: Any = None) -> None:
        if loss is None and self._scheme.needs_loss:
            raise InputError(
                f"synchronise: {self._scheme.name} decides by the training loss: call step(loss)"
                + (", or give the rate, as in 'adsp(commits=2)'" if self._scheme.name == "adsp" else "")
            )
        self._optimizer.step()
        self._steps += 1
        self._all_steps += 1
        if loss is not None:
            self._losses.append(number_of(loss))
        self._step_s = self._pacer.end_step()
        if self._order.due(self._steps, time.monotonic() - self._received, (self._commit_s or 0.0) / 2):
            self.commit()

    def commit(self) -> None:
        """Send the local update and take the global model, now. `step` calls it when it is due."""
        begun = time.monotonic()
        self._pacer.half_commit()
        self._sequence += 1
        update = (self._flat() - self._anchor).numpy()
        told: dict[str, Any] = {
            "steps": self._steps,
            "loss": sum(self._losses) / len(self._losses) if self._losses else None,
            "step_s": self._step_s,
            "commit_s": self._commit_s,
        }
        reply: Reply = _asked(lambda: self._server.commit.remote(self._worker, self._incarnation, self._sequence, update, **told))
        if reply.replaced:
            raise JobError(f"synchronise: worker {self._worker} was started again elsewhere; this process is not part of the job")
        self._take(reply)
        self._pacer.half_commit()
        took = time.monotonic() - begun - reply.waited_s
        self._commit_s = took if self._commit_s is None else self._commit_s + _SMOOTHING * (took - self._commit_s)
        self._waited_s += reply.waited_s
        self._commits += 1
        self._pacer.begin_step()

    def facts(self) -> dict[str, Any]:
        return {
            "worker": self._worker,
            "process": os.getpid(),
            "steps": self._all_steps,
            "commits": self._commits,
            "waited_s": self._waited_s,
            "commit_s": self._commit_s,
            "paced": self._paced,
            "late_steps": self._pacer.late_steps,
        }

    def close(self) -> None:
        import ray

        self._ended.set()
        with suppress(ray.exceptions.RayError):
            ray.get(self._server.leave.remote(self._worker), timeout=_CALL_S)

    def _join(self, job: str, workers: int, silent_s: float) -> Reply:
        """The first reply of the job's parameter server; a server of the same name whose job is over makes room."""
        beats = threading.Thread(target=self._beat, args=(silent_s / 4,), daemon=True)
        for _ in range(_TRIES):
            self._server = server_of(job, self._scheme, workers, self._flat().numpy(), silent_s=silent_s)
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

    def _flat(self) -> torch.Tensor:
        import torch

        with torch.no_grad():
            return torch.cat([parameter.detach().reshape(-1).float() for parameter in self._parameters])

    def _take(self, reply: Reply) -> None:
        import torch

        self._received = time.monotonic()
        self._order: Order = reply.order
        self._anchor = torch.tensor(reply.parameters)
        place = 0
        with torch.no_grad():
            for parameter in self._parameters:
                parameter.copy_(self._anchor[place : place + parameter.numel()].view_as(parameter))
                place += parameter.numel()
        self._steps, self._losses = 0, []
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


def server_of(job: str, scheme: Scheme, workers: int, parameters: Any, *, silent_s: float, start_s: float = _START_S) -> Any:
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
    ).remote(str(scheme), workers, parameters, silent_s, start_s)
