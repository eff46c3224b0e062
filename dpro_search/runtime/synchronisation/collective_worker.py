"""`CollectiveWorker`: local SGD, DiLoCo and gradient accumulation by speed, on all-reduces of `torch.distributed`.

A round is local work that ends with one all-reduce. Where a member is lost, or one comes, the others form a new process group
(`WorkerGroup`), and those whose round did not end repeat its all-reduce.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from dpro_search.errors import InputError
from dpro_search.runtime.schemes import Accumulation, Diloco, LocalSgd, LossWindow
from dpro_search.runtime.schemes.rules import shares
from dpro_search.runtime.synchronisation.group import GroupChangedError, WorkerGroup
from dpro_search.runtime.synchronisation.recording import RecordedCommit
from dpro_search.runtime.synchronisation.torch_model import TorchModel
from dpro_search.runtime.synchronisation.worker import Worker, WorkerPart

if TYPE_CHECKING:
    import torch


class _Tail(NamedTuple):
    """Numbers behind the parameters in a contribution; sums over members count.

    Attributes
    ----------
    parts
        What the summed change is divided by.
    losses, loss_steps
        Sum of the training losses, and of how many steps.
    late
        Above 0: the time limit is over, or a member was told to stop.
    """

    parts: float
    losses: float
    loss_steps: float
    late: float


_TAIL = len(_Tail._fields)


class CollectiveWorker(Worker):
    """See `Synchronised` for the methods."""

    def __init__(self, model: TorchModel, part: WorkerPart) -> None:
        import torch

        super().__init__(model, part)
        self._model = model
        self._workers = part.workers
        self._anchor = model.tensor()
        self._velocity = torch.zeros_like(self._anchor)
        self._gradients = torch.zeros_like(self._anchor)
        self._other_step_s: dict[int, float | None] = dict.fromkeys(range(part.workers))
        self._round = 0
        self._stopped = False
        self._job_loss = LossWindow()
        self._joined = False
        self._group = WorkerGroup(part.worker, part.workers, job=part.job, silent_s=part.silent_s)
        self.run = self._group.agreed("run", secrets.token_hex(6))
        self._form()
        self._begun = float(self._group.agreed("begun", repr(time.time())))  # on all workers: seconds of the common clock
        self._pacer.start(self._job_s)

    def step(self, loss: Any = None, batch_size: int | None = None) -> None:
        if loss is None and self._part.goal.target_loss is not None:
            raise InputError("synchronise: a target loss was given: call step(loss)")
        if isinstance(self._scheme, Accumulation):
            self._gradients += self._model.gradients()
        else:
            self._model.update()
        self._stepped(loss)
        if self._steps >= self._local_steps():
            self._exchange()

    def model(self) -> tuple[float, torch.Tensor]:
        """Seconds since the job began, and the group's model after its newest round; other threads may ask."""
        return self._job_s, self._anchor

    def stop(self) -> None:
        """Tell all workers that the training is over, at the end of the round."""
        self._stopped = True

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "members": len(self._group.members)}

    def _leave(self) -> None:
        self._group.close()

    @property
    def _job_s(self) -> float:
        """Seconds since the job's start."""
        return time.time() - self._begun

    def _local_steps(self) -> int:
        if isinstance(self._scheme, Accumulation):
            return shares(self._other_step_s, self._scheme.batches or 2 * self._workers).get(self._worker, 1)
        assert isinstance(self._scheme, (LocalSgd, Diloco))
        return self._scheme.steps

    def _exchange(self) -> None:
        """End the round: one all-reduce, in as many process groups as it takes."""
        begun = time.monotonic()
        self._pacer.half_commit()
        current_round, ended = self._round, False
        while not ended:
            try:
                self._group.check()
                summed = self._group.sum(self._contribution())
            except GroupChangedError:
                self._form()
                ended = self._round > current_round  # another member had received the sum: this one's part is in it
            else:
                self._apply(summed)
                ended = True
        now = self._job_s
        self._pacer.half_commit()
        self._gradients.zero_()
        weight = 1.0 / max(self._summed_count, 1.0)
        took = time.monotonic() - begun
        self._committed(RecordedCommit(now, self._steps, weight, 0.0, self._loss, took, 0.0))

    def _contribution(self) -> torch.Tensor:
        """The local change of the parameters, or the sum of gradients; then what `_Tail` names, and each worker's step seconds."""
        import torch

        accumulates = isinstance(self._scheme, Accumulation)
        step_s = torch.zeros(self._workers)
        step_s[self._worker] = self._step_s
        change = self._gradients if accumulates else self._model.tensor() - self._anchor
        late = self._stopped or self._part.goal.ends(self._job_s, None)
        tail = _Tail(
            parts=float(self._steps if accumulates else 1), losses=sum(self._losses), loss_steps=len(self._losses), late=float(late)
        )
        return torch.cat([change, torch.tensor(tail), step_s])

    def _apply(self, summed: torch.Tensor) -> None:
        """The end of a round, from the sum of all contributions; the same on all members."""
        elements = self._anchor.numel()
        tail, times = _Tail(*summed[elements : elements + _TAIL].tolist()), summed[elements + _TAIL :].tolist()
        mean = summed[:elements] / tail.parts
        self._summed_count = tail.parts
        self._other_step_s = {worker: times[worker] for worker in self._group.members}
        if isinstance(self._scheme, Accumulation):
            self._model.put_tensor(mean, gradients=True)
            self._model.update()
            self._anchor = self._model.tensor()
        elif isinstance(self._scheme, Diloco):
            self._velocity = self._scheme.outer_momentum * self._velocity - mean
            self._anchor = self._anchor - self._scheme.outer_lr * (self._scheme.outer_momentum * self._velocity - mean)
            self._model.put_tensor(self._anchor)
        else:
            self._anchor = self._anchor + mean
            self._model.put_tensor(self._anchor)
        self._round += 1
        if tail.loss_steps:
            self._job_loss.add(tail.losses / tail.loss_steps, round(tail.loss_steps))
        if tail.late or self._part.goal.ends(0.0, self._job_loss.mean):
            self.running = False

    def _form(self) -> None:
        """A new process group; members that have ended fewer rounds take over the model of one that has ended the most."""
        import torch

        state = torch.cat([self._anchor, self._velocity])
        before = self._round
        self._round, state = self._group.form(self._round, state)
        elements = self._anchor.numel()
        if self._round > before or not self._joined:
            self._anchor, self._velocity = state[:elements].clone(), state[elements:].clone()
            self._model.put_tensor(self._anchor)
        self._joined = True
        self._other_step_s = dict.fromkeys(self._group.members)
        self._summed_count = float(len(self._group.members))
