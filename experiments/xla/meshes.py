"""How good the plan is that a search finds with ten compilations: `python -m experiments.xla.meshes CAPTURED`.

CAPTURED is a folder of ``dpro-search capture --jax`` (of `llama_step.py` or `gpt_step.py`, say). All combinations of meshes with
its axes and values of its choices are compiled and replayed; they are kept as a search keeps them. Then the search is followed
from each of them that runs as the point to begin with.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

from dpro_search.kinds import job_of, load_source
from dpro_search.kinds.xla.job import XlaObjective
from dpro_search.kinds.xla.order import MOST_COMPILED, CompileOrder, StepParts
from dpro_search.kinds.xla.plans import Choices, Point, choices_of

CLOSE = 1.02  # times the best step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captured", type=Path)
    here = job_of(load_source(parser.parse_args().captured))
    objective = here.objective()
    assert isinstance(objective, XlaObjective), "a compiled program"
    choices = choices_of(objective.job.source.facts)
    everything: dict[Point, StepParts | None] = {}
    for point in CompileOrder(objective.job.captured, choices).points:
        everything[point] = parts = objective.parts(point)
        print(f"{point!s:56} {'does not run' if parts is None else f'{parts.total_us / 1e3:10.2f} ms'}", flush=True)
    steps_us = {point: parts.total_us for point, parts in everything.items() if parts is not None}
    best = min(steps_us, key=steps_us.__getitem__)
    ratios = [reached_us(begin, choices, everything) / steps_us[best] for begin in steps_us]
    close = sum(ratio <= CLOSE for ratio in ratios)
    print(f"the best is {best}; {len(steps_us)} of {len(everything)} points run")
    print(f"{MOST_COMPILED} compilations reach {sum(ratios) / len(ratios):.3f} times the best step in the mean,")
    print(f"{max(ratios):.3f} times at most, and at most {CLOSE:g} times from {close} of {len(ratios)} points to begin with")


def reached_us(begin: Point, choices: Choices, everything: Mapping[Point, StepParts | None]) -> float:
    """The fastest step among the points that a search compiles, in us; infinite where none runs."""
    order, point = CompileOrder(begin, choices), begin
    for _ in range(MOST_COMPILED):
        order.tell(point, everything[point])
        following = order.ask()
        if following is None:
            break
        point = following
    return math.inf if order.best is None else order.best[1]


if __name__ == "__main__":
    main()
