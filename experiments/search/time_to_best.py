"""How soon a search is within 1 % of the best that it finds in a long time: BERT-base, 16 workers, rings message by message.

    python -m experiments.search.time_to_best [--seconds 3600] [--sampler auto] [--seeds 3] [--json]

The time counts from the start of the search, the preparation of the job included. Every seed has the whole time; the best
is that of all of them.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from benchmarks.measure import machine
from benchmarks.search_jobs import bert, ring
from dpro_search.replay.data_parallel_predictor import DataParallelPredictor
from dpro_search.search.samplers import SAMPLERS, sampler_for
from dpro_search.space.plan import Plan

_CLOSE = 1.01


def improvements(sampler_name: str, seed: int, seconds: float) -> tuple[list[tuple[float, float]], int]:
    """When a search found better plans, and their prices; and how many plans it priced."""
    started = time.perf_counter()
    predictor = DataParallelPredictor(ring(bert()))
    sampler = sampler_for(predictor.space, sampler_name, seed, predictor)
    baseline = predictor.predict(Plan())
    sampler.observe(Plan(), baseline)
    found = [(time.perf_counter() - started, baseline.iteration_us)]
    plans = 1
    while (now := time.perf_counter() - started) < seconds:
        proposal = sampler.ask()
        prediction = predictor.predict(proposal.plan)
        sampler.tell(proposal, prediction)
        plans += 1
        if prediction.iteration_us < found[-1][1]:
            found.append((now, prediction.iteration_us))
    return found, plans


def main() -> None:
    """Search with every seed, then say how soon each was close to the best of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of each search (default: %(default)s)")
    parser.add_argument("--sampler", choices=SAMPLERS, default="auto")
    parser.add_argument("--seeds", type=int, default=3, help="how many searches (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    searches = [improvements(arguments.sampler, seed, arguments.seconds) for seed in range(arguments.seeds)]
    best_us = min(found[-1][1] for found, _ in searches)
    close_s = [next((seconds for seconds, us in found if us <= _CLOSE * best_us), None) for found, _ in searches]
    result: dict[str, Any] = {
        "sampler": arguments.sampler,
        "seconds": arguments.seconds,
        "plans": [plans for _, plans in searches],
        "recorded_us": searches[0][0][0][1],
        "best_us": best_us,
        "seconds_to_within_1_pct": close_s,
        "machine": machine(),
    }
    if arguments.json:
        print(json.dumps(result))
        return
    shown = ", ".join("never" if seconds is None else f"{seconds:.1f} s" for seconds in close_s)
    gain = result["recorded_us"] / best_us
    print(f"{arguments.sampler}: within 1 % of the best after {shown}; {gain:.2f}x faster than every tensor alone")
    print(f"plans priced: {', '.join(map(str, result['plans']))}; machine: {result['machine']}")


if __name__ == "__main__":
    main()
