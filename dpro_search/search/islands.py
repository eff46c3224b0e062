"""Islands: samplers that share the trials of a search, and exchange results after rounds of trials.

Trial n > 0 is trial (n - 1) // islands of island (n - 1) % islands. An island receives the results of its own trials at once. A
round is `ROUND` trials of each island. Before its round r an island reads the results of the others' round r - 2 in the journal, so
it does not wait for an island that is less than a round behind. What a search finds depends on its seed and on the number of
islands only, not on where they run, on their speed, or on killed processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

import msgspec

from dpro_search._regular_files import open_regular
from dpro_search.search.evaluation import Evaluations
from dpro_search.search.run_folder import Journal, Trial
from dpro_search.search.samplers import Proposal, Sampler
from dpro_search.search.samplers._base import cost_us
from dpro_search.search.trials import check_same
from dpro_search.space.plan import Plan, Prediction

ROUND = 32
FIRST_NEWS = 2  # the first round before which islands receive results


class Result(msgspec.Struct):
    """A trial in the journal, whose plan is decoded by those who need it."""

    number: int
    plan: msgspec.Raw
    prediction: Prediction


_RESULT = msgspec.json.Decoder(Result)


@lru_cache(maxsize=64)
def plan_json(plan: Plan) -> bytes:
    """A plan as the journal holds it."""
    return msgspec.json.encode(plan)


class Island:
    """A sampler that does not propose plans that other islands are known to have evaluated.

    It is called like a sampler, one proposal at a time::

        repeat:
            island.hear(results)            # before each round from the third on
            repeat `ROUND` times:
                proposal = island.ask()
                island.tell(proposal, prediction)

    Parameters
    ----------
    recorded
        Prediction of the recorded setting.

    Attributes
    ----------
    known
        Results that the sampler has received.
    """

    def __init__(self, sampler: Sampler, recorded: Prediction) -> None:
        self._sampler = sampler
        # Results of others, until the sampler proposes their plans, by the hash of a plan's JSON, which takes less memory.
        self._heard = {hash(plan_json(Plan())): recorded}
        self.known = {Plan(): recorded}
        self._best_us = cost_us(recorded)
        sampler.observe(Plan(), recorded)

    def hear(self, results: Sequence[Result]) -> None:
        """Take the results of a round of the other islands."""
        self._heard.update((hash(bytes(result.plan)), result.prediction) for result in results)
        best = min(results, key=lambda result: (cost_us(result.prediction), result.number))
        if cost_us(best.prediction) < self._best_us:
            self._best_us = cost_us(best.prediction)
            self._sampler.observe(msgspec.json.decode(best.plan, type=Plan), best.prediction)

    def ask(self) -> Proposal:
        """The next new plan. The sampler receives results of other islands' plans at once, without a trial."""
        while True:
            proposal = self._sampler.ask()
            heard = self._heard.pop(hash(plan_json(proposal.plan)), None)
            if heard is None:
                return proposal
            self.tell(proposal, heard)

    def tell(self, proposal: Proposal, prediction: Prediction) -> None:
        self.known[proposal.plan] = prediction
        self._best_us = min(self._best_us, cost_us(prediction))
        self._sampler.tell(proposal, prediction)


def islands_trials(
    evaluations: Evaluations,
    islands: Mapping[int, Island],
    known: Callable[[int], Trial | None],
    journal: Journal,
    trials: int,
    *,
    count: int,
    await_round: Callable[[int], None],
) -> Iterator[Trial]:
    """Finished trials in order, from number 1 on, of all islands of a search or of some of them.

    Parameters
    ----------
    islands
        By number, from 0 on, in order.
    known
        A finished trial by its number, which is not evaluated again; None: it is not finished.
    journal
        Results of other islands are read from its file.
    trials, count
        How many trials the search has, with the recorded setting, and how many islands.
    await_round
        Returns when all trials of a round are in the journal's file.
    """
    rounds = _rounds(journal, count)
    for first in range(1, trials, count):
        island_of_trial = {first + number: island for number, island in islands.items() if first + number < trials}
        round_, place = divmod((first - 1) // count, ROUND)
        if place == 0 and round_ >= FIRST_NEWS:
            await_round(round_ - FIRST_NEWS)
            lines = next(rounds)
            for number, island in islands.items():
                island.hear([_result(line, journal) for place, line in enumerate(lines) if place % count != number])
        proposals = {number: island.ask() for number, island in island_of_trial.items()}
        for number, proposal in proposals.items():
            prediction = island_of_trial[number].known.get(proposal.plan)
            if (earlier := known(number)) is not None:
                check_same(earlier, proposal, journal)
                prediction = earlier.prediction
            if prediction is not None:
                evaluations.remember(proposal.plan, prediction)
            evaluations.request(proposal.plan)
        for number, proposal in proposals.items():
            prediction = evaluations.wait(proposal.plan)
            island_of_trial[number].tell(proposal, prediction)
            yield Trial(number=number, origin=proposal.origin, plan=proposal.plan, prediction=prediction)


def _rounds(journal: Journal, count: int) -> Iterator[list[bytes]]:
    """The lines of one round after the other, from the file; the caller knows that they are there."""
    with open_regular(journal.path) as file:
        file.readline()  # the recorded setting, which no island has evaluated
        while True:
            yield [file.readline() for _ in range(ROUND * count)]


def _result(line: bytes, journal: Journal) -> Result:
    result = _RESULT.decode(line)
    if result.number < len(journal.trials):  # an earlier version may have written the same plan in another way
        result.plan = msgspec.Raw(msgspec.json.encode(journal.trials[result.number].plan))
    return result
