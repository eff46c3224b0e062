"""`ServerWorker`: one worker of a job with a parameter server, which is a Ray actor with the job's name."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from dpro_search.errors import InputError, JobError, MissingCapabilityError
from dpro_search.runtime.schemes import Commit, Goal, Scheme
from dpro_search.runtime.synchronisation.ledger import Reply
from dpro_search.runtime.synchronisation.local_model import Flat, LocalModel
from dpro_search.runtime.synchronisation.served_worker import ServedWorker
from dpro_search.runtime.synchronisation.server import NAMESPACE, ParameterServer
from dpro_search.runtime.synchronisation.worker import WorkerPart

_CALL_S = 60.0  # an answer that takes longer is asked for again: commits have numbers, so that this applies none twice
_START_S = 120.0  # workers that have not come after so long are not waited for
_TRIES = 5  # to reach the server of a new job


class ServerWorker(ServedWorker):
    """See `Synchronised` for the methods."""

    def __init__(self, model: LocalModel, part: WorkerPart) -> None:
        super().__init__(model, part)
        self._ended = threading.Event()
        self._begin()

    def _send(self, update: Flat, commit: Commit) -> Reply:
        reply: Reply = _asked(lambda: self._server.commit.remote(commit, update))
        return reply

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
            self._server = server_of(job, self._scheme, workers, self._local.flat(), silent_s=silent_s, goal=self._part.goal)
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
