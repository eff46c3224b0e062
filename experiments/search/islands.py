"""Table: best plans of samplers that exchange results (islands) and of as many independent ones, with equal numbers of trials.

    python -m experiments.search.islands NAME [--samplers auto,mcmc] [--trials 500] [--seeds 20]

NAME is a bundled sample, "all" (the bundled sample of Horovod on 16 ranks with all transformations), "serial" (ResNet-50's
all-reduces one after the other), the folder of a trace, or the file of a described job. A plan is predicted once for all searches.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

from benchmarks.fusion_objective import FusionObjective
from benchmarks.search_bert import recorded_plans
from benchmarks.search_jobs import resnet50, serial
from dpro_search.collect.sample import sample_trace_path
from dpro_search.collect.trace import Trace
from dpro_search.kinds import job_of, load_source
from dpro_search.search import Objective, Trial
from dpro_search.search.islands import FIRST_NEWS, ROUND, Island, Result
from dpro_search.search.run_folder import line_of
from dpro_search.search.samplers import sampler_for
from dpro_search.search.study import guide_of
from dpro_search.space.plan import Plan, Prediction

_HOROVOD = "resnet50_2ranks_2gbit"
_EQUAL = 1e-9


def opened(name: str) -> Objective:
    """The job with a name."""
    if name == "all":
        return recorded_plans(Trace.load(sample_trace_path(_HOROVOD)))
    if name == "serial":
        return FusionObjective(serial(resnet50()))
    return job_of(load_source(Path(name) if Path(name).exists() else sample_trace_path(name)))


class Searches:
    """Searches of one job; every plan is predicted once."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._predict = cache(objective.predict)

    def best_us(self, sampler: str, seed: int, samplers: int, trials: int, *, exchange: bool) -> float:
        """The least iteration time of a search by several samplers."""
        recorded = self._predict(Plan())
        islands = [self._island(sampler, seed, number, recorded) for number in range(samplers)]
        results: list[Result] = []
        for first in range(1, trials, samplers):
            round_, place = divmod((first - 1) // samplers, ROUND)
            if exchange and place == 0 and round_ >= FIRST_NEWS:
                begun = (round_ - FIRST_NEWS) * ROUND * samplers
                news = results[begun : begun + ROUND * samplers]
                for number, island in enumerate(islands):
                    island.hear([result for result in news if (result.number - 1) % samplers != number])
            results += self._row(islands, first, trials)
        return min(recorded.iteration_us, *(result.prediction.iteration_us for result in results))

    def _island(self, sampler: str, seed: int, number: int, recorded: Prediction) -> Island:
        guide = guide_of(self._objective)
        return Island(sampler_for(self._objective.space, sampler, (seed, number), guide, island=number), recorded)

    def _row(self, islands: list[Island], first: int, trials: int) -> Iterator[Result]:
        for number, island in zip(range(first, trials), islands, strict=False):
            proposal = island.ask()
            prediction = self._predict(proposal.plan)
            island.tell(proposal, prediction)
            trial = Trial(number=number, origin=proposal.origin, plan=proposal.plan, prediction=prediction)
            yield msgspec.json.decode(line_of(trial), type=Result)


def row(name: str, sampler: str, samplers: int, exchanging_us: list[float], independent_us: list[float]) -> str:
    """Medians and spreads over the seeds, and in how many of them independent samplers found a better or a worse plan."""
    median_us = statistics.median(exchanging_us)
    change_pct = (statistics.median(independent_us) / median_us - 1) * 100
    spreads_pct = [(max(times_us) / min(times_us) - 1) * 100 for times_us in (exchanging_us, independent_us)]
    pairs = list(zip(exchanging_us, independent_us, strict=True))
    better = sum(independent < exchanging * (1 - _EQUAL) for exchanging, independent in pairs)
    worse = sum(independent > exchanging * (1 + _EQUAL) for exchanging, independent in pairs)
    islands, independent = f"{median_us / 1e3:.2f} ({spreads_pct[0]:.2f})", f"{change_pct:+.2f} ({spreads_pct[1]:.2f})"
    return f"| {name} | {sampler} | {samplers} | {islands} | {independent} | {better} / {worse} |"


def main() -> None:
    """Search a job in both ways with 2 and 4 samplers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--samplers", default="auto,mcmc", help="default: %(default)s")
    parser.add_argument("--trials", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=20, help="default: %(default)s")
    arguments = parser.parse_args()
    searches = Searches(opened(arguments.name))
    print("| job | sampler | samplers | islands, ms (spread, %) | independent, % (spread, %) | better / worse |")
    print("|---|---|---:|---:|---:|---:|")
    for sampler in arguments.samplers.split(","):
        for samplers in (2, 4):
            exchanging_us, independent_us = (
                [searches.best_us(sampler, seed, samplers, arguments.trials, exchange=exchange) for seed in range(arguments.seeds)]
                for exchange in (True, False)
            )
            print(row(arguments.name, sampler, samplers, exchanging_us, independent_us), flush=True)


if __name__ == "__main__":
    main()
