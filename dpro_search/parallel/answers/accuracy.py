"""How far predictions of parallel jobs are from published runs (``accuracy.toml``): intervals, and how sure an order is."""

from __future__ import annotations

import tomllib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from dpro_search.machine import Calibration
from dpro_search.parallel.costs.domain import Domain

_MANY_RUNS = ("NVIDIA",)
"""Vendors of GPUs with more than a hundred of the published runs: intervals of others are wider."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Errors on published runs.

    Attributes
    ----------
    on
        Which runs.
    coverage
        Of sources that were left out, the share of runs within the intervals of the others.
    ratio
        Measured over predicted step time by domain: quantiles of 5 and 95 %.
    gaps, ordered
        Pairs of runs that differ in the strategy only: from which predicted gap (slower over faster, less 1), and by the harder
        domain of the two the share of the pairs from there to the next gap whose measured order is the predicted one.
    spread
        Standard deviations of logarithms: of each efficiency of `Scales` that is learned (`MEASURED`), of the part of an error that
        jobs which differ in the strategy only share ("group"), and of the rest ("row").
    memory_ratio
        Measured over predicted memory: quantiles of 5 and 95 %.
    """

    on: str
    coverage: float
    ratio: Mapping[Domain, tuple[float, float]]
    gaps: tuple[float, ...]
    ordered: Mapping[Domain, tuple[float, ...]]
    spread: Mapping[str, float]
    memory_ratio: tuple[float, float]

    def interval_us(self, step_us: float, domain: Domain, vendor: str = "") -> tuple[float, float]:
        """The interval that holds a measured step in 9 of 10 cases."""
        low, high = self._ratio_of(domain, vendor)
        return low * step_us, high * step_us

    def _ratio_of(self, domain: Domain, vendor: str) -> tuple[float, float]:
        """Quantiles of a domain; where few runs are of a vendor's GPUs, its kernels may be as far off as the widest domain is."""
        low, high = self.ratio[domain]
        low, high = min(low, 1.0), max(high, 1.0)
        if vendor and vendor not in _MANY_RUNS:
            low *= min(1.0, *(one for one, _ in self.ratio.values()))
            high *= max(1.0, *(other for _, other in self.ratio.values()))
        return low, high

    def order_is_right(self, faster_us: float, slower_us: float, domain: Domain) -> float:
        """The share of pairs with such a gap that are in the predicted order; `domain` is the harder one of the two."""
        gap = slower_us / faster_us - 1
        return self.ordered[domain][max(bisect_right(self.gaps, gap) - 1, 0)]

    def calibration(self, domain: Domain, vendor: str = "") -> Calibration:
        """For the output of verbs."""
        low, high = self._ratio_of(domain, vendor)
        half = max(1 - low, high - 1)
        on = (
            f"{self.on}, for jobs like this one ({domain}); {self.coverage:.0%} of the runs of a publisher lie within the "
            "interval when all its runs are left out of the fit"
        )
        if vendor and vendor not in _MANY_RUNS:
            on += f"; few are of GPUs of {vendor}, so that the interval is wider"
        return Calibration(calibrated=True, model_error=(half, half), widening=1.0, on=on)


@lru_cache(maxsize=1)
def accuracy() -> Accuracy:
    """The accuracy of the shipped cost models."""
    values = tomllib.loads((files("dpro_search.parallel.answers") / "accuracy.toml").read_text())
    return Accuracy(
        on=values["on"],
        coverage=float(values["coverage"]),
        ratio={domain: (float(values["ratio"][domain][0]), float(values["ratio"][domain][1])) for domain in Domain},
        gaps=tuple(map(float, values["gaps"])),
        ordered={domain: tuple(map(float, values["ordered"][domain])) for domain in Domain},
        spread={name: float(width) for name, width in values["spread"].items()},
        memory_ratio=(float(values["memory"]["ratio"][0]), float(values["memory"]["ratio"][1])),
    )
