"""``accuracy.toml`` of parallel jobs: quantiles of measured over predicted step time, and how often an order is right."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.truth.intervals import intervals
from experiments.truth.score import Scored, group_of

GAPS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5)
SAME = 0.01  # measured times that differ by less have no order
_HEAD = "# Written by `python -m experiments.truth accuracy FOLDER`: what published runs say of predictions."


def accuracy_toml(scored: Sequence[Scored]) -> str:
    """The file's text.

    Each source counts as much as any other, however many runs it has; so does, for orders, each group of runs that differ in the
    strategy only.
    """
    ran = [found for found in scored if found.timed]
    sources = {found.row.values["source"] for found in ran}
    found = intervals(scored)
    ratios = [f'"{domain}" = [{each["low"]:.3f}, {each["high"]:.3f}]' for domain, each in found["ratio"].items()]
    return "\n".join(
        (
            _HEAD,
            f'on = "{len(ran)} published runs of {len(sources)} sources (experiments/truth)"',
            "# Of sources that were left out of the quantiles below, the mean share of runs within them (nominal: 0.9).",
            f"coverage = {found['mean_coverage']:.2f}",
            "# Pairs that differ in the strategy only, by the predicted gap: from which gap, and the share in the predicted order.",
            f"gaps = [{', '.join(map(str, GAPS))}]",
            f"ordered = [{', '.join(f'{share:.2f}' for share in _ordered(ran))}]",
            "",
            "# Measured over predicted step time by domain (space/mesh/domain.py): quantiles of 5 and 95 %, each source once.",
            "[ratio]",
            *ratios,
            "",
        )
    )


def _ordered(ran: Sequence[Scored]) -> list[float]:
    """The share of pairs in the predicted order, by gap; groups count alike."""
    groups: dict[tuple[str, ...], list[Scored]] = defaultdict(list)
    for found in ran:
        groups[group_of(found.row)].append(found)
    shares: list[list[float]] = [[] for _ in GAPS]
    for members in groups.values():
        right: list[list[bool]] = [[] for _ in GAPS]
        for gap, is_right in _pairs(members):
            right[int(np.searchsorted(GAPS, gap, side="right")) - 1].append(is_right)
        for own, found in zip(shares, right, strict=True):
            if found:
                own.append(float(np.mean(found)))
    return [float(np.mean(found)) if found else 0.5 for found in shares]


def _pairs(members: Sequence[Scored]) -> Iterator[tuple[float, bool]]:
    """Predicted gap of each pair whose measured times differ, and whether its order is right."""
    for one, other in itertools.combinations(members, 2):
        faster, slower = sorted((one, other), key=lambda found: found.prediction.step_s)
        ratio = float(slower.row.values["step_time_s"]) / float(faster.row.values["step_time_s"])
        if abs(ratio - 1) > SAME:
            yield slower.prediction.step_s / faster.prediction.step_s - 1, ratio > 1
