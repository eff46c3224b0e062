"""Metropolis chains over whole plans."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from dpro_search.search.samplers._base import Proposal, Sampler, cost_us
from dpro_search.search.samplers._guide import Guide, hot_tensors
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import PlanSpace

_HOT, _COLD = 0.02, 0.0002  # first and last temperature of a round, relative to the best iteration time
_FIRST_ROUND = 32  # steps of a chain's first round; each further round is twice as long
_FRESH_ATTEMPTS = 16  # steps to known states are no trials, up to so many in a row
_GUIDED_SHARE = 0.5  # of the proposals change tensors on the critical path, if there is a guide
_GUIDE_EVERY = 8  # steps of a chain between two updates of its critical path


@dataclass
class _Chain:
    """One walk. `value_us` is infinite until its start has been evaluated."""

    rng: np.random.Generator
    state: Plan
    value_us: float = math.inf
    step: int = 0  # within the round
    round_steps: int = _FIRST_ROUND
    hot: dict[str, float] = field(default_factory=dict)  # time on its critical path, by tensor
    hot_of: Plan | None = None  # the state of `hot`
    steps_to_update: int = 0  # of `hot`

    def temperature(self) -> float:
        """Relative to the best: from hot to cold, geometrically, within each round."""
        return _HOT * float((_COLD / _HOT) ** (self.step / self.round_steps))


class McmcSampler(Sampler):
    """Several annealed Metropolis walks, interleaved.

    One chain starts from the recorded setting, the others from plans spread over the space. A proposal is a neighbour in the
    space; it is accepted with probability min(1, exp(-(new - old) / (temperature * best))) on the iteration time [1]_.
    Temperature falls within a round and rises again in the next one, which starts from the best state of all chains and is twice
    as long: the schedule needs no number of trials, and long searches keep exploring. Chains are at different temperatures,
    because they begin at different times. With a guide, half of the proposals change tensors on the critical path. A step to a
    known state is no trial. If several plans are evaluated at a time, a chain may propose again before it receives a result: from
    its current state, as if the open step would be rejected. A result is accepted or rejected against the state of the chain at
    that time.

    References
    ----------
    .. [1] Metropolis et al., "Equation of State Calculations by Fast Computing Machines", 1953; for annealing, Kirkpatrick et
       al., "Optimization by Simulated Annealing", 1983.
    """

    name: ClassVar[str] = "mcmc"

    def __init__(self, space: PlanSpace, rng: np.random.Generator, guide: Guide | None = None, *, chains: int = 4) -> None:
        super().__init__(space, rng, guide)
        self._chains = [_Chain(stream, start) for stream, start in zip(rng.spawn(chains), space.starts(chains), strict=True)]
        self._next_chain = 0
        self._offers: deque[Plan] = deque()
        self._open: deque[tuple[_Chain, Plan]] = deque()  # open proposals, the oldest first
        self._known: dict[Plan, float] = {}
        self._best = self._chains[0].state
        self._best_us = math.inf

    def ask(self) -> Proposal:
        chain, state = self._next_step()
        open_states = {state for _, state in self._open}
        for _ in range(_FRESH_ATTEMPTS):
            if state in self._known:
                self._walk(chain, state, self._known[state])
            elif state not in open_states:
                break
            chain, state = self._next_step()
        self._open.append((chain, state))
        return Proposal(self.space.simplest(state), self.name)

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        assert self._open, "tell without ask"
        chain, state = self._open.popleft()
        self._known[state] = cost_us(prediction)
        self._walk(chain, state, self._known[state])

    def observe(self, plan: Plan, prediction: Prediction) -> None:
        """Offer a plan that is better than all chains to the worst chain; it is evaluated first, with all fields written out."""
        if cost_us(prediction) < self._best_us and plan != Plan():
            self._offers.append(self.space.detailed(plan))

    def _next_step(self) -> tuple[_Chain, Plan]:
        if self._offers and not any(math.isinf(chain.value_us) for chain in self._chains):
            return max(self._chains, key=lambda chain: chain.value_us), self._offers.popleft()
        chain = self._chains[self._next_chain]
        self._next_chain = (self._next_chain + 1) % len(self._chains)
        first = math.isinf(chain.value_us) and all(other is not chain for other, _ in self._open)
        return chain, chain.state if first else self._neighbour(chain)

    def _walk(self, chain: _Chain, state: Plan, value_us: float) -> None:
        """Accept or reject a step, and begin the next round when this one is over."""
        if value_us < self._best_us:
            self._best, self._best_us = state, value_us
        rise = (value_us - chain.value_us) / self._best_us
        if rise <= 0 or chain.rng.random() < math.exp(-rise / chain.temperature()):
            chain.state, chain.value_us = state, value_us
        chain.step += 1
        if chain.step == chain.round_steps:
            chain.state, chain.value_us = self._best, self._best_us
            chain.step, chain.round_steps = 0, 2 * chain.round_steps

    def _neighbour(self, chain: _Chain) -> Plan:
        hot = self._hot(chain) if self.guide is not None and chain.rng.random() < _GUIDED_SHARE else None
        return self.space.propose(chain.state, chain.rng, hot)

    def _hot(self, chain: _Chain) -> dict[str, float]:
        """The critical path of a state near the chain's: an update costs a replay, and changes little within a few steps."""
        assert self.guide is not None, "only called with a guide"
        chain.steps_to_update -= 1
        if chain.steps_to_update < 0 and chain.hot_of != chain.state:
            chain.hot, chain.hot_of = hot_tensors(self.guide.exchanges(chain.state)), chain.state
            chain.steps_to_update = _GUIDE_EVERY
        return chain.hot
