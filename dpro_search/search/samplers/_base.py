"""The protocol between a study and its samplers, and what all samplers share."""

from __future__ import annotations

import abc
from typing import ClassVar, NamedTuple

import numpy as np

from dpro_search.search.samplers._guide import Guide
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import PlanSpace

_INFEASIBLE_US = 1e9  # per byte of memory: an infeasible plan comes after every feasible one


class Proposal(NamedTuple):
    """A plan to evaluate, and the name of the sampler that proposes it."""

    plan: Plan
    origin: str


class NoPlanLeftError(Exception):
    """A sampler knows that no plan is left that could be listed."""


class Sampler(abc.ABC):
    """Proposes plans to evaluate.

    The study calls, from one thread::

        sampler.observe(empty_plan, prediction)         # once: the recorded setting
        repeat:
            proposal = sampler.ask()
            sampler.tell(proposal, prediction)          # exactly once for each ask

    If several plans are evaluated at a time, up to a window of proposals is open: `ask` is then called again before `tell`. The
    calls of `tell` come in the order of the proposals, whichever result was known first. A sampler avoids to propose an open plan
    again.

    `observe` may be called again before any `ask`, with a plan that came from elsewhere. A sampler uses it as a starting point.

    A sampler does not know the number of trials or the time. Its proposals depend only on its random generator and on the calls
    and their arguments. So an interrupted search, repeated from its seed, gets the same proposals, and a longer search begins
    with the shorter one.

    Parameters
    ----------
    space
        The plans that may be proposed. Proposals are legal and have no redundant fields (`PlanSpace.simplest`).
    rng
        The only source of randomness.
    guide
        Gives the per-collective timeline of plans, deterministically; None if the job has none.
    """

    name: ClassVar[str]

    def __init__(self, space: PlanSpace, rng: np.random.Generator, guide: Guide | None = None) -> None:
        self.space = space
        self.rng = rng
        self.guide = guide

    @abc.abstractmethod
    def ask(self) -> Proposal:
        """Propose the next plan to evaluate; raises `NoPlanLeftError` where none is left, and then again."""

    @abc.abstractmethod
    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        """Receive the prediction of the oldest open proposal."""

    @abc.abstractmethod
    def observe(self, plan: Plan, prediction: Prediction) -> None:
        """Receive the prediction of a plan that was found elsewhere."""


def cost_us(prediction: Prediction) -> float:
    """The key by which samplers rank plans: the iteration time. Infeasible plans come last; among them, less memory is better.

    Times are rounded to a nanosecond: their last digits depend on the processor, and the plans of a seed should not.
    """
    if prediction.infeasible is None:
        return round(prediction.iteration_us, 3)
    return _INFEASIBLE_US * max(prediction.peak_memory_bytes or 1, 1)
