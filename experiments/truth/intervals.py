"""`intervals`: how far measured steps are from predictions, by domain, and whether that holds on sources that were left out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search.errors import InputError
from dpro_search.parallel.costs.domain import Domain, domain_of
from experiments.truth.contradictions import consistent
from experiments.truth.jobs import workload_of
from experiments.truth.rows import publisher_of
from experiments.truth.score import Scored

NOMINAL = 0.9
FEWEST_SOURCES = 3
"""Of a domain, from which its own quantiles are taken; otherwise those of all domains, widened."""
WIDENED = 2.0
"""Of logarithms, in domains of which fewer sources are known (assumed)."""

Floats = npt.NDArray[np.float64]


class _Rows(NamedTuple):
    """Logarithms of measured over predicted steps, with what they are counted by."""

    logs: Floats
    domains: npt.NDArray[np.str_]
    sources: npt.NDArray[np.str_]

    def of(self, chosen: npt.NDArray[np.bool_]) -> _Rows:
        return _Rows(self.logs[chosen], self.domains[chosen], self.sources[chosen])


def intervals(scored: Sequence[Scored]) -> dict[str, Any]:
    """Quantiles of measured over predicted steps by domain, and the coverage of each source by those of the others.

    All sources of a publisher are left out together. Rows that contradict themselves do not count. The coverage of a domain is the
    mean over its publishers.
    """
    ran = consistent([found for found in scored if found.timed])
    rows = _Rows(
        np.array([-np.log1p(found.error) for found in ran]),
        np.array([domain_of(workload_of(found.row)).value for found in ran]),
        np.array([publisher_of(found.row.values["source"]) for found in ran]),
    )
    if len(set(rows.sources)) < 2:
        raise InputError("intervals need measured runs of at least two sources: one is left out at a time")
    covered: dict[str, float] = {}
    by_domain: dict[str, list[float]] = defaultdict(list)
    for source in sorted(set(rows.sources)):
        others, own = rows.of(rows.sources != source), rows.of(rows.sources == source)
        found = _quantiles(others)
        inside = np.array([found[domain][0] <= log <= found[domain][1] for log, domain in zip(own.logs, own.domains, strict=True)])
        covered[source] = round(float(np.mean(inside)), 3)
        for domain in set(own.domains):
            by_domain[str(domain)].append(float(np.mean(inside[own.domains == domain])))
    return {
        "nominal": NOMINAL,
        "ratio": {
            domain: {
                "rows": int(np.sum(rows.domains == domain)),
                "sources": len(set(rows.sources[rows.domains == domain])),
                "low": round(float(np.exp(low)), 3),
                "high": round(float(np.exp(high)), 3),
                "coverage_left_out": round(float(np.mean(by_domain[domain])), 3) if by_domain[domain] else None,
            }
            for domain, (low, high) in _quantiles(rows).items()
        },
        "coverage_of_source_left_out": covered,
        "mean_coverage": round(float(np.mean(list(covered.values()))), 3),
    }


def _quantiles(rows: _Rows) -> Mapping[str, tuple[float, float]]:
    """Of each domain; where few sources are known, those of all transformers, widened."""
    transformers = rows.of(rows.domains != Domain.NETWORK.value)
    everything = _of(transformers if len(transformers.logs) else rows)
    found = {}
    for domain in Domain:
        own = rows.of(rows.domains == domain.value)
        enough = len(set(own.sources)) >= FEWEST_SOURCES
        found[domain.value] = _of(own) if enough else _widened(*everything)
    return found


def _widened(low: float, high: float) -> tuple[float, float]:
    return min(low, WIDENED * low), max(high, WIDENED * high)


def _of(rows: _Rows) -> tuple[float, float]:
    return source_quantiles(rows.logs, rows.sources)


def source_quantiles(errors: Floats, sources: npt.NDArray[np.str_]) -> tuple[float, float]:
    """Quantiles of the errors, [rows], of a source that is not known.

    They hold what sources have in common, what each has of its own, and what its rows differ by.
    Each source is a guess at what another may have of its own, and its rows at what rows may differ by; all pairs of both have the
    same weight. As the middle of n sources is not known for certain either, and they are nearer to it than another one would be,
    what they have of their own counts sqrt((n + 1) / (n - 1)) times (the width of a normal prediction from n values).
    """
    names = sorted(set(sources))
    left = [errors[sources == name] for name in names]
    middles = np.array([np.median(logs) for logs in left])
    own = (middles - np.median(middles)) * np.sqrt((len(names) + 1) / max(len(names) - 1, 1))
    apart = [logs - middle for logs, middle in zip(left, middles, strict=True)]
    logs = np.median(middles) + (own[:, None] + np.concatenate(apart)).ravel()
    weights = np.tile(np.concatenate([np.full(len(each), 1 / len(each)) for each in apart]), len(names))
    order = np.argsort(logs)
    upto = (np.cumsum(weights[order]) - weights[order] / 2) / weights.sum()
    low, high = np.interp([(1 - NOMINAL) / 2, (1 + NOMINAL) / 2], upto, logs[order])
    return float(low), float(high)
