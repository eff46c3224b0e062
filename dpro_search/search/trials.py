"""The loops of a search: ask a sampler, have its plan priced, write it down, tell it.

Where one sampler is asked, up to a window of plans is on its way, and the sampler is told in the order in which it asked. Where
several share the trials (see `islands.py`), one plan of each is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dpro_search.errors import InputError
from dpro_search.search.finished import FinishedTrial
from dpro_search.search.islands import FIRST_NEWS, ROUND, Asked, Findings, Island
from dpro_search.search.pricing import Prices
from dpro_search.search.run_folder import Journal, Trial
from dpro_search.search.samplers import Proposal, Sampler
from dpro_search.space.plan import Plan, Prediction

if TYPE_CHECKING:
    from dpro_search.search.shared_study import SharedStudy

RECORDED = Proposal(Plan(), "recorded")  # trial 0 of every search
_MOST_BARREN = 1000  # proposals in a row that others had priced, beyond those that the study explains


class _Open(NamedTuple):
    number: int
    proposal: Proposal
    told: int


def own_trials(prices: Prices, sampler: Sampler, journal: Journal, trials: int, window: int) -> Iterator[Trial]:
    """Finished trials of a search that is alone, first the recorded setting. What the journal knows is not priced again.

    Trial n is proposed when the sampler has been told of all trials but the last `window` - 1 before it, or of as many as the
    journal says: that is all that its proposals depend on.
    """
    known = journal.trials
    told = 0
    on_the_way: deque[_Open] = deque()

    def finished() -> Trial:
        number, proposal, told_then = on_the_way.popleft()
        prediction = prices.wait(proposal.plan)
        trial = Trial(
            number=number,
            origin=proposal.origin,
            plan=proposal.plan,
            prediction=prediction,
            told=None if told_then == number else told_then,
        )
        if number >= len(known):
            journal.append(trial)
        if number:
            sampler.tell(proposal, prediction)
        else:
            sampler.observe(proposal.plan, prediction)
        return trial

    for number in range(trials):
        due = max(told, min(number, 1), number - window + 1)
        if number < len(known):
            due = _told(known[number])
            if not told <= due <= number:
                raise _strange(journal, number)
        while told < due:
            trial = finished()
            told += 1
            yield trial
        proposal = sampler.ask() if number else RECORDED
        if number < len(known):
            check_same(known[number], proposal, journal)
            prices.remember(proposal.plan, known[number].prediction)
        on_the_way.append(_Open(number, proposal, due))
        prices.request(proposal.plan)
    while on_the_way:
        yield finished()


def recorded_trial(price: Prediction, journal: Journal) -> Trial:
    """Trial 0 as the journal knows it, or from its price."""
    if journal.trials:
        check_same(journal.trials[0], RECORDED, journal)
        return journal.trials[0]
    trial = Trial(number=0, origin=RECORDED.origin, plan=RECORDED.plan, prediction=price)
    journal.append(trial)
    return trial


def islands_trials(prices: Prices, islands: Sequence[Island], journal: Journal, trials: int) -> Iterator[Trial]:
    """Finished trials, from number 1 on, of islands that are driven from here. What the journal knows is not priced again.

    This says what islands in processes of their own find as well (see `island_workers.py`).
    """
    known = journal.trials
    findings = Findings(len(islands))
    for first in range(1, trials, len(islands)):
        turn = range(first, min(first + len(islands), trials))
        round_, within = divmod((first - 1) // len(islands), ROUND)
        asked: list[Asked] = []
        for number, island in zip(turn, islands, strict=False):
            if within == 0 and round_ >= FIRST_NEWS:
                island.hear(findings.news(number - first, round_))
            asked.append(island.ask())
            proposal, price = asked[-1].proposal, island.price(asked[-1])
            if number < len(known):
                check_same(known[number], proposal, journal)
                price = known[number].prediction
            if price is not None:
                prices.remember(proposal.plan, price)
            prices.request(proposal.plan)
        for number, island, open_ in zip(turn, islands, asked, strict=False):
            proposal = open_.proposal
            prediction = prices.wait(proposal.plan)
            trial = Trial(number=number, origin=proposal.origin, plan=proposal.plan, prediction=prediction)
            if number >= len(known):
                journal.append(trial)
            findings.add(trial, open_.key)
            island.tell(open_, prediction)
            yield trial


def _told(trial: Trial) -> int:
    return trial.number if trial.told is None else trial.told


def check_same(known: FinishedTrial, proposal: Proposal, journal: Journal) -> None:
    """Raise `InputError` if a sampler does not propose what a trial that is known says."""
    if (known.plan, known.origin) != proposal:
        raise _strange(journal, known.number)


def _strange(journal: Journal, number: int) -> InputError:
    return InputError(
        f"{journal.path}: line {number + 1} is not what this version of the program and of Optuna would have tried;"
        " choose another --out"
    )


def shared_trials(prices: Prices, sampler: Sampler, study: SharedStudy, trials: int, window: int) -> Iterator[Trial]:
    """Finished trials of all searches that share a study, in its order, first the recorded setting.

    A plan that is in the study already costs no trial: the sampler is told its price at once. So a search that is run again from
    its seed gets to where it was. Ends early when the sampler finds nothing new any more.
    """
    on_the_way: deque[Proposal] = deque()
    best_us = math.inf
    barren = 0
    news = study.news()
    if not len(study):
        prices.request(RECORDED.plan)
        news = study.add(RECORDED, prices.wait(RECORDED.plan))
    while True:
        for trial, own in news:
            prices.remember(trial.plan, trial.prediction)
            price_us = trial.prediction.iteration_us
            if not trial.number or (not own and price_us < best_us):
                sampler.observe(trial.plan, trial.prediction)
            best_us = min(best_us, price_us)
            yield trial
            if trial.number + 1 == trials:
                return
        while len(on_the_way) < window:
            on_the_way.append(sampler.ask())
            prices.request(on_the_way[-1].plan)
        proposal = on_the_way.popleft()
        prediction = prices.wait(proposal.plan)
        if proposal.plan in study:
            news, barren = [], barren + 1
            if barren > len(study) + _MOST_BARREN:
                return
        else:
            news, barren = study.add(proposal, prediction), 0
        sampler.tell(proposal, prediction)
