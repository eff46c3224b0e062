"""Metropolis chains over explicit tensor groups."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import CommSettings, TensorInfo
from dpro_search.search.samplers._base import CYCLE_RANGE_US, HOROVOD_DEFAULT, Proposal, Sampler, as_change, rounded_cycle_us
from dpro_search.space.moves import Grouping, canonical, contiguous_groups, propose, threshold_groups
from dpro_search.space.plan import Plan, Prediction

_HOT, _COLD = 0.02, 0.0002  # first and last temperature of a round, relative to the best iteration time
_FIRST_ROUND = 32  # steps of a chain's first round; each further round is twice as long
_MOST_START_GROUPS = 32
_FRESH_ATTEMPTS = 16  # steps to states that were priced before cost no trial, up to so many in a row
_CYCLE_SHARE = 0.1  # of the proposals change the cycle time
_CYCLE_BACK_SHARE = 0.2  # of those go back to the recorded one


@dataclass(frozen=True)
class _State:
    groups: Grouping
    cycle_us: float | None  # None: as recorded


@dataclass
class _Chain:
    """One walk. `value_us` is infinite until its start has been priced."""

    rng: np.random.Generator
    state: _State
    value_us: float = math.inf
    step: int = 0  # within the round
    round_steps: int = _FIRST_ROUND

    def temperature(self) -> float:
        """Relative to the best: from hot to cold, geometrically, within each round."""
        return _HOT * float((_COLD / _HOT) ** (self.step / self.round_steps))


class McmcSampler(Sampler):
    """Several annealed Metropolis walks, taking turns.

    One chain starts from the recorded setting (dynamic fusion is taken as groups filled up to the threshold), the others from
    contiguous groups, few to many, by turns with the library's default cycle time. A proposal makes one or a few moves of
    `space.moves.propose`, or changes the cycle time; it is accepted with probability
    min(1, exp(-(new - old) / (temperature * best))) on the iteration time [1]_. Temperature falls within a round and rises
    again in the next one, which starts from the best state of all chains and is twice as long: the schedule needs no number of
    trials, and long searches do not freeze. A step to a state priced before costs no trial. Where several plans are priced at a
    time, a chain whose turn comes before it was told steps from where it stands, as if the open step were going to be rejected; the
    step that is told is accepted or rejected against where the chain stands by then.

    References
    ----------
    .. [1] Metropolis et al., "Equation of State Calculations by Fast Computing Machines", 1953; for annealing, Kirkpatrick et
       al., "Optimization by Simulated Annealing", 1983.
    """

    name = "mcmc"

    def __init__(self, tensors: Sequence[TensorInfo], recorded: CommSettings, rng: np.random.Generator, *, chains: int = 4) -> None:
        super().__init__(tensors, recorded, rng)
        self._position = {tensor.name: i for i, tensor in enumerate(self.tensors)}
        counts = np.geomspace(1, min(_MOST_START_GROUPS, len(self.tensors)), max(chains - 1, 1)).round().astype(int)
        starts = [self._state_of(Plan())]
        default_us = as_change(HOROVOD_DEFAULT, recorded).cycle_time_us
        cycles_us = itertools.cycle((default_us, None))
        starts += [_State(contiguous_groups(self.tensors, int(n)), us) for n, us in zip(counts, cycles_us, strict=False)]
        self._chains = [_Chain(stream, start) for stream, start in zip(rng.spawn(chains), starts, strict=False)]
        self._turn = 0
        self._offers: deque[_State] = deque()
        self._asked: deque[tuple[_Chain, _State]] = deque()  # open asks, the oldest first
        self._known: dict[_State, float] = {}
        self._best = self._chains[0].state
        self._best_us = math.inf

    def ask(self) -> Proposal:
        chain, state = self._next_step()
        on_its_way = {asked for _, asked in self._asked}
        for _ in range(_FRESH_ATTEMPTS):
            if state in self._known:
                self._walk(chain, state, self._known[state])
            elif state not in on_its_way:
                break
            chain, state = self._next_step()
        self._asked.append((chain, state))
        plan = Plan(tensor_groups=state.groups, cycle_time_us=state.cycle_us)
        return Proposal(as_change(plan, self.recorded), self.name)

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        assert self._asked, "tell without ask"
        chain, state = self._asked.popleft()
        self._known[state] = prediction.iteration_us
        self._walk(chain, state, prediction.iteration_us)

    def observe(self, plan: Plan, prediction: Prediction) -> None:
        """A plan better than all chains is offered to the worst of them; its groups may be a guess, so are priced first."""
        if prediction.iteration_us < self._best_us and plan != Plan():
            self._offers.append(self._state_of(plan))

    def _next_step(self) -> tuple[_Chain, _State]:
        if self._offers and not any(math.isinf(chain.value_us) for chain in self._chains):
            return max(self._chains, key=lambda chain: chain.value_us), self._offers.popleft()
        chain = self._chains[self._turn]
        self._turn = (self._turn + 1) % len(self._chains)
        first = math.isinf(chain.value_us) and all(asked is not chain for asked, _ in self._asked)
        return chain, chain.state if first else self._neighbour(chain)

    def _walk(self, chain: _Chain, state: _State, value_us: float) -> None:
        """Accept or reject, and begin the next round when this one is over."""
        if value_us < self._best_us:
            self._best, self._best_us = state, value_us
        rise = (value_us - chain.value_us) / self._best_us
        if rise <= 0 or chain.rng.random() < math.exp(-rise / chain.temperature()):
            chain.state, chain.value_us = state, value_us
        chain.step += 1
        if chain.step == chain.round_steps:
            chain.state, chain.value_us = self._best, self._best_us
            chain.step, chain.round_steps = 0, 2 * chain.round_steps

    def _neighbour(self, chain: _Chain) -> _State:
        state, rng = chain.state, chain.rng
        if len(self.tensors) == 1 or rng.random() < _CYCLE_SHARE:
            return _State(state.groups, self._other_cycle_us(state.cycle_us, rng))
        groups = state.groups
        for _ in range(rng.geometric(0.6)):
            groups = propose(groups, self._position, rng)
        return _State(groups, state.cycle_us)

    def _other_cycle_us(self, cycle_us: float | None, rng: np.random.Generator) -> float | None:
        if cycle_us is not None and rng.random() < _CYCLE_BACK_SHARE:
            return None
        now_us = max(cycle_us or self.recorded.cycle_time_us, CYCLE_RANGE_US[0])
        return rounded_cycle_us(now_us * math.exp(rng.normal(0.0, 1.0)))

    def _state_of(self, plan: Plan) -> _State:
        groups = plan.tensor_groups
        if groups is None and plan.fusion_threshold_bytes is None:
            groups = self.recorded.groups
        if groups is None:
            threshold_bytes = plan.fusion_threshold_bytes
            groups = threshold_groups(
                self.tensors, self.recorded.fusion_threshold_bytes if threshold_bytes is None else threshold_bytes
            )
        named = {name for group in groups for name in group}
        alone = tuple((tensor.name,) for tensor in self.tensors if tensor.name not in named)
        return _State(canonical((*groups, *alone), self._position), plan.cycle_time_us)
