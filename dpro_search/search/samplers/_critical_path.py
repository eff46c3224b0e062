"""dPRO's search: join and cut collectives along the critical path."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from dpro_search.errors import InputError
from dpro_search.search.samplers._base import Proposal, Sampler, cost_us
from dpro_search.search.samplers._cuts import best_cuts, late_cuts
from dpro_search.search.samplers._guide import (
    Guide,
    collective_us,
    cut,
    fitted_sync_time,
    hot_tensors,
    joined,
    parts_of,
    single_parts,
    to_a_nanosecond,
)
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import PlanSpace

_FRESH_ATTEMPTS = 16
_PATIENCE = 24  # steps from a plan without improvement, before the next starting point
_MOST_STARTS = 16
_CUTS = 3  # best groupings that are tried: the linear cost of collectives is approximate
_COMMUNICATION = ("fusion_threshold_bytes", "tensor_groups", "cycle_time_us")


class CriticalPathSampler(Sampler):
    """A descent along the critical path of the best plan.

    The replay of the best plan gives the times at which tensors are ready and the durations of collectives. From these follow
    complete plans, each also with the recorded cycle time: collectives joined or cut wherever that makes them end earlier (dPRO's
    theorems, see `_guide.py`), the groups of neighbours that end first, and groups that end as early but begin late (dynamic
    programming, see `_cuts.py`). Cost models of compute give more plans, for example clusters of ops wherever fusion gains time
    (Theorem 1). If none is better, single moves of tensors on the critical path follow. If these do not help, the search
    continues from the next of the space's starting points, and after the last one from the best plan.
    """

    name: ClassVar[str] = "critical-path"

    def __init__(self, space: PlanSpace, rng: np.random.Generator, guide: Guide | None = None) -> None:
        super().__init__(space, rng, guide)
        if guide is None:
            raise InputError(
                f"sampler '{self.name}': {space.job.name} has no tensor fusion, which this sampler changes; choose another"
            )
        self._size_bytes = {tensor.name: tensor.size_bytes for tensor in space.job.tensors}
        self._guide = guide
        self._starts = deque(space.starts(_MOST_STARTS))
        self._centre: Plan = self._starts.popleft()  # with all fields; the plan that is being improved
        self._centre_us = math.inf
        self._hot: dict[str, float] = {}
        self._queue: deque[Plan] = deque([self._centre])
        self._without_gain = 0  # results in a row that did not improve the centre
        self._open: deque[Plan] = deque()  # open proposals, the oldest first, with all fields
        self._known: dict[Plan, float] = {}  # costs of simplest plans; infinite while open
        self._best: tuple[float, Plan] = (math.inf, self._centre)
        self._optimised: set[Plan] = set()  # plans without communication for which the cost models were evaluated

    def ask(self) -> Proposal:
        plan = self._next()
        for _ in range(_FRESH_ATTEMPTS):
            if self.space.simplest(plan) not in self._known:
                break
            plan = self._next()
        simplest = self.space.simplest(plan)
        self._known.setdefault(simplest, math.inf)
        self._open.append(plan)
        return Proposal(simplest, self.name)

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        assert self._open, "tell without ask"
        plan, value_us = self._open.popleft(), cost_us(prediction)
        self._known[proposal.plan] = value_us
        self._take(plan, value_us)

    def observe(self, plan: Plan, prediction: Prediction) -> None:
        """Evaluate a better plan with all fields written out: their values may be estimates."""
        if cost_us(prediction) < self._best[0]:
            self._queue.appendleft(self.space.detailed(plan))

    def _take(self, plan: Plan, value_us: float) -> None:
        if value_us < self._best[0]:
            self._best = (value_us, plan)
        if value_us < self._centre_us:
            self._descend_from(plan, value_us)
            return
        self._without_gain += 1
        if self._without_gain >= _PATIENCE and not self._queue:
            self._without_gain = 0
            if self._starts:
                self._centre, self._centre_us = self._starts.popleft(), math.inf
                self._queue.append(self._centre)
            elif self._centre_us > self._best[0]:
                self._descend_from(self._best[1], self._best[0])

    def _descend_from(self, plan: Plan, value_us: float) -> None:
        """Make a plan the centre, and queue the plans that follow from its replay."""
        self._centre, self._centre_us, self._without_gain = plan, value_us, 0
        self._queue.clear()
        self._queue.extend(self._suggested(plan))

    def _suggested(self, plan: Plan) -> Iterator[Plan]:
        exchanges = to_a_nanosecond(self._guide.exchanges(plan))
        self._hot = hot_tensors(exchanges)
        if exchanges:
            sync, singles = fitted_sync_time(exchanges), single_parts(exchanges, self._size_bytes)
            for groups in (
                *(best_cut.groups for best_cut in best_cuts(singles, sync)[:_CUTS]),
                *late_cuts(singles, sync),
                joined(parts_of(exchanges), sync),
                cut(exchanges, self._size_bytes, sync),
            ):
                suggested = self.space.detailed(plan.changed(tensor_groups=groups))
                yield suggested
                if plan.get("cycle_time_us") is not None:
                    yield suggested.changed(cycle_time_us=None)
        compute = plan.changed(**dict.fromkeys(_COMMUNICATION))
        if compute not in self._optimised:  # the cost models of compute do not depend on communication
            self._optimised.add(compute)
            for delays_us in (collective_us(exchanges), {}):  # the cost of a late gradient is between these
                for transformation in self.space.transformations:
                    better = transformation.suggested(plan, delays_us)
                    if better is not None:
                        yield better

    def _next(self) -> Plan:
        return self._queue.popleft() if self._queue else self.space.propose(self._centre, self.rng, self._hot)
