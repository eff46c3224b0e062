"""Table: where line searches end that begin at plans drawn at random, beside the best of all plans that the knobs can say.

    python -m experiments.search.line_searches NAME=TRACE[@RATE] ... [--starts 40]

For jobs without a guide (parameter servers, DistributedDataParallel). All combinations of the knobs are replayed once (a
minute for BytePS); the searches are then answered from these prices, so that they take no time and end when they have nothing new.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dpro_search.collect.trace import Trace
from dpro_search.search.samplers._line_search import LineSearchSampler
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import PlanSpace
from experiments.search.samplers import prices_of

_CLOSE_PCT = 1.0


def all_plans(space: PlanSpace) -> list[Plan]:
    """Every legal combination of the knobs, the recorded setting first, each once."""
    places = [
        [(choice, grid, index) for grid, points in choice.grids.items() for index in range(len(points))] for choice in space.choices
    ]
    found = {Plan(): None}
    for parts in itertools.product(*places):
        plan = Plan()
        for choice, grid, index in parts:
            plan = choice.put(plan, grid, index)
        if space.refusal(plan) is None:
            found[space.simplest(plan)] = None
    return list(found)


def line_search(space: PlanSpace, prices: Mapping[Plan, Prediction], start: Plan) -> tuple[float, int]:
    """The least iteration time (us) of a search that begins at a plan and ends when it has nothing new, and its trials."""
    sampler = LineSearchSampler(space, np.random.default_rng(0))
    sampler.observe(start, prices[start])
    priced, least_us = {start}, prices[start].iteration_us
    while (proposal := sampler.ask()).plan not in priced:
        priced.add(proposal.plan)
        sampler.tell(proposal, prices[proposal.plan])
        least_us = min(least_us, prices[proposal.plan].iteration_us)
    return least_us, len(priced)


def row(name: str, space: PlanSpace, prices: Mapping[Plan, Prediction], starts: int) -> str:
    """Of the table: the searches of a job."""
    plans = list(prices)
    drawn = np.random.default_rng(0).integers(len(plans), size=starts)
    ended = [line_search(space, prices, plans[number]) for number in drawn.tolist()]
    best_us = min(prediction.iteration_us for prediction in prices.values())
    gaps_pct = [(us / best_us - 1) * 100 for us, _ in ended]
    off = sum(gap > _CLOSE_PCT for gap in gaps_pct)
    gain = prices[Plan()].iteration_us / best_us
    trials = np.median([count for _, count in ended])
    return f"| {name} | {len(plans)} | {gain:.3f}x | {off} of {starts} | {max(gaps_pct):.2f} | {trials:.0f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Price the plans of each case and search them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", metavar="NAME=TRACE[@RATE]", nargs="+", help="a recording, or what if its links had another rate")
    parser.add_argument("--starts", type=int, default=40, help="plans drawn (default: %(default)s)")
    options = parser.parse_args(arguments)
    print(
        f"| case | plans | best | more than {_CLOSE_PCT:.0f} % off | worst, % | trials |\n|---|---:|---:|---:|---:|---:|",
        flush=True,
    )
    for text in options.cases:
        name, _, where = text.partition("=")
        folder, _, rate = where.partition("@")
        job = prices_of(Trace.load(Path(folder)), rate or None)
        prices = {plan: job.predict(plan) for plan in all_plans(job.space)}
        print(row(name, job.space, prices, options.starts), flush=True)


if __name__ == "__main__":
    main()
