"""dPRO's search: join and cut collectives as the critical path says."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import ClassVar

import msgspec
import numpy as np

from dpro_search.errors import InputError
from dpro_search.search.samplers._base import Proposal, Sampler, price_us
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
)
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import PlanSpace

_FRESH_ATTEMPTS = 16
_PATIENCE = 24  # steps on the critical path of a plan, without a better one, before the next starting point is looked at
_MOST_STARTS = 16
_CUTS = 3  # of the best ones, by the number of groups, that are tried: the line through the collectives is a guess
_COMMUNICATION = ("fusion_threshold_bytes", "tensor_groups", "cycle_time_us")


class CriticalPathSampler(Sampler):
    """A descent from plan to better plan, by what the replay of the best one waits for.

    Of a plan that is the best so far, the replay tells when tensors are ready and what collectives take. From that, dPRO's theorems
    (see `_guide.py`) give whole plans: its collectives joined where that pays, and cut where that pays; and dynamic programming the
    groups of neighbours that end first, and groups that end as early but begin late (see `_cuts.py`); each also with the recorded
    cycle time. Cost models of compute give more, like clusters of ops wherever fusing pays (Theorem 1); the tensors of ops that end
    together then travel together, as the groups of the next better plan say (Theorem 3). When those are told and none was better,
    single moves follow, of what is on the critical path; when these do not help either, the next of the space's starting points is
    looked at. After the last starting point, moves go on from the best plan.
    """

    name: ClassVar[str] = "critical-path"

    def __init__(self, space: PlanSpace, rng: np.random.Generator, guide: Guide | None = None) -> None:
        super().__init__(space, rng, guide)
        if guide is None:
            raise InputError(f"sampler '{self.name}': {space.job.name} has no tensor fusion for it to decide; choose another")
        self._size_bytes = {tensor.name: tensor.size_bytes for tensor in space.job.tensors}
        self._guide = guide
        self._starts = deque(space.starts(_MOST_STARTS))
        self._centre: Plan = self._starts.popleft()  # in full; the plan that is being improved
        self._centre_us = math.inf
        self._hot: dict[str, float] = {}
        self._queue: deque[Plan] = deque([self._centre])
        self._barren = 0  # tells in a row that did not improve the centre
        self._asked: deque[Plan] = deque()  # open asks, the oldest first, in full
        self._known: dict[Plan, float] = {}  # prices of simplest plans; infinite while on the way
        self._best: tuple[float, Plan] = (math.inf, self._centre)
        self._looked_at: set[Plan] = set()  # what compute was asked to be made better, with no communication

    def ask(self) -> Proposal:
        plan = self._next()
        for _ in range(_FRESH_ATTEMPTS):
            if self.space.simplest(plan) not in self._known:
                break
            plan = self._next()
        simplest = self.space.simplest(plan)
        self._known.setdefault(simplest, math.inf)
        self._asked.append(plan)
        return Proposal(simplest, self.name)

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        assert self._asked, "tell without ask"
        plan, value_us = self._asked.popleft(), price_us(prediction)
        self._known[proposal.plan] = value_us
        self._take(plan, value_us)

    def observe(self, plan: Plan, prediction: Prediction) -> None:
        """A better plan is looked at; said in full it may be a guess, so is priced first."""
        if price_us(prediction) < self._best[0]:
            self._queue.appendleft(self.space.detailed(plan))

    def _take(self, plan: Plan, value_us: float) -> None:
        if value_us < self._best[0]:
            self._best = (value_us, plan)
        if value_us < self._centre_us:
            self._look_at(plan, value_us)
            return
        self._barren += 1
        if self._barren >= _PATIENCE and not self._queue:
            self._barren = 0
            if self._starts:
                self._centre, self._centre_us = self._starts.popleft(), math.inf
                self._queue.append(self._centre)
            elif self._centre_us > self._best[0]:
                self._look_at(self._best[1], self._best[0])

    def _look_at(self, plan: Plan, value_us: float) -> None:
        """Make a plan the centre, and queue what its replay suggests."""
        self._centre, self._centre_us, self._barren = plan, value_us, 0
        self._queue.clear()
        self._queue.extend(self._suggested(plan))

    def _suggested(self, plan: Plan) -> Iterator[Plan]:
        exchanges = self._guide.exchanges(plan)
        self._hot = hot_tensors(exchanges)
        if exchanges:
            sync, singles = fitted_sync_time(exchanges), single_parts(exchanges, self._size_bytes)
            for groups in (
                *(found.groups for found in best_cuts(singles, sync)[:_CUTS]),
                *late_cuts(singles, sync),
                joined(parts_of(exchanges), sync),
                cut(exchanges, self._size_bytes, sync),
            ):
                suggested = self.space.detailed(msgspec.structs.replace(plan, tensor_groups=groups))
                yield suggested
                if plan.cycle_time_us is not None:
                    yield msgspec.structs.replace(suggested, cycle_time_us=None)
        compute = msgspec.structs.replace(plan, **dict.fromkeys(_COMMUNICATION))
        if compute not in self._looked_at:  # cost models say the same again, whatever is communicated how
            self._looked_at.add(compute)
            for delays_us in (collective_us(exchanges), {}):  # a gradient that waits costs something between these
                for transformation in self.space.transformations:
                    better = transformation.suggested(plan, delays_us)
                    if better is not None:
                        yield better

    def _next(self) -> Plan:
        return self._queue.popleft() if self._queue else self.space.propose(self._centre, self.rng, self._hot)
