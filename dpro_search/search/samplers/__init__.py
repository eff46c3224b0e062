"""Samplers propose the next plan: `sampler_for` makes one by name; `Sampler` documents the protocol."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpro_search.errors import InputError
from dpro_search.search.objective import Ranked
from dpro_search.search.samplers._base import NoPlanLeftError, Proposal, Sampler
from dpro_search.search.samplers._guide import Guide
from dpro_search.space.transformations import PlanSpace

SAMPLERS = ("auto", "critical-path", "mcmc", "nsga2", "optuna")
SEEDLESS = frozenset({"critical-path"})  # samplers whose plans hardly depend on the seed: two of them would propose the same

__all__ = ["SAMPLERS", "SEEDLESS", "Guide", "NoPlanLeftError", "Proposal", "Sampler", "sampler_for"]


def sampler_for(
    space: PlanSpace,
    name: str,
    seed: int | Sequence[int],
    guide: Guide | None = None,
    *,
    island: int = 0,
    ranked: Ranked | None = None,
) -> Sampler:
    """A sampler by name, with all its randomness from `seed`.

    Parameters
    ----------
    ranked
        Plans in the order of bounds, which "auto" then follows; None: there are none.
    island
        Number of this sampler among those that share the trials of a search: portfolios begin with different members.

    Raises
    ------
    InputError
        There is no such sampler, or it needs a guide and has none.
    """
    rng = np.random.default_rng(seed)
    match name:  # imported here: Optuna takes half a second
        case "auto" if ranked is not None:
            from dpro_search.search.samplers._best_first import BestFirstSampler

            return BestFirstSampler(space, rng, ranked)
        case "auto":
            from dpro_search.search.samplers._auto import AutoSampler

            return AutoSampler(space, rng, guide, island=island)
        case "critical-path":
            from dpro_search.search.samplers._critical_path import CriticalPathSampler

            return CriticalPathSampler(space, rng, guide)
        case "mcmc":
            from dpro_search.search.samplers._mcmc import McmcSampler

            return McmcSampler(space, rng, guide)
        case "nsga2":
            from dpro_search.search.samplers._optuna import Nsga2Sampler

            return Nsga2Sampler(space, rng, guide)
        case "optuna":
            from dpro_search.search.samplers._optuna import OptunaSampler

            return OptunaSampler(space, rng, guide)
    raise InputError(f"sampler '{name}' is unknown (known: {', '.join(SAMPLERS)})")
