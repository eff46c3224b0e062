"""The objective of a search: the predicted cost of a plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import msgspec
from msgspec import UNSET, UnsetType

from dpro_search.collect.trace import CommSettings, Floats, TensorInfo
from dpro_search.errors import InputError
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import PlanSpace


class Objective(Protocol):
    """Predicts the cost of plans of one recorded job. `predict` is deterministic: equal plans get equal predictions.

    An objective may also be a `Guide` of samplers (method `exchanges`, unless its attribute `guides` is False), a `Reevaluator` of
    the plans that a search lists, `Ranked`, and `Explaining`.
    """

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The communicated tensors, in the order in which they become ready in the recorded step."""

    @property
    def recorded(self) -> CommSettings | None:
        """Horovod's knobs in the recording, which the empty plan keeps; None for other kinds of jobs."""

    @property
    def space(self) -> PlanSpace:
        """The plans that the job can follow."""

    def predict(self, plan: Plan) -> Prediction:
        """The predicted iteration time of a plan."""


class Reevaluator(Protocol):
    """Predicts plans more precisely than `predict`, and more slowly: over resampled costs."""

    def reevaluated(self, plan: Plan) -> Prediction:
        """The predicted iteration time of a plan."""


class Sampled(Protocol):
    """Replays plans with the order of steps, latencies and negotiations drawn anew."""

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0) -> Floats:
        """Iteration times, [samples]; the i-th of every plan uses the same draws (common random numbers)."""


class BoundedPlan(NamedTuple):
    """A plan that keeps all limits, and an iteration time that it cannot be below."""

    plan: Plan
    least_us: float


class Ranked(Protocol):
    """Knows all plans worth a look, few enough to bound each, so that a search can end when no other can be the best.

    If its attribute `estimates` is True, it leaves out plans by estimates, so that a search that ends proves nothing.
    """

    def ranked(self, settled: Callable[[Hashable, float], bool]) -> Iterator[BoundedPlan]:
        """The plans in the order of their bounds, the least first.

        Parameters
        ----------
        settled
            Whether no plan of a family (`Explaining.family`) with such a bound is worth a look any more; asked again and again, as
            the answer changes while plans are evaluated.
        """


class StrategyFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts on a plan of a described parallel job beside its prediction. For other kinds of jobs, none of them is set.

    Attributes
    ----------
    strategy
        Every setting of the strategy.
    tokens_per_second, ..., energy_per_iteration_j
        See `kinds._work.Efficiency`; None: not known.
    memory_margin_bytes
        Memory of a device that is left; None: not known.
    slower_than_best_pct, lost_to_best_us
        How much longer a step takes than under the best plan, and which parts of the step take longer or (negative) less.
    breakdown_us
        Parts of a step.
    """

    strategy: Mapping[str, object] | UnsetType = UNSET
    tokens_per_second: float | UnsetType | None = UNSET
    tokens_per_second_per_device: float | UnsetType | None = UNSET
    mfu_pct: float | UnsetType | None = UNSET
    cost_per_million_tokens: float | UnsetType | None = UNSET
    cost_per_iteration_usd: float | UnsetType | None = UNSET
    energy_per_iteration_j: float | UnsetType | None = UNSET
    memory_margin_bytes: float | UnsetType | None = UNSET
    slower_than_best_pct: float | UnsetType = UNSET
    breakdown_us: Mapping[str, float] | UnsetType = UNSET
    lost_to_best_us: Mapping[str, float] | UnsetType = UNSET


class ListedPlan(NamedTuple):
    """Facts on a plan that a result has beside its prediction."""

    name: str  # The whole setting, in words.
    facts: StrategyFacts


class Explaining(Protocol):
    """Knows which plans are different, and what a result says of those that it lists."""

    def family(self, plan: Plan) -> Hashable:
        """Equal for plans of which a result lists only the best."""

    def listed(self, plans: Sequence[tuple[Plan, Prediction]]) -> list[ListedPlan]:
        """Names and facts of the plans of a result, which are in order."""


def explaining_of(objective: Objective) -> Explaining | None:
    """The objective, if it has the methods `family` and `listed`."""
    return cast("Explaining", objective) if callable(getattr(objective, "listed", None)) else None


def ranked_of(objective: Objective) -> Ranked | None:
    """The objective, if it has the method `ranked`."""
    return cast("Ranked", objective) if callable(getattr(objective, "ranked", None)) else None


def reevaluator_of(objective: Objective) -> Reevaluator | None:
    """The objective, if it has the method `reevaluated`."""
    return cast("Reevaluator", objective) if callable(getattr(objective, "reevaluated", None)) else None


def sampled_of(objective: Objective) -> Sampled:
    """The objective, if it replays plans with resampled durations; else raises `InputError`."""
    if not callable(getattr(objective, "sampled", None)):
        raise InputError("--quantile: this job cannot be replayed with resampled durations; leave the option out")
    return cast("Sampled", objective)
