"""`Emulated`: real training in simulated time. The scheme's timeline comes from `simulate`, each step and commit is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dpro_search.replay.synchronisation import AppliedCommit, Simulated, simulate
from dpro_search.runtime.schemes import Accumulation, Diloco, Pace, Scheme, parse_scheme
from experiments.adsp.workloads import Workload

CHECK_S = 0.25  # between checks of the loss
LAG_S = 1.5 * CHECK_S  # from the moment when the loss is at a target to the check that finds it: the mean of three is compared


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training to its target.

    Attributes
    ----------
    time_s
        Seconds to the target loss; None: not reached.
    losses
        (seconds, loss over all training examples), as it was checked.
    """

    time_s: float | None
    losses: tuple[tuple[float, float], ...]
    simulated: Simulated


class Emulated:
    """`Numerics` of a job that trains a workload: one process holds the models of all workers."""

    def __init__(self, workload: Workload, scheme: Scheme, workers: int, seed: int, batch: int | None = None) -> None:
        self.task = workload.task(seed, batch)
        self._scheme, self._lr = scheme, workload.lr
        self._parameters = list(self.task.model.parameters())
        self.model = self._flat()
        self._local = [self.model.clone() for _ in range(workers)]
        self._anchor = [self.model.clone() for _ in range(workers)]
        self._gradients = [torch.zeros_like(self.model) for _ in range(workers)]
        self._draws = [np.random.default_rng((seed, worker)) for worker in range(workers)]
        self._pending = torch.zeros_like(self.model)
        self._pending_steps = 0
        self._velocity = torch.zeros_like(self.model)

    def step(self, worker: int) -> float:
        self._put(self._local[worker])
        loss = self.task.batch_loss(self._draws[worker])
        gradients = torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, self._parameters)])
        if isinstance(self._scheme, Accumulation):
            self._gradients[worker] += gradients
        else:
            self._local[worker] -= self._lr * gradients
        return float(loss.detach())

    def commit(self, worker: int, commit: AppliedCommit) -> None:
        if isinstance(self._scheme, Accumulation):
            self._pending += self._gradients[worker]
            self._pending_steps += commit.steps
            self._gradients[worker].zero_()
        elif isinstance(self._scheme, Diloco):
            self._pending += commit.weight * (self._local[worker] - self._anchor[worker])
            self._pending_steps += commit.steps
        else:
            self.model += commit.weight * (self._local[worker] - self._anchor[worker])

    def pull(self, worker: int) -> None:
        if self._pending_steps:
            self._outer()
        self._local[worker] = self.model.clone()
        self._anchor[worker] = self.model.clone()

    def full_loss(self) -> float:
        """The loss of the global model over all training examples."""
        self._put(self.model)
        return self.task.full_loss()

    def _outer(self) -> None:
        """The update at the end of a round of a collective scheme."""
        if isinstance(self._scheme, Accumulation):
            self.model -= self._lr * self._pending / self._pending_steps
        else:
            assert isinstance(self._scheme, Diloco)
            self._velocity = self._scheme.outer_momentum * self._velocity - self._pending
            self.model -= self._scheme.outer_lr * (self._scheme.outer_momentum * self._velocity - self._pending)
        self._pending.zero_()
        self._pending_steps = 0

    def _flat(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self._parameters]).clone()

    def _put(self, flat: torch.Tensor) -> None:
        place = 0
        with torch.no_grad():
            for parameter in self._parameters:
                parameter.copy_(flat[place : place + parameter.numel()].view_as(parameter))
                place += parameter.numel()


def emulate(
    workload: Workload,
    scheme: Scheme | str,
    paces: Sequence[Pace],
    *,
    seed: int,
    batch: int | None = None,
    server_s: float = 0.0,
    check_s: float = CHECK_S,
    limit_s: float = 300.0,
) -> Training:
    """Train a workload in simulated time until the mean of three checks of the loss is at most its target."""
    torch.set_num_threads(1)
    scheme = parse_scheme(scheme)
    numerics = Emulated(workload, scheme, len(paces), seed, batch)
    losses: list[tuple[float, float]] = []

    def stop(now: float) -> bool:
        losses.append((now, numerics.full_loss()))
        return reached(losses, workload.target)

    found = simulate(scheme, paces, numerics, stop=stop, server_s=server_s, check_s=check_s, limit_s=limit_s)
    return Training(time_s=found.end_s if found.reached else None, losses=tuple(losses), simulated=found)


def reached(losses: Sequence[tuple[float, float]], target: float) -> bool:
    """Whether the mean of the last three checks is at most the target."""
    return len(losses) >= 3 and sum(loss for _, loss in losses[-3:]) / 3 <= target
