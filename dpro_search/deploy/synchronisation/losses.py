"""A training loss as a number."""

from __future__ import annotations

from typing import Any

from dpro_search.errors import InputError


def number_of(loss: Any) -> float:
    """The value of a float or of a tensor with one element; raises `InputError` for anything else."""
    try:
        return float(loss.detach() if hasattr(loss, "detach") else loss)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"synchronise: step takes the loss as a number, not a {type(loss).__name__} of another shape") from None
