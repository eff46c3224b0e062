"""Table: how near samplers come to the best plan of all at equal processor time, on recordings and on what-if links of theirs.

    python -m experiments.search.samplers OUT.jsonl [NAME=TRACE[@RATE] ...] [--seconds 1] [--seeds 5]

Every case is searched by every sampler with every seed. What counts is the processor time of proposing and of replaying; loading
and compiling do not. A plan that another search of the case has had replayed is not replayed again, but counts for what its
replay took.
"random" draws the outer knobs evenly. A search ends early when it proposes nothing new any more.

Cases are appended to OUT.jsonl as they end, and those that are in it are not searched again; the table is of all of them.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from benchmarks.measure import machine
from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError
from dpro_search.kinds import job_of
from dpro_search.kinds.byteps.job import Byteps
from dpro_search.kinds.ddp.job import Ddp
from dpro_search.kinds.horovod.job import Horovod
from dpro_search.kinds.kvstore.job import Kvstore
from dpro_search.quantities import parse_rate_bps
from dpro_search.replay.exchanges import Exchange
from dpro_search.search.objective import Objective
from dpro_search.search.samplers import SAMPLERS, Guide, Proposal, Sampler, sampler_for
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import ClusterChange, Scenario
from dpro_search.space.transformations import PlanSpace

ALL = (*SAMPLERS, "random")
_ATTEMPTS = 64  # at a plan that is legal and new, of random draws
_BARREN = 200  # proposals in a row that the search has priced already, after which it has ended
_CLOSE_PCT = 1.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """The searches of one job: the least iteration time that each found, and its trials, by sampler, [seeds]."""

    name: str
    seconds: float
    recorded_us: float
    found_us: dict[str, list[float]]
    trials: dict[str, list[int]]

    @property
    def best_us(self) -> float:
        """The least of all."""
        return min(min(found) for found in self.found_us.values())

    def gaps_pct(self, sampler: str) -> list[float]:
        """How far a sampler's searches are from the best of all, [seeds]; empty where it does not apply."""
        return [(us / self.best_us - 1) * 100 for us in self.found_us.get(sampler, [])]


class RandomSampler(Sampler):
    """Draws every grid of every choice with equal probability, and every point of the grid."""

    name: ClassVar[str] = "random"

    def __init__(self, space: PlanSpace, rng: np.random.Generator, guide: Guide | None = None) -> None:
        super().__init__(space, rng, guide)
        self._known: set[Plan] = set()

    def ask(self) -> Proposal:
        plan = Plan()
        for _ in range(_ATTEMPTS):
            plan = self._drawn()
            if plan not in self._known and self.space.refusal(plan) is None:
                break
        self._known.add(plan)
        return Proposal(plan, self.name)

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        pass

    def observe(self, plan: Plan, prediction: Prediction) -> None:
        self._known.add(plan)

    def _drawn(self) -> Plan:
        plan = Plan()
        for choice in self.space.choices:
            grid = list(choice.grids)[self.rng.integers(len(choice.grids))]
            plan = choice.put(plan, grid, int(self.rng.integers(len(choice.grids[grid]))))
        return self.space.simplest(plan)


class Charged:
    """Prices of a job, each replayed once, with a clock that counts what all the replays of a search take."""

    def __init__(self, prices: Objective, clock: Callable[[], float] = time.process_time) -> None:
        self.space = prices.space
        self._prices = prices
        self._clock = clock
        self._known: dict[tuple[str, Plan], tuple[Any, float]] = {}
        self.begin()

    def begin(self) -> None:
        """Start the clock of a search, which has not replayed anything yet."""
        self._open: set[tuple[str, Plan]] = set()
        self._owed_s = 0.0
        self._started_s = self._clock()

    @property
    def spent_s(self) -> float:
        """Processor time of this search so far."""
        return self._clock() - self._started_s + self._owed_s

    @property
    def guide(self) -> Guide | None:
        """What replays for samplers, if the job has it; its replays count as well."""
        return self if callable(getattr(self._prices, "exchanges", None)) else None

    def predict(self, plan: Plan) -> Prediction:
        """The price of a plan."""
        found: Prediction = self._charged("predict", plan, self._prices.predict)
        return found

    def exchanges(self, plan: Plan) -> tuple[Exchange, ...]:
        """The collectives under a plan."""
        found: tuple[Exchange, ...] = self._charged("exchanges", plan, getattr(self._prices, "exchanges"))  # noqa: B009
        return found

    def _charged(self, what: str, plan: Plan, replayed: Callable[[Plan], Any]) -> Any:
        key = what, plan
        if key not in self._known:
            started_s = self._clock()
            value = replayed(plan)
            self._known[key] = value, self._clock() - started_s
        elif key not in self._open:
            self._owed_s += self._known[key][1]
        self._open.add(key)
        return self._known[key][0]


