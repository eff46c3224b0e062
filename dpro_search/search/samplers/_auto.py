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
from dpro_search.search.samplers._ladders import LadderSampler
from dpro_search.search.samplers._mcmc import McmcSampler
from dpro_search.search.samplers._optuna import OptunaSampler
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import PlanSpace

_BLOCK = 12  # trials that a sampler gets at a time
_DEAR_BLOCK = 2  # of Optuna where replays are fast: a proposal of its estimator then takes longer than half a dozen of them
_LADDERS_BLOCK = 20  # first block of line searches: about what their first places take
_MEMORY = 0.5  # how much of a sampler's earlier gains still counts after each of its blocks
_GAIN_DIGITS = 4  # smaller gains count as none
_FRESH_ATTEMPTS = 8  # proposals of a member that another one had priced, which cost no trial
_TURN_EVERY, _TURN_GROWTH = 4.0, 1.25  # blocks from one turn of the least tried to the next, and how it grows where that is in vain


@dataclass(eq=False)
class _Member:
    sampler: Sampler
    first_block: int = _BLOCK
    block: int = _BLOCK  # trials of its blocks after the first
    blocks: int = 0
    successes: int = 0  # blocks that found a better plan
    gain: float = 1.0  # discounted relative improvement of the portfolio's best; at first what no block can reach

    @property
    def success_rate(self) -> float:
        """Share of its blocks that found a better plan, one of two before there were any (Laplace's rule)."""
        return (self.successes + 1) / (self.blocks + 2)


@dataclass
class _Block:
    """Trials that a member gets in a row."""

    member: _Member
    start_us: float  # the portfolio's best when the block began
    is_turn: bool  # given to whoever had fewest
    to_ask: int
    to_tell: int


class AutoSampler(Sampler):
    """Optuna over the outer knobs, Metropolis chains over whole plans, and the critical path or, without a guide, line searches.

    First come the space's default plans. Then members get blocks of trials: first one each, then the member whose blocks lately
    improved the best plan most; where none did, the one whose blocks did so most often, so that in a long search without much
    to be found members share blocks as they have shared the finds. Now and then comes the turn of the one that had fewest,
    ever more rarely while that is in vain. Jobs with a guide are replayed faster than Optuna proposes, whose later blocks are short
    then. A member that has nothing new to ask for ends its block. After a block, a new best plan is shown to the other members, and
    tried without its cycle time, which it may owe to chance.

    Of several portfolios that share a search, the first tries the default plans, and each begins with another member: what one
    would ask for whatever its seed, others have heard of by then.
    """

    name: ClassVar[str] = "auto"

    def __init__(self, space: PlanSpace, rng: np.random.Generator, guide: Guide | None = None, *, island: int = 0) -> None:
        super().__init__(space, rng, guide)
        outer, inner, path = rng.spawn(3)
        optuna, mcmc = OptunaSampler(space, outer), McmcSampler(space, inner, guide)
        if guide is None:
            ladders = LadderSampler(space, path)
            self._members = [_Member(ladders, first_block=_LADDERS_BLOCK), _Member(mcmc), _Member(optuna)]
        else:
            self._members = [_Member(optuna, block=_DEAR_BLOCK), _Member(mcmc), _Member(CriticalPathSampler(space, path, guide))]
        first = island % len(self._members)
        self._members = self._members[first:] + self._members[:first]
        self._own: deque[Plan] = deque()  # plans that the portfolio itself wants to know about
        self._wanted: set[Plan] = set()
        for plan in space.defaults if island == 0 else ():
            self._want(plan)
        self._asked: deque[_Block | None] = deque()  # whose the open asks are, the oldest first; None: the portfolio's own
        self._known: dict[Plan, Prediction] = {}
        self._block: _Block | None = None
        self._blocks = 0
        self._turn_every = self._next_turn = _TURN_EVERY  # in blocks
        self._best: tuple[Plan, Prediction] | None = None
        self._finder: _Member | None = None  # who found the best plan, if a member did
        self._shown: Plan | None = None

    def ask(self) -> Proposal:
        if self._own:
            self._asked.append(None)
            return Proposal(self._own.popleft(), self.name)
        barren: list[_Member] = []  # that have nothing new
        while True:
            if self._block is None or self._block.to_ask == 0:
                self._block = self._next_block(barren)
            block = self._block
            proposal, known = self._proposal(block.member)
            if known is None or len(barren) + 1 == len(self._members):
                break
            block.member.sampler.tell(proposal, known)
            barren.append(block.member)
            self._cut_short(block)
        block.to_ask -= 1
        self._asked.append(block)
        return proposal

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        assert self._asked, "tell without ask"
        block = self._asked.popleft()
        if block is None:
            self.observe(proposal.plan, prediction)
            return
        self._note(proposal.plan, prediction, block.member)
        block.member.sampler.tell(proposal, prediction)
        block.to_tell -= 1
        if block.to_tell == 0:
            self._end(block)

    def observe(self, plan: Plan, prediction: Prediction) -> None:
        self._note(plan, prediction, None)
        for member in self._members:
            member.sampler.observe(plan, prediction)

    def _proposal(self, member: _Member) -> tuple[Proposal, Prediction | None]:
        """A member's next proposal, and its price if it has nothing new.

        The member is told at once what another one has had priced, unless it is owed an answer that comes first.
        """
        proposal = member.sampler.ask()
        if any(block is not None and block.member is member for block in self._asked):
            return proposal, None
        for _ in range(_FRESH_ATTEMPTS):
            if proposal.plan not in self._known:
                return proposal, None
            member.sampler.tell(proposal, self._known[proposal.plan])
            proposal = member.sampler.ask()
        return proposal, self._known.get(proposal.plan)

    def _note(self, plan: Plan, prediction: Prediction, finder: _Member | None) -> None:
        self._known[plan] = prediction
        if price_us(prediction) < self._best_us():
            self._best, self._finder = (plan, prediction), finder
            if finder is None:  # every member gets to see such a plan at once
                self._shown = plan

    def _best_us(self) -> float:
        return math.inf if self._best is None else price_us(self._best[1])

    def _next_block(self, barren: list[_Member]) -> _Block:
        self._blocks += 1
        able = [member for member in self._members if member not in barren]
        fewest_first = sorted(able, key=lambda member: member.blocks)
        is_turn = self._blocks >= self._next_turn
        if is_turn:
            self._next_turn = self._blocks + self._turn_every
            chosen = fewest_first[0]
        else:  # max() takes the first of equals
            chosen = max(fewest_first, key=lambda member: (round(member.gain, _GAIN_DIGITS), member.success_rate))
        trials = chosen.block if chosen.blocks else chosen.first_block
        return _Block(chosen, self._best_us(), is_turn, to_ask=trials, to_tell=trials)

    def _cut_short(self, block: _Block) -> None:
        """End a block none of whose asks is open."""
        block.to_ask = block.to_tell = 0
        self._end(block)

    def _end(self, block: _Block) -> None:
        member, improved = block.member, self._best_us() < block.start_us
        assert self._best is not None, "a block ended without a price"
        earlier = _MEMORY * member.gain if member.blocks else 0.0
        member.gain = 1.0 - self._best_us() / block.start_us + earlier
        member.blocks += 1
        member.successes += improved
        if block.is_turn:
            self._turn_every = _TURN_EVERY if improved else self._turn_every * _TURN_GROWTH
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
