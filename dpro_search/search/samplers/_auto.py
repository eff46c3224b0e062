"""An algorithm portfolio: every sampler gets blocks of trials, the most successful one gets more."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dpro_search.search.samplers._base import Proposal, Sampler, cost_us
from dpro_search.search.samplers._critical_path import CriticalPathSampler
from dpro_search.search.samplers._guide import Guide
from dpro_search.search.samplers._line_search import LineSearchSampler
from dpro_search.search.samplers._mcmc import McmcSampler
from dpro_search.search.samplers._optuna import OptunaSampler
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.transformations import PlanSpace

_BLOCK = 12  # trials that a sampler gets at a time
_SLOW_BLOCK = 2  # of Optuna for jobs with a guide: a proposal of its estimator takes longer than six of their replays
_LINES_BLOCK = 20  # first block of line searches: about as many as their first grid points
_MEMORY = 0.5  # discount of a sampler's earlier gains per block
_GAIN_DIGITS = 4  # gains are rounded to so many decimals
_FRESH_ATTEMPTS = 8  # known proposals of a member in a row; they are no trials
_EXPLORE_EVERY = 4.0  # blocks between two exploration blocks
_EXPLORE_GROWTH = 1.25  # of that number, after an exploration block without success


@dataclass(eq=False)
class _Member:
    sampler: Sampler
    first_block: int = _BLOCK
    block: int = _BLOCK  # trials of its blocks after the first
    blocks: int = 0
    successes: int = 0  # blocks that found a better plan
    gain: float = 1.0  # discounted relative improvement of the portfolio's best; the initial value is above any possible gain

    @property
    def success_rate(self) -> float:
        """Share of its blocks that found a better plan, by Laplace's rule of succession."""
        return (self.successes + 1) / (self.blocks + 2)


@dataclass
class _Block:
    """Trials that a member gets in a row."""

    member: _Member
    start_us: float  # the portfolio's best when the block began
    explores: bool  # exploration: given to the member with the fewest blocks
    to_ask: int
    to_tell: int


class AutoSampler(Sampler):
    """Optuna over the outer knobs, Metropolis chains over whole plans, and the critical path or, without a guide, line searches.

    The space's default plans and questions come first. Then members get blocks of trials. Every member gets one block. After that
    the member with the largest discounted gain gets the next block; if gains are equal, the member with the largest share of
    successful blocks. At growing intervals the member with the fewest blocks gets an exploration block. Jobs with a guide are
    replayed faster than Optuna proposes, so Optuna's later blocks are short for them. A member without a new proposal ends its
    block. After a block, a new best plan is observed by the other members, and evaluated without its cycle time, whose effect may
    be chance.

    Of several portfolios that share a search, only the first tries the default plans, and each begins with another member, so that
    proposals that do not depend on the seed are not repeated.
    """

    name: ClassVar[str] = "auto"

    def __init__(self, space: PlanSpace, rng: np.random.Generator, guide: Guide | None = None, *, island: int = 0) -> None:
        super().__init__(space, rng, guide)
        outer, inner, path = rng.spawn(3)
        optuna, mcmc = OptunaSampler(space, outer), McmcSampler(space, inner, guide)
        if guide is None:
            lines = LineSearchSampler(space, path)
            self._members = [_Member(lines, first_block=_LINES_BLOCK), _Member(mcmc), _Member(optuna)]
        else:
            self._members = [_Member(optuna, block=_SLOW_BLOCK), _Member(mcmc), _Member(CriticalPathSampler(space, path, guide))]
        first = island % len(self._members)
        self._members = self._members[first:] + self._members[:first]
        self._own: deque[Plan] = deque()  # plans that the portfolio itself proposes
        self._wanted: set[Plan] = set()
        for plan in (*space.defaults, *space.questions) if island == 0 else ():
            self._want(plan)
        self._open: deque[_Block | None] = deque()  # blocks of the open proposals, the oldest first; None: the portfolio's own
        self._known: dict[Plan, Prediction] = {}
        self._block: _Block | None = None
        self._blocks = 0
        self._explore_every = self._next_exploration = _EXPLORE_EVERY  # in blocks
        self._best: tuple[Plan, Prediction] | None = None
        self._finder: _Member | None = None  # the member that found the best plan, if one did
        self._shown: Plan | None = None

    def ask(self) -> Proposal:
        if self._own:
            self._open.append(None)
            return Proposal(self._own.popleft(), self.name)
        exhausted: list[_Member] = []  # without a new proposal
        while True:
            if self._block is None or self._block.to_ask == 0:
                self._block = self._next_block(exhausted)
            block = self._block
            proposal, known = self._proposal(block.member)
            if known is None or len(exhausted) + 1 == len(self._members):
                break
            block.member.sampler.tell(proposal, known)
            exhausted.append(block.member)
            self._cut_short(block)
        block.to_ask -= 1
        self._open.append(block)
        return proposal

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        assert self._open, "tell without ask"
        block = self._open.popleft()
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
        """A member's next proposal, and its prediction if the proposal is not new.

        The result of a plan that another member proposed is passed on at once, unless an older proposal of this member is open.
        """
        proposal = member.sampler.ask()
        if any(block is not None and block.member is member for block in self._open):
            return proposal, None
        for _ in range(_FRESH_ATTEMPTS):
            if proposal.plan not in self._known:
                return proposal, None
            member.sampler.tell(proposal, self._known[proposal.plan])
            proposal = member.sampler.ask()
        return proposal, self._known.get(proposal.plan)

    def _note(self, plan: Plan, prediction: Prediction, finder: _Member | None) -> None:
        self._known[plan] = prediction
        if cost_us(prediction) < self._best_us():
            self._best, self._finder = (plan, prediction), finder
            if finder is None:  # every member observes such a plan at once
                self._shown = plan

    def _best_us(self) -> float:
        return math.inf if self._best is None else cost_us(self._best[1])

    def _next_block(self, exhausted: list[_Member]) -> _Block:
        self._blocks += 1
        able = [member for member in self._members if member not in exhausted]
        fewest_first = sorted(able, key=lambda member: member.blocks)
        explores = self._blocks >= self._next_exploration
        if explores:
            self._next_exploration = self._blocks + self._explore_every
            chosen = fewest_first[0]
        else:  # max() takes the first of equals
            chosen = max(fewest_first, key=lambda member: (round(member.gain, _GAIN_DIGITS), member.success_rate))
        trials = chosen.block if chosen.blocks else chosen.first_block
        return _Block(chosen, self._best_us(), explores, to_ask=trials, to_tell=trials)

    def _cut_short(self, block: _Block) -> None:
        """End a block without open proposals."""
        block.to_ask = block.to_tell = 0
        self._end(block)

    def _end(self, block: _Block) -> None:
        member, improved = block.member, self._best_us() < block.start_us
        assert self._best is not None, "a block ended without a result"
        earlier = _MEMORY * member.gain if member.blocks else 0.0
        member.gain = 1.0 - self._best_us() / block.start_us + earlier
        member.blocks += 1
        member.successes += improved
        if block.explores:
            self._explore_every = _EXPLORE_EVERY if improved else self._explore_every * _EXPLORE_GROWTH
        plan, prediction = self._best
        if plan == self._shown:
            return
        self._shown = plan
        for other in self._members:
            if other is not self._finder:
                other.sampler.observe(plan, prediction)
        if plan.get("cycle_time_us") is not None:
            self._want(plan.changed(cycle_time_us=None))

    def _want(self, plan: Plan) -> None:
        if plan != Plan() and plan not in self._wanted:
            self._wanted.add(plan)
            self._own.append(plan)
