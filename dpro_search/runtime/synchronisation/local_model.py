"""`LocalModel`: what a worker needs of the model and the optimiser in its process; one class for each framework."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dpro_search.errors import InputError

Flat = NDArray[np.float32]  # all trained parameters, [elements]


class LocalModel(Protocol):
    """A model with its optimiser.

    Attributes
    ----------
    framework
        As recordings name it.
    elements
        How many numbers its trained parameters have.
    """

    framework: str
    elements: int

    def flat(self) -> Flat:
        """A copy of the parameters."""

    def put(self, flat: Flat) -> None:
        """Replace the parameters."""

    def update(self, loss: Any, batch_size: int | None) -> None:
        """The optimiser's step; the arguments are those of `Synchronised.step`."""

    def loss(self, loss: Any) -> float:
        """A training loss as a number; raises `InputError` for anything else."""


def number_of(loss: Any) -> float:
    """The value of a float or of a tensor with one element; raises `InputError` for anything else."""
    try:
        return float(loss.detach() if hasattr(loss, "detach") else loss)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"synchronise: step takes the loss as a number, not a {type(loss).__name__} of another shape") from None
