"""Ways to choose the next plan: `make_sampler` builds one by name; `Sampler` says how one is driven."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpro_search.collect.trace import CommSettings, TensorInfo
from dpro_search.errors import InputError
from dpro_search.search.samplers._base import Proposal, Sampler

SAMPLERS = ("auto", "mcmc", "optuna")

__all__ = ["SAMPLERS", "Proposal", "Sampler", "make_sampler"]


def make_sampler(name: str, tensors: Sequence[TensorInfo], recorded: CommSettings, seed: int | Sequence[int]) -> Sampler:
    """A sampler by name, with all its randomness from `seed`; raises `InputError` for an unknown name."""
    rng = np.random.default_rng(seed)
    match name:  # imported here: Optuna takes half a second
        case "auto":
            from dpro_search.search.samplers._auto import AutoSampler

            return AutoSampler(tensors, recorded, rng)
        case "mcmc":
            from dpro_search.search.samplers._mcmc import McmcSampler

            return McmcSampler(tensors, recorded, rng)
        case "optuna":
            from dpro_search.search.samplers._optuna import OptunaSampler

            return OptunaSampler(tensors, recorded, rng)
    raise InputError(f"sampler '{name}' is unknown (known: {', '.join(SAMPLERS)})")
