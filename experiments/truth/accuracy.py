"""``accuracy.toml`` of parallel jobs: quantiles of measured over predicted step time, and how often an order is right."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.truth.contradictions import consistent
from experiments.truth.intervals import intervals
from experiments.truth.orders import GAPS, ordered
from experiments.truth.score import Scored

_HEAD = "# Written by `python -m experiments.truth accuracy FOLDER`: what published runs say of predictions."


def accuracy_toml(scored: Sequence[Scored]) -> str:
    """The file's text.

    Each source counts as much as any other, however many runs it has; so does, for orders, each group of runs that differ in the
    strategy only. Runs that contradict themselves do not count.
    """
    ran = consistent([found for found in scored if found.timed])
    sources = {found.row.values["source"] for found in ran}
    found = intervals(ran)
    ratios = [f'"{domain}" = [{each["low"]:.3f}, {each["high"]:.3f}]' for domain, each in found["ratio"].items()]
    orders = [f'"{domain}" = [{", ".join(f"{share:.2f}" for share in shares)}]' for domain, shares in ordered(ran).items()]
    return "\n".join(
        (
            _HEAD,
            f'on = "{len(ran)} published runs of {len(sources)} sources (experiments/truth)"',
            "# Of sources that were left out of the quantiles below, the mean share of runs within them (nominal: 0.9).",
            f"coverage = {found['mean_coverage']:.2f}",
            "# Gaps from which on the shares in [ordered] hold: predicted time of the slower plan over that of the faster, less 1.",
            f"gaps = [{', '.join(map(str, GAPS))}]",
            "",
            "# Pairs of runs that differ in the strategy only: the share in the predicted order, by the harder domain of the two.",
            "[ordered]",
            *orders,
            "",
            "# Measured over predicted step time by domain (parallel/costs/domain.py): quantiles of 5 and 95 % of another source.",
            "[ratio]",
            *ratios,
            "",
        )
    )
