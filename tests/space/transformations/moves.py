"""Random walks over plans."""

import numpy as np

from dpro_search.space.plan import Plan
from dpro_search.space.transformations import Transformation


def names_reached(transformation: Transformation, field: str, moves: int = 200) -> set[str]:
    """The names that `field` has in a walk from the recorded setting, whose plans are all legal and as simple as they can be."""
    rng, plan, seen = np.random.default_rng(0), Plan(), set()
    for _ in range(moves):
        plan = transformation.propose(plan, rng, {})
        assert transformation.legal(plan) is None
        assert transformation.simplest(plan) == plan
        seen |= set(getattr(plan, field) or ())
    return seen