def prices_of(trace: Trace, rate: str | None) -> Objective:
    """Prices of a recorded job's plans, on links of another rate where one is named."""
    if rate is None:
        return job_of(trace).objective()
    rate_bps, recorded = parse_rate_bps(rate), job_of(trace)
    if isinstance(recorded.job, Horovod | Ddp | Kvstore | Byteps):
        links = ClusterChange(rate_bps=math.inf if rate_bps is None else rate_bps)
        return recorded.under(Scenario(cluster=links))[0].objective()
    raise InputError(f"{trace.meta.format}: what such a job would do at another rate is not asked here")


def searched(name: str, prices: Objective, seconds: float, seeds: int, samplers: Sequence[str] = ALL) -> Case:
    """One case: all samplers and seeds, in turn."""
    charged = Charged(prices)
    _warm_up(prices)
    found: dict[str, list[float]] = defaultdict(list)
    trials: dict[str, list[int]] = defaultdict(list)
    for seed in range(seeds):
        for sampler_name in samplers:
            if sampler_name == "critical-path" and charged.guide is None:
                continue
            us, count = search(charged, sampler_name, seed, seconds)
            found[sampler_name].append(us)
            trials[sampler_name].append(count)
    recorded_us = prices.predict(Plan()).iteration_us
    return Case(name=name, seconds=seconds, recorded_us=recorded_us, found_us=dict(found), trials=dict(trials))


def search(prices: Charged, sampler_name: str, seed: int, seconds: float) -> tuple[float, int]:
    """The least iteration time that a sampler finds in some processor time, and how many plans it had priced."""
    prices.begin()
    if sampler_name == RandomSampler.name:
        sampler: Sampler = RandomSampler(prices.space, np.random.default_rng(seed))
    else:
        sampler = sampler_for(prices.space, sampler_name, seed, prices.guide)
    prediction = prices.predict(Plan())
    sampler.observe(Plan(), prediction)
    best_us, tried, barren = prediction.iteration_us, {Plan()}, 0
    while barren < _BARREN:
        proposal = sampler.ask()
        prediction = prices.predict(proposal.plan)
        if prices.spent_s > seconds:
            break
        sampler.tell(proposal, prediction)
        best_us = min(best_us, prediction.iteration_us)
        barren = barren + 1 if proposal.plan in tried else 0
        tried.add(proposal.plan)
    return best_us, len(tried)


def _warm_up(prices: Objective) -> None:
    """Have everything compiled, and what a job prepares once prepared."""
    import optuna

    optuna.create_study()
    for plan in prices.space.starts(2):
        prices.predict(plan)
        if callable(exchanges := getattr(prices, "exchanges", None)):
            exchanges(plan)


def table(cases: Sequence[Case]) -> str:
    """Gaps in per cent, median (worst) over the seeds, and trials of `auto`; last, how often each sampler was near the best."""
    lines = [
        "| case | recorded, ms | best | " + " | ".join(ALL) + " | trials of auto |",
        "|---|---:|---:|" + "---:|" * (len(ALL) + 1),
    ]
    for case in cases:
        gaps = [case.gaps_pct(sampler) for sampler in ALL]
        shown = [f"{np.median(gap):.2f} ({max(gap):.2f})" if gap else "-" for gap in gaps]
        recorded = f"{case.recorded_us / 1e3:.1f} | {case.recorded_us / case.best_us:.3f}x"
        lines.append(f"| {case.name} | {recorded} | " + " | ".join(shown) + f" | {np.median(case.trials['auto']):.0f} |")
    near = []
    for sampler in ALL:
        gaps = [gap for case in cases if (gap := case.gaps_pct(sampler))]
        close = sum(np.median(gap) <= _CLOSE_PCT for gap in gaps)
        near.append(f"{close} of {len(gaps)}, worst {max((max(gap) for gap in gaps), default=0.0):.2f}")
    lines.append("| median within 1 % | | | " + " | ".join(near) + " | |")
    return "\n".join([*lines, "", f"machine: {machine()}"])


def main() -> None:
    """Search the cases that are new, then show all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT.jsonl", type=Path)
    parser.add_argument("cases", metavar="NAME=TRACE[@RATE]", nargs="*", help="a recording, or what if its links had another rate")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each search (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="default: %(default)s")
    arguments = parser.parse_args()
    decoder = msgspec.json.Decoder(Case)
    cases = [decoder.decode(line) for line in arguments.out.read_bytes().splitlines()] if arguments.out.exists() else []
    with arguments.out.open("ab", buffering=0) as file:
        for text in arguments.cases:
            name, _, where = text.partition("=")
            folder, _, rate = where.partition("@")
            if name in {case.name for case in cases}:
                continue
            cases.append(searched(name, prices_of(Trace.load(Path(folder)), rate or None), arguments.seconds, arguments.seeds))
            file.write(msgspec.json.encode(cases[-1]) + b"\n")
    print(table(cases))


if __name__ == "__main__":
    main()
