"""`EffectiveSteps`: the loss of a simulated job by a fitted `Convergence`, in place of a model that is trained."""

from __future__ import annotations

from dpro_search.costmodel.convergence import Convergence
from dpro_search.replay.synchronisation.simulate import AppliedCommit
from dpro_search.runtime.schemes import Accumulation, Scheme


class EffectiveSteps:
    """`Numerics` of one number: the effective steps that the global model has made.

    Attributes
    ----------
    made
        Effective steps so far.
    """

    def __init__(self, convergence: Convergence, scheme: Scheme, workers: int, factor: float = 1.0) -> None:
        """Progress of a scheme.

        Parameters
        ----------
        factor
            Effective steps of its updates, over those of the same updates under the other schemes.
        """
        self.made = 0.0
        self._convergence, self._factor = convergence, factor
        # Gradients of all micro-batches are averaged: a round is one step, however many there are.
        self._batches = (scheme.batches or 2 * workers) if isinstance(scheme, Accumulation) else None

    def step(self, worker: int) -> float | None:
        return self._convergence.loss_after(self.made)

    def commit(self, worker: int, commit: AppliedCommit) -> None:
        if self._batches is None:
            gain = self._convergence.gain(commit.steps, commit.weight, commit.behind_steps)
        else:
            gain = commit.steps / self._batches
        self.made += self._factor * gain

    def pull(self, worker: int) -> None:
        """The loss of a worker is taken to be that of the global model."""
