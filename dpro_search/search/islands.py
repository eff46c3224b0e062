"""Samplers that share the trials of a search: each is alone with its plans, and hears in rounds what the others found.

Trial n > 0 is trial (n - 1) // islands of island (n - 1) % islands. An island is told of its own trials at once. Before its round
r, a round being `ROUND` trials of each island, it hears what the others found in their round r - 2: so nobody waits for an island
that is less than a round behind. What a search finds depends on its seed and on the number of islands, and not on where they
run, how fast, or who is killed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from dpro_search.search.finished import FinishedTrial, line_as_written
from dpro_search.search.run_folder import Trial
from dpro_search.search.samplers import Proposal, Sampler
from dpro_search.search.samplers._base import price_us
from dpro_search.space.plan import Plan, Prediction

ROUND = 32
FIRST_NEWS = 2  # the round before which islands hear something first
_TRIAL = msgspec.json.Decoder(Trial)


class News(msgspec.Struct, frozen=True, array_like=True):
    """What an island found in a round, for the others to hear.

    Attributes
    ----------
    prices
        Keys and prices of the plans that it had priced.
    best_us, number, best
        The best of these trials: what samplers minimise, its number, and the trial as the journal holds it.
    """

    island: int
    round: int
    prices: list[tuple[bytes, Prediction]]
    best_us: float
    number: int
    best: bytes


class Asked(NamedTuple):
    """A proposal, its plan in JSON, and the plan's key."""

    proposal: Proposal
    plan_json: bytes
    key: bytes


def key_of(plan_json: bytes) -> bytes:
    """What tells a plan from others, and is short."""
    return hashlib.blake2b(plan_json, digest_size=16).digest()


class Island:
    """A sampler that does not ask for what the others are known to have had priced.

    Driven like a sampler, one ask at a time::

        repeat:
            island.hear(news)               # before each round from the third on
            repeat `ROUND` times:
                asked = island.ask()
                island.tell(asked, prediction)

    Parameters
    ----------
    recorded
        Price of the recorded setting.
    """

    def __init__(self, sampler: Sampler, recorded: Prediction) -> None:
        self._sampler = sampler
        self._heard = {key_of(msgspec.json.encode(Plan())): recorded}  # prices that others paid, until the sampler asks for them
        self._known = {Plan(): recorded}  # prices that the sampler was told
        self._best_us = price_us(recorded)
        sampler.observe(Plan(), recorded)

    def hear(self, news: Collection[News]) -> None:
        """Take what each of the others found in a round."""
        for found in news:
            self._heard.update(found.prices)
        best = min(news, key=lambda found: (found.best_us, found.number))
        if best.best_us < self._best_us:
            self._best_us = best.best_us
            trial = _TRIAL.decode(best.best)
            self._sampler.observe(trial.plan, trial.prediction)

    def ask(self) -> Asked:
        """The next plan of its own. Proposals that others had priced cost no trial, once each: they are told at once."""
        while True:
            proposal = self._sampler.ask()
            plan_json = msgspec.json.encode(proposal.plan)
            asked = Asked(proposal, plan_json, key_of(plan_json))
            heard = self._heard.pop(asked.key, None)
            if heard is None:
                return asked
            self.tell(asked, heard)

    def price(self, asked: Asked) -> Prediction | None:
        """The price of a plan that the sampler was told before."""
        return self._known.get(asked.proposal.plan)

    def tell(self, asked: Asked, prediction: Prediction) -> None:
        self._known[asked.proposal.plan] = prediction
        self._best_us = min(self._best_us, price_us(prediction))
        self._sampler.tell(asked.proposal, prediction)


class Findings:
    """Finished trials of all islands, each island's in order."""

    def __init__(self, islands: int) -> None:
        self.islands = islands
        self._trials: list[list[FinishedTrial]] = [[] for _ in range(islands)]
        self._keys: list[list[bytes]] = [[] for _ in range(islands)]

    def add(self, trial: FinishedTrial, key: bytes) -> None:
        """Take an island's next trial."""
        island, place = owner_of(trial.number, self.islands)
        assert place == len(self._trials[island]), "an island's trials come in order"
        self._trials[island].append(trial)
        self._keys[island].append(key)

    def of(self, island: int) -> Sequence[FinishedTrial]:
        """The trials of an island."""
        return self._trials[island]

    def rounds(self, island: int) -> int:
        """How many rounds an island is through."""
        return len(self._trials[island]) // ROUND

    def news(self, island: int, round_: int) -> list[News]:
        """What an island hears before a round, which is at least `FIRST_NEWS`."""
        return [self.news_of(other, round_ - FIRST_NEWS) for other in range(self.islands) if other != island]

    def news_of(self, island: int, round_: int) -> News:
        """What the others hear of a round that an island is through."""
        whole = slice(round_ * ROUND, (round_ + 1) * ROUND)
        trials = self._trials[island][whole]
        prices = [(key, trial.prediction) for key, trial in zip(self._keys[island][whole], trials, strict=True)]
        best = min(trials, key=lambda trial: (price_us(trial.prediction), trial.number))
        return News(island, round_, prices, price_us(best.prediction), best.number, line_as_written(best))


def owner_of(number: int, islands: int) -> tuple[int, int]:
    """Whose a trial from number 1 on is, and which of the island's."""
    place, island = divmod(number - 1, islands)
    return island, place


def number_of(island: int, islands: int, place: int) -> int:
    """The number of an island's trial among all."""
    return 1 + place * islands + island


def share_of(island: int, islands: int, trials: int) -> int:
    """How many of a search's trials are an island's."""
    return max(-(-(trials - 1 - island) // islands), 0)
