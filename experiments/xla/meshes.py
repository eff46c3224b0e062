"""How good the mesh is that a search finds with ten compilations: `python -m experiments.xla.meshes CAPTURED`.

CAPTURED is a folder of ``dpro-search capture --jax`` (of `llama_step.py`, say). All meshes with its axes are compiled and
replayed; they are kept as a search keeps them. Then the search is followed from each of them as the mesh to begin with.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

from dpro_search.kinds import job_of, load_source
from dpro_search.kinds.xla.job import XlaObjective
from dpro_search.kinds.xla.meshes import MOST_COMPILED, StepParts, in_order, mesh_text, meshes

CLOSE = 1.02  # times the best step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captured", type=Path)
    here = job_of(load_source(parser.parse_args().captured))
    objective = here.objective()
    assert isinstance(objective, XlaObjective), "a compiled program"
    everything: dict[str, StepParts | None] = {}
    for mesh in meshes(objective.job.source.facts.mesh):
        everything[mesh_text(mesh)] = parts = objective.parts(mesh)
        print(f"{mesh_text(mesh):36} {'does not run' if parts is None else f'{total_us(parts) / 1e3:10.2f} ms'}", flush=True)
    best_us = min(total_us(parts) for parts in everything.values())
    ratios = [reached(begin, everything) / best_us for begin in meshes(objective.job.source.facts.mesh)]
    close = sum(ratio <= CLOSE for ratio in ratios)
    mean = sum(ratios) / len(ratios)
    print(f"{MOST_COMPILED} of {len(everything)} meshes compiled: a search reaches {mean:.3f} times the best step in the mean,")
    print(f"{max(ratios):.3f} times at most, and at most {CLOSE:g} times from {close} of {len(ratios)} meshes to begin with")


def reached(begin: Mapping[str, int], everything: Mapping[str, StepParts | None]) -> float:
    """The fastest step among the meshes that a search compiles, in us."""
    compiled = [begin, *in_order(begin, lambda mesh: everything[mesh_text(mesh)])]
    return min(total_us(everything[mesh_text(mesh)]) for mesh in compiled)


def total_us(parts: StepParts | None) -> float:
    """A step, from its parts; infinite where the mesh does not run."""
    return math.inf if parts is None else parts[0] + sum(parts[1].values())


if __name__ == "__main__":
    main()
