"""Islands: samplers that share the trials of a search, and exchange results after rounds of trials.

Trial n > 0 is trial (n - 1) // islands of island (n - 1) % islands. An island receives the results of its own trials at once. A
round is `ROUND` trials of each island. Before its round r an island receives the results of the others' round r - 2, so it does
not wait for an island that is less than a round behind. What a search finds depends on its seed and on the number of islands
only, not on where they run, on their speed, or on killed processes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from dpro_search.search.finished import FinishedTrial, key_of, line_as_written
from dpro_search.search.run_folder import Trial
from dpro_search.search.samplers import Proposal, Sampler
from dpro_search.search.samplers._base import cost_us
from dpro_search.space.plan import Plan, Prediction

ROUND = 32
FIRST_NEWS = 2  # the first round before which islands receive results
_TRIAL = msgspec.json.Decoder(Trial)


class News(msgspec.Struct, frozen=True, array_like=True):
    """The results of an island's round, for the other islands."""

    island: int
    round: int
    predictions: list[tuple[bytes, Prediction]]  # Keys and predictions of the plans that it evaluated.
    # best_us, number, best: The best of these trials: its cost (`cost_us`), its number, and its line of the journal.
    best_us: float
    number: int
    best: bytes


class KeyedProposal(NamedTuple):
    """A proposal, its plan in JSON, and the plan's key."""

    proposal: Proposal
    plan_json: bytes
    key: bytes


class Island:
    """A sampler that does not propose plans that other islands are known to have evaluated.

    It is called like a sampler, one proposal at a time::

        repeat:
            island.hear(news)               # before each round from the third on
            repeat `ROUND` times:
                keyed = island.ask()
                island.tell(keyed, prediction)

    Parameters
    ----------
    recorded
        Prediction of the recorded setting.
    """

    def __init__(self, sampler: Sampler, recorded: Prediction) -> None:
        self._sampler = sampler
        # Results of other islands, until the sampler proposes their plans.
        self._heard = {key_of(msgspec.json.encode(Plan())): recorded}
        self._known = {Plan(): recorded}  # results that the sampler has received
        self._best_us = cost_us(recorded)
        sampler.observe(Plan(), recorded)

    def hear(self, news: Collection[News]) -> None:
        """Take the results of a round of each of the other islands."""
        for message in news:
            self._heard.update(message.predictions)
        best = min(news, key=lambda message: (message.best_us, message.number))
        if best.best_us < self._best_us:
            self._best_us = best.best_us
            trial = _TRIAL.decode(best.best)
            self._sampler.observe(trial.plan, trial.prediction)

    def ask(self) -> KeyedProposal:
        """The next new plan. The sampler receives results of other islands' plans at once, without a trial."""
        while True:
            proposal = self._sampler.ask()
            plan_json = msgspec.json.encode(proposal.plan)
            keyed = KeyedProposal(proposal, plan_json, key_of(plan_json))
            heard = self._heard.pop(keyed.key, None)
            if heard is None:
                return keyed
            self.tell(keyed, heard)

    def known_prediction(self, keyed: KeyedProposal) -> Prediction | None:
        """The result of a plan that the sampler has received before."""
        return self._known.get(keyed.proposal.plan)

    def tell(self, keyed: KeyedProposal, prediction: Prediction) -> None:
        self._known[keyed.proposal.plan] = prediction
        self._best_us = min(self._best_us, cost_us(prediction))
        self._sampler.tell(keyed.proposal, prediction)


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
        """How many rounds an island has finished."""
        return len(self._trials[island]) // ROUND

    def news(self, island: int, round_: int) -> list[News]:
        """The messages that an island receives before a round, which is at least `FIRST_NEWS`."""
        return [self.news_of(other, round_ - FIRST_NEWS) for other in range(self.islands) if other != island]

    def news_of(self, island: int, round_: int) -> News:
        """The messages that the other islands receive about a round that an island has finished."""
        whole = slice(round_ * ROUND, (round_ + 1) * ROUND)
        trials = self._trials[island][whole]
        predictions = [(key, trial.prediction) for key, trial in zip(self._keys[island][whole], trials, strict=True)]
        best = min(trials, key=lambda trial: (cost_us(trial.prediction), trial.number))
        return News(island, round_, predictions, cost_us(best.prediction), best.number, line_as_written(best))


def owner_of(number: int, islands: int) -> tuple[int, int]:
    """The island of a trial (from number 1 on), and its place among the island's trials."""
    place, island = divmod(number - 1, islands)
    return island, place


def number_of(island: int, islands: int, place: int) -> int:
    """The number of an island's trial among all."""
    return 1 + place * islands + island


def share_of(island: int, islands: int, trials: int) -> int:
    """How many of a search's trials belong to an island."""
    return max(-(-(trials - 1 - island) // islands), 0)
