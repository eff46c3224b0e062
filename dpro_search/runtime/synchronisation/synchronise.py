"""``synchronise(model, optimizer, scheme)``: the scheme's engine for this worker."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dpro_search.errors import InputError
from dpro_search.runtime.schemes import Goal, Pace, Scheme, parse_scheme
from dpro_search.runtime.synchronisation.worker import WorkerPart

SILENT_S = 10.0  # a worker that was not heard of for so long is not waited for


class Synchronised(Protocol):
    """The methods that a training script calls."""

    @property
    def running(self) -> bool:
        """Whether to go on; False once the job was told to stop."""

    def step(self, loss: Any = None, batch_size: int | None = None) -> None:
        """Update the model locally, and commit when the scheme says so. Call it in place of the optimiser's ``step``.

        Parameters
        ----------
        loss
            The training loss of the step, as a number or a tensor; of a Gluon block also one loss for each sample, [batch].
        batch_size
            What a Gluon trainer divides gradients by; None: the number of losses.
        """

    def facts(self) -> dict[str, Any]:
        """Counts and times of this worker so far, as JSON takes them."""

    def close(self) -> None:
        """Leave the job: nobody waits for this worker any more."""


def synchronise(
    model: Any,
    optimizer: Any,
    scheme: str | Scheme | None = None,
    *,
    worker: int | None = None,
    workers: int | None = None,
    job: str = "job",
    pace: Pace | None = None,
    silent_s: float = SILENT_S,
    target_loss: float | None = None,
    limit_s: float | None = None,
    record: str | Path | None = None,
) -> Synchronised:
    """Take part in a job with a scheme; returns when all workers are there.

    The model's parameters are replaced by those of the job. Buffers, and the state of the optimiser, stay each worker's own.

    Parameters
    ----------
    model, optimizer
        PyTorch: a module and an optimiser. MXNet: a Gluon block and its trainer with ``kvstore=None``, or a `Module` and None.
    scheme
        Such as "ssp(staleness=3)"; None: that of the JSON file that `DPRO_SEARCH_SYNCHRONISATION` names, or of its text.
    worker, workers
        Number of this worker, from 0, and of all; None: `RANK` and `WORLD_SIZE`, or those of ps-lite in an MXNet job.
    job
        Workers of one job give the same name.
    pace
        Sleep so that steps and commits last so long: a slow machine on a fast one.
    silent_s
        Seconds without a sign of life after which nobody waits for a worker.
    target_loss, limit_s
        `running` becomes False at that training loss (`runtime.schemes.Goal`), or after so many seconds; None: what
        `DPRO_SEARCH_TARGET_LOSS` and `DPRO_SEARCH_LIMIT_S` say, or never.
    record
        File to which each worker appends what it did, for `dpro-search run`; None: what `DPRO_SEARCH_RECORD` names, or none.

    Raises
    ------
    InputError
        An unknown scheme or parameter, or a worker that does not exist.
    MissingCapabilityError
        Ray is not installed, for a scheme that needs it.
    JobError
        The parameter server, or the store of the process group, is not there.
    """
    parsed = parse_scheme(_given_scheme() if scheme is None else scheme)
    goal = Goal(
        target_loss=_number_of("DPRO_SEARCH_TARGET_LOSS") if target_loss is None else target_loss,
        limit_s=_number_of("DPRO_SEARCH_LIMIT_S") if limit_s is None else limit_s,
    )
    path = os.environ.get("DPRO_SEARCH_RECORD") if record is None else record

    part = partial(WorkerPart, scheme=parsed, job=job, silent_s=silent_s, pace=pace, goal=goal, record=Path(path) if path else None)
    if _is_mxnet(model):
        return _on_kvstore(model, optimizer, parsed, part, worker, workers)
    number = _of_environment("RANK") if worker is None else worker
    count = _of_environment("WORLD_SIZE") if workers is None else workers
    worker_part = part(worker=_checked(number, count), workers=count)
    from dpro_search.runtime.synchronisation.torch_model import TorchModel

    local = TorchModel(model, optimizer)
    if parsed.collective:
        from dpro_search.runtime.synchronisation.collective_worker import CollectiveWorker

        return CollectiveWorker(local, worker_part)
    from dpro_search.runtime.synchronisation.server_worker import ServerWorker

    return ServerWorker(local, worker_part)


def _is_mxnet(model: Any) -> bool:
    """Whether a model is MXNet's; imports no framework."""
    return any(each.__module__.split(".")[0] == "mxnet" for each in type(model).__mro__)


def _on_kvstore(
    model: Any, optimizer: Any, scheme: Scheme, part: Callable[..., WorkerPart], worker: int | None, workers: int | None
) -> Synchronised:
    """A worker of an MXNet job; errors that need no ps-lite come before it starts, as it starts once in a process."""
    from dpro_search.runtime.synchronisation.kvstore.mxnet_model import mxnet_model
    from dpro_search.runtime.synchronisation.kvstore.store import Store
    from dpro_search.runtime.synchronisation.kvstore.worker import KvstoreWorker

    if scheme.collective:
        raise InputError(f"synchronise: {scheme.name} uses all-reduces, which MXNet's KVStore has not; take a scheme with a server")
    local = mxnet_model(model, optimizer)
    if worker is None and os.environ.get("RANK"):
        worker = _of_environment("RANK")
    store = Store()
    if workers not in (None, store.workers):
        raise InputError(f"synchronise: workers={workers}, but DMLC_NUM_WORKER={store.workers}")
    worker_part = part(worker=_checked(store.rank if worker is None else worker, store.workers), workers=store.workers)
    return KvstoreWorker(local, worker_part, store)


def _checked(worker: int, workers: int) -> int:
    if workers < 1 or not 0 <= worker < workers:
        raise InputError(f"synchronise: worker {worker} of {workers}; workers are numbered from 0")
    return worker


def _given_scheme() -> str:
    given = os.environ.get("DPRO_SEARCH_SYNCHRONISATION")
    if not given:
        raise InputError("synchronise: name a scheme, like 'adsp', or set DPRO_SEARCH_SYNCHRONISATION to one or to a file with one")
    if not given.endswith(".json"):
        return given
    try:
        scheme = json.loads(Path(given).read_text())["synchronisation"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{given}: not a file with a synchronisation scheme ({error})") from None
    if not isinstance(scheme, str):
        raise InputError(f"{given}: synchronisation must be a text like 'adsp', not {scheme!r}")
    return scheme


def _number_of(name: str) -> float | None:
    """The number in a variable; None: it is not set."""
    given = os.environ.get(name)
    try:
        return float(given) if given else None
    except ValueError:
        raise InputError(f"synchronise: {name} must be a number, not {given!r}") from None


def _of_environment(name: str) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        raise InputError(f"synchronise: give worker= and workers=, or set RANK and WORLD_SIZE ({name} is missing)") from None
