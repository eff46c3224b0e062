"""`Progress`: the loss of a simulated job by a fitted `Convergence`, in place of a model that is trained."""

from __future__ import annotations

from dpro_search.costmodel.convergence import Convergence
from dpro_search.replay.synchronisation.simulate import Commit


class Progress:
    """`Numerics` of one number: the effective steps that the global model has made.

    Attributes
    ----------
    made
        Effective steps so far.
    """

    def __init__(self, convergence: Convergence) -> None:
        self.made = 0.0
        self._convergence = convergence

    def step(self, worker: int) -> float | None:
        return self._convergence.loss_after(self.made)

    def commit(self, worker: int, commit: Commit) -> None:
        self.made += self._convergence.gain(commit.steps, commit.weight, commit.behind_steps)

    def pull(self, worker: int) -> None:
        """The loss of a worker is taken to be that of the global model."""
