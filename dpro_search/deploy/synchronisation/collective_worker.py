"""`CollectiveWorker`: local SGD, DiLoCo and gradient accumulation by speed, on all-reduces of `torch.distributed`.

A round is local work that ends with one all-reduce. Where a member is lost, or one comes, the others form a new process group
(`Group`), and those whose round did not end repeat its all-reduce.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from dpro_search.deploy.synchronisation.group import Group, GroupChangedError
from dpro_search.deploy.synchronisation.losses import number_of
from dpro_search.deploy.synchronisation.pacing import Pacer
from dpro_search.space.synchronisation import Accumulation, Diloco, LocalSgd, Pace, Scheme
from dpro_search.space.synchronisation.rules import shares

if TYPE_CHECKING:
    import torch


class CollectiveWorker:
    """See `Synchronised` for the methods."""

    running = True

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
        import torch

        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer, self._scheme, self._worker, self._workers = optimizer, scheme, worker, workers
        self._anchor = self._flat()
        self._velocity = torch.zeros_like(self._anchor)
        self._gradients = torch.zeros_like(self._anchor)
        self._step_s: dict[int, float | None] = dict.fromkeys(range(workers))
        self._round = self._steps = self._all_steps = 0
        self._own_step_s = self._waited_s = 0.0
        self._losses: list[float] = []
        self._joined = False
        self._pacer, self._paced = Pacer(pace), pace is not None
        self._group = Group(worker, workers, job=job, silent_s=silent_s)
        self._form()
        self._pacer.start(0.0)

    def step(self, loss: Any = None) -> None:
        if loss is not None:
            self._losses.append(number_of(loss))
        if isinstance(self._scheme, Accumulation):
            self._gradients += self._flat_gradients()
        else:
            self._optimizer.step()
        self._steps += 1
        self._all_steps += 1
        self._own_step_s = self._pacer.end_step()
        if self._steps >= self._local_steps():
            self._exchange()

    def facts(self) -> dict[str, Any]:
        return {
            "worker": self._worker,
            "process": os.getpid(),
            "steps": self._all_steps,
            "commits": self._round,
            "members": len(self._group.members),
            "waited_s": self._waited_s,
            "paced": self._paced,
            "late_steps": self._pacer.late_steps,
        }

    def close(self) -> None:
        self._group.close()

    def _local_steps(self) -> int:
        if isinstance(self._scheme, Accumulation):
            return shares(self._step_s, self._scheme.batches or 2 * self._workers).get(self._worker, 1)
        assert isinstance(self._scheme, LocalSgd | Diloco)
        return self._scheme.steps

    def _exchange(self) -> None:
        """End the round: one all-reduce, in as many process groups as it takes."""
        begun = time.monotonic()
        self._pacer.half_commit()
        own, ended = self._round, False
        while not ended:
            try:
                self._group.check()
                summed = self._group.sum(self._contribution())
            except GroupChangedError:
                self._form()
                ended = self._round > own  # another member had received the sum: this one's part is in it
            else:
                self._apply(summed)
                ended = True
        self._pacer.half_commit()
        self._steps = 0
        self._gradients.zero_()
        self._waited_s += time.monotonic() - begun
        self._pacer.begin_step()

    def _contribution(self) -> torch.Tensor:
        """The local change of the parameters, or the sum of gradients; then a count, and each worker's seconds for a step."""
        import torch

        accumulates = isinstance(self._scheme, Accumulation)
        step_s = torch.zeros(self._workers)
        step_s[self._worker] = self._own_step_s
        change = self._gradients if accumulates else self._flat() - self._anchor
        return torch.cat([change, torch.tensor([float(self._steps if accumulates else 1)]), step_s])

    def _apply(self, summed: torch.Tensor) -> None:
        """The end of a round, from the sum of all contributions; the same on all members."""
        elements = self._anchor.numel()
        mean = summed[:elements] / summed[elements]
        times = summed[elements + 1 :].tolist()
        self._step_s = {worker: times[worker] for worker in self._group.members}
        if isinstance(self._scheme, Accumulation):
            self._put(mean, gradients=True)
            self._optimizer.step()
            self._anchor = self._flat()
        elif isinstance(self._scheme, Diloco):
            self._velocity = self._scheme.outer_momentum * self._velocity - mean
            self._anchor = self._anchor - self._scheme.outer_lr * (self._scheme.outer_momentum * self._velocity - mean)
            self._put(self._anchor)
        else:
            self._anchor = self._anchor + mean
            self._put(self._anchor)
        self._round += 1

    def _form(self) -> None:
        """A new process group; members that have ended fewer rounds take over the model of one that has ended the most."""
        import torch

        state = torch.cat([self._anchor, self._velocity])
        before = self._round
        self._round, state = self._group.form(self._round, state)
        elements = self._anchor.numel()
        if self._round > before or not self._joined:
            self._anchor, self._velocity = state[:elements].clone(), state[elements:].clone()
            self._put(self._anchor)
        self._joined = True
        self._step_s = dict.fromkeys(self._group.members)

    def _flat(self) -> torch.Tensor:
        import torch

        return torch.cat([parameter.detach().reshape(-1).float() for parameter in self._parameters])

    def _flat_gradients(self) -> torch.Tensor:
        import torch

        return torch.cat([torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in self._parameters])

    def _put(self, flat: torch.Tensor, *, gradients: bool = False) -> None:
        import torch

        place = 0
        with torch.no_grad():
            for parameter in self._parameters:
                part = flat[place : place + parameter.numel()].view_as(parameter)
                place += parameter.numel()
                if gradients:
                    parameter.grad = part.clone()
                else:
                    parameter.copy_(part)
