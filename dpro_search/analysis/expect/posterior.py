"""`Beliefs`: how probable each hypothesis is, given measured quantities whose predictions have errors in common.

The logarithm of a measured quantity is that of its prediction under a hypothesis plus an error. Errors have a multivariate t
distribution, for published runs far out are more frequent than normal ones (Lange, Little and Taylor 1989, "Robust statistical
modeling using the t distribution"). Their covariance is that of the efficiencies of devices, links and hosts, by the slopes of each
quantity, with what measurements add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from dpro_search.analysis.expect.quantities import ABOUT, Quantity

Floats = npt.NDArray[np.float64]

FREEDOM = 5.0  # of the t distribution
_CAUSE_SPREAD = 0.15
"""Standard deviation of the logarithm that a cause moves a quantity by, as a share of it: models of causes are rough (assumed)."""
NINETY = NormalDist().inv_cdf(0.95)


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A cause, or two, at one severity.

    Attributes
    ----------
    causes
        Their names; empty: none.
    words
        The severity.
    prior
        Its probability before anything was measured.
    logs
        Logarithm of each quantity under it over that which is expected; quantities that it does not move may be missing.
    """

    causes: tuple[str, ...]
    words: tuple[str, ...]
    prior: float
    logs: Mapping[Quantity, float]


@dataclass(frozen=True, kw_only=True)
class ErrorSpread:
    """How far predictions are off.

    Attributes
    ----------
    quantities
        In the order of `covariance`.
    covariance
        Of the logarithms of quantities, [quantities, quantities].
    ratios
        Measured over predicted: quantiles of 5 and 95 % of some quantities, which differ in how far they are from 1. Their rows of
        the covariance are made as wide as that.
    """

    quantities: tuple[Quantity, ...]
    covariance: Floats
    ratios: Mapping[Quantity, tuple[float, float]]

    def of(self, quantities: Sequence[Quantity], rests: Floats) -> Floats:
        """The covariance of some quantities where measured ones differ by `rests`, of which the signs count, [quantities]."""
        places = [self.quantities.index(quantity) for quantity in quantities]
        scale = [self._scale(quantity, above=rest > 0) for quantity, rest in zip(quantities, rests, strict=True)]
        return np.asarray(self.covariance[np.ix_(places, places)] * np.outer(scale, scale))

    def _scale(self, quantity: Quantity, *, above: bool) -> float:
        if quantity not in self.ratios:
            return 1.0
        low, high = self.ratios[quantity]
        place = self.quantities.index(quantity)
        return float(max(np.log(high) if above else -np.log(low), 0.01) / NINETY / np.sqrt(self.covariance[place, place]))

    def half_width(self, quantity: Quantity, *, above: bool) -> float:
        """The distance of the end of the 90 % interval of a quantity's logarithm, on one side."""
        return float(NINETY * np.sqrt(self.of([quantity], np.array([1.0 if above else -1.0]))[0, 0]))


@dataclass(frozen=True, kw_only=True)
class Beliefs:
    """Hypotheses beside what was measured.

    Attributes
    ----------
    measured
        Logarithm of measured over expected for each measured quantity.
    """

    hypotheses: Sequence[Hypothesis]
    spread: ErrorSpread
    measured: Mapping[Quantity, float]

    @cached_property
    def log_likelihoods(self) -> Floats:
        """Logarithm of the likelihood of each hypothesis, [hypotheses]."""
        names = list(self.measured)
        if not names:
            return np.zeros(len(self.hypotheses))
        moved = self.moved(names)
        rests = np.array([self.measured[name] for name in names]) - moved
        result, sides = np.empty(len(rests)), rests > 0
        for side in np.unique(sides, axis=0):
            alike = (sides == side).all(axis=1)
            covariance = self.spread.of(names, rests[alike][0]) + noise_of(names)
            result[alike] = log_t(rests[alike], covariance + of_causes(moved[alike]))
        return result

    def moved(self, quantities: Sequence[Quantity]) -> Floats:
        """By how much each hypothesis moves the logarithms of some quantities, [hypotheses, quantities]."""
        return np.array([[one.logs.get(name, 0.0) for name in quantities] for one in self.hypotheses])

    @cached_property
    def probabilities(self) -> Floats:
        """Probability of each hypothesis, [hypotheses]; their sum is 1."""
        return normalised(np.log([one.prior for one in self.hypotheses]) + self.log_likelihoods)

    def percentile(self, quantity: Quantity) -> float:
        """Share of healthy jobs whose quantity is at most what was measured, 0 to 100."""
        log = self.measured[quantity]
        width = self.spread.half_width(quantity, above=log > 0) / NINETY
        return NormalDist().cdf(log / float(np.hypot(width, ABOUT[quantity].noise))) * 100


def noise_of(quantities: Sequence[Quantity]) -> Floats:
    """Covariance of the noise of measurements, [quantities, quantities]."""
    return np.diag([ABOUT[quantity].noise ** 2 for quantity in quantities])


def of_causes(moved: Floats) -> Floats:
    """Covariance of what is not known of causes that move quantities, [hypotheses, quantities, quantities]; see `_CAUSE_SPREAD`."""
    return np.asarray((_CAUSE_SPREAD * moved)[:, :, None] ** 2 * np.eye(moved.shape[1]))


def normalised(logs: Floats) -> Floats:
    """Probabilities of logarithms of weights, [..., hypotheses]; the sum over the last axis is 1."""
    weights = np.exp(logs - logs.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def log_t(rests: Floats, covariance: Floats) -> Floats:
    """Logarithm of the density of a multivariate t distribution of `FREEDOM`, less a constant, [...].

    Parameters
    ----------
    rests
        [..., quantities].
    covariance
        Of the normal distribution that has the same middle nine tenths, nearly, [..., quantities, quantities].
    """
    count = rests.shape[-1]
    squares = np.einsum("...i,...ij,...j->...", rests, np.linalg.inv(covariance), rests)
    return np.asarray(-0.5 * np.linalg.slogdet(covariance)[1] - (FREEDOM + count) / 2 * np.log1p(squares / FREEDOM))
