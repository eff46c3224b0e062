"""A portfolio: every sampler gets a share, the one that is winning gets more."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np

from dpro_search.search.samplers._base import Proposal, Sampler, price_us
from dpro_search.search.samplers._critical_path import CriticalPathSampler
from dpro_search.search.samplers._guide import Guide
from dpro_search.search.samplers._mcmc import McmcSampler
from dpro_search.search.samplers._optuna import OptunaSampler
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import PlanSpace

_BLOCK = 12  # trials that a sampler gets at a time
_MEMORY = 0.5  # how much of a sampler's earlier gains still counts after each of its blocks
_GAIN_DIGITS = 4  # smaller gains count as none
_FRESH_ATTEMPTS = 8  # proposals of a member that another one had priced, which cost no trial
_LOSER_EVERY = 4  # every so many blocks go to the sampler with the fewest trials


@dataclass
class _Member:
    sampler: Sampler
    trials: int = 0
    gain: float = 1.0  # discounted relative improvement of the portfolio's best; at first what no block can reach


@dataclass
class _Block:
    """Trials that a member gets in a row."""

    member: _Member
    start_us: float  # the portfolio's best when the block began
    to_ask: int = _BLOCK
    to_tell: int = _BLOCK


class AutoSampler(Sampler):
    """Optuna over the outer knobs, Metropolis chains over whole plans and, with a guide, the critical path.

    First come the space's default plans. Then members get blocks of trials: first one each, then the member whose blocks lately
    improved the best plan most, with every fourth block for the one that had fewest trials. After a block, a new best plan is
    shown to the other members, and tried without its cycle time, which it may owe to chance.
    """

    name: ClassVar[str] = "auto"

    def __init__(self, space: PlanSpace, rng: np.random.Generator, guide: Guide | None = None) -> None:
        super().__init__(space, rng, guide)
        outer, inner, path = rng.spawn(3)
        self._members = [_Member(OptunaSampler(space, outer)), _Member(McmcSampler(space, inner, guide))]
        if guide is not None:
            self._members.append(_Member(CriticalPathSampler(space, path, guide)))
        self._own: deque[Plan] = deque()  # plans that the portfolio itself wants to know about
        self._wanted: set[Plan] = set()
        for plan in space.defaults:
            self._want(plan)
        self._asked: deque[_Block | None] = deque()  # whose the open asks are, the oldest first; None: the portfolio's own
        self._known: dict[Plan, Prediction] = {}
        self._block: _Block | None = None
        self._blocks = 0
        self._best: tuple[Plan, Prediction] | None = None
        self._finder: _Member | None = None  # who found the best plan, if a member did
        self._shown: Plan | None = None

    def ask(self) -> Proposal:
        if self._own:
            self._asked.append(None)
            return Proposal(self._own.popleft(), self.name)
        if self._block is None or self._block.to_ask == 0:
            self._block = self._next_block()
        self._block.to_ask -= 1
        proposal = self._fresh(self._block.member)
        self._asked.append(self._block)
        return proposal

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        assert self._asked, "tell without ask"
        block = self._asked.popleft()
        if block is None:
            self.observe(proposal.plan, prediction)
            return
        self._note(proposal.plan, prediction, block.member)
        block.member.sampler.tell(proposal, prediction)
        block.member.trials += 1
        block.to_tell -= 1
        if block.to_tell == 0:
            self._end(block)

    def observe(self, plan: Plan, prediction: Prediction) -> None:
        self._note(plan, prediction, None)
        for member in self._members:
            member.sampler.observe(plan, prediction)

    def _fresh(self, member: _Member) -> Proposal:
        """A member's next proposal; it is told at once what another one has had priced, if it is owed no other answer."""
        proposal = member.sampler.ask()
        if any(block is not None and block.member is member for block in self._asked):
            return proposal
        for _ in range(_FRESH_ATTEMPTS):
            if proposal.plan not in self._known:
                break
            member.sampler.tell(proposal, self._known[proposal.plan])
            proposal = member.sampler.ask()
        return proposal

    def _note(self, plan: Plan, prediction: Prediction, finder: _Member | None) -> None:
        self._known[plan] = prediction
        if price_us(prediction) < self._best_us():
            self._best, self._finder = (plan, prediction), finder
            if finder is None:  # every member gets to see such a plan at once
                self._shown = plan

    def _best_us(self) -> float:
        return math.inf if self._best is None else price_us(self._best[1])

    def _next_block(self) -> _Block:
        self._blocks += 1
        fewest_first = sorted(self._members, key=lambda member: member.trials)
        # max() takes the first of equals: without a winner, members share alike.
        winning = max(fewest_first, key=lambda member: round(member.gain, _GAIN_DIGITS))
        return _Block(fewest_first[0] if self._blocks % _LOSER_EVERY == 0 else winning, self._best_us())

    def _end(self, block: _Block) -> None:
        member = block.member
        assert self._best is not None, "a block ended without a trial"
        earlier = 0.0 if member.trials == _BLOCK else _MEMORY * member.gain
        member.gain = 1.0 - self._best_us() / block.start_us + earlier
        plan, prediction = self._best
        if plan == self._shown:
            return
        self._shown = plan
        for other in self._members:
            if other is not self._finder:
                other.sampler.observe(plan, prediction)
        if plan.cycle_time_us is not None:
            self._want(msgspec.structs.replace(plan, cycle_time_us=None))

    def _want(self, plan: Plan) -> None:
        if plan != Plan() and plan not in self._wanted:
            self._wanted.add(plan)
            self._own.append(plan)
