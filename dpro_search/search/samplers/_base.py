"""The protocol between a study and its samplers, and what all samplers share."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np

from dpro_search.collect.trace import CommSettings, TensorInfo
from dpro_search.space.plan import Plan, Prediction

CYCLE_RANGE_US = (500.0, 50_000.0)
HOROVOD_DEFAULT = Plan(fusion_threshold_bytes=128 * 2**20, cycle_time_us=1000.0)


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
    tensors
        In the order in which they become ready; at least one.
    recorded
        The knobs that the empty plan keeps.
    rng
        The only source of randomness.
    """

    name: ClassVar[str]

    def __init__(self, tensors: Sequence[TensorInfo], recorded: CommSettings, rng: np.random.Generator) -> None:
        self.tensors = tuple(tensors)
        self.recorded = recorded
        self.rng = rng

    @abc.abstractmethod
    def ask(self) -> Proposal:
        """The next plan to price."""

    @abc.abstractmethod
    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        """The price of the plan whose ask is open longest."""

    @abc.abstractmethod
    def observe(self, plan: Plan, prediction: Prediction) -> None:
        """The price of a plan that somebody else found."""


def as_change(plan: Plan, recorded: CommSettings) -> Plan:
    """The simplest plan that means the same: fields that repeat the recording, or have no effect, are left out.

    With explicit tensor groups the fusion threshold has no effect, because exact groups are neither cut nor joined.
    """
    groups = None if plan.tensor_groups == recorded.groups else plan.tensor_groups
    threshold = plan.fusion_threshold_bytes
    if groups is not None or threshold == recorded.fusion_threshold_bytes:
        threshold = None
    cycle = None if plan.cycle_time_us == recorded.cycle_time_us else plan.cycle_time_us
    return msgspec.structs.replace(plan, fusion_threshold_bytes=threshold, cycle_time_us=cycle, tensor_groups=groups)


def rounded_cycle_us(cycle_us: float) -> float:
    """A cycle time within range and with two significant digits: finer differences drown in the jitter of a wake-up."""
    low, high = CYCLE_RANGE_US
    return float(f"{min(max(cycle_us, low), high):.2g}")
