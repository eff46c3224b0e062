"""The protocol between a study and its samplers, and what all samplers share."""

from __future__ import annotations

import abc
from typing import ClassVar, NamedTuple

import numpy as np

from dpro_search.collect.trace import CommSettings
from dpro_search.search.samplers._guide import Guide
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import PlanSpace, horovod_space
from dpro_search.space.transformations.cycle_time import CYCLE_RANGE_US, rounded_cycle_us

__all__ = ["CYCLE_RANGE_US", "Proposal", "Sampler", "as_change", "price_us", "rounded_cycle_us"]

_INFEASIBLE_US = 1e9  # per byte of memory: whatever is infeasible comes after all that is feasible


class Proposal(NamedTuple):
    """A plan to price, and the name of the sampler that wants to know."""

    plan: Plan
    origin: str


class Sampler(abc.ABC):
    """Chooses which plans to price.

    The study calls, from one thread::

        sampler.observe(empty_plan, prediction)         # once: the recorded setting
        repeat:
            proposal = sampler.ask()
            sampler.tell(proposal, prediction)          # exactly once for each ask

    Where several plans are priced at a time, up to a window of asks is open: a sampler is then asked again before it is told.
    Tells come in the order of the asks, whichever price was known first. A sampler does not ask again for a plan whose price is
    on its way, if it can help it.

    `observe` may be called again before any `ask`, with a plan that came from elsewhere: a sampler uses it as a starting point, and
    owes nothing for it.

    A sampler never learns how many trials there will be, nor the time. So its proposals depend on the generator it was given
    and on the order of calls and what they told it, and on nothing else: a search that is cut short and driven again sees the same
    proposals, and a longer search begins with the shorter one.

    Parameters
    ----------
    space
        The plans that there are. Proposals are legal, and as simple as what they mean allows (`PlanSpace.simplest`).
    rng
        The only source of randomness.
    guide
        Replays plans for more than their price, always alike; None where nothing does.
    """

    name: ClassVar[str]

    def __init__(self, space: PlanSpace, rng: np.random.Generator, guide: Guide | None = None) -> None:
        self.space = space
        self.rng = rng
        self.guide = guide

    @abc.abstractmethod
    def ask(self) -> Proposal:
        """The next plan to price."""

    @abc.abstractmethod
    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        """The price of the plan whose ask is open longest."""

    @abc.abstractmethod
    def observe(self, plan: Plan, prediction: Prediction) -> None:
        """The price of a plan that somebody else found."""


def price_us(prediction: Prediction) -> float:
    """What samplers minimise: the iteration time. Infeasible plans come last, and of them those that need least memory first."""
    if prediction.infeasible is None:
        return prediction.iteration_us
    return _INFEASIBLE_US * max(prediction.peak_memory_bytes or 1, 1)


def as_change(plan: Plan, recorded: CommSettings) -> Plan:
    """The simplest plan of a Horovod job that means the same."""
    return horovod_space((), recorded).simplest(plan)
