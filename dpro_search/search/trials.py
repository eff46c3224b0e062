"""The loops of a search with one sampler: ask it for a plan, evaluate the plan, store the trial, tell the sampler the result.

Up to a window of plans is evaluated at a time, and the sampler receives results in the order of its proposals. `islands.py` has the
loop of several samplers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from dpro_search.errors import InputError
from dpro_search.search.evaluation import Evaluations
from dpro_search.search.run_folder import Journal, Trial
from dpro_search.search.samplers import NoPlanLeftError, Proposal, Sampler
from dpro_search.space.plan import Plan, Prediction

if TYPE_CHECKING:
    from dpro_search.search.shared_study import SharedStudy

RECORDED = Proposal(Plan(), "recorded")  # trial 0 of every search
_MOST_REPEATED = 1000  # known proposals in a row, beyond the number of trials in the study, after which a search ends


class _Open(NamedTuple):
    number: int
    proposal: Proposal
    told: int


def own_trials(evaluations: Evaluations, sampler: Sampler, journal: Journal, trials: int, window: int) -> Iterator[Trial]:
    """Finished trials of a search with one sampler, first the recorded setting.

    Trials of the journal are not evaluated again; the caller appends the others to it.
    Ends early where the sampler knows that no plan is left. Trial n is proposed when the sampler has received all results but the
    last `window` - 1 before it, or as many as the journal has for it: its proposals depend on nothing else.
    """
    known = journal.trials
    reported = 0
    open_: deque[_Open] = deque()

    def finished() -> Trial:
        number, proposal, results_then = open_.popleft()
        prediction = evaluations.wait(proposal.plan)
        trial = Trial(
            number=number,
            origin=proposal.origin,
            plan=proposal.plan,
            prediction=prediction,
            told=None if results_then == number else results_then,
        )
        if number:
            sampler.tell(proposal, prediction)
        else:
            sampler.observe(proposal.plan, prediction)
        return trial

    for number in range(trials):
        required = max(reported, min(number, 1), number - window + 1)
        earlier = known[number] if number < len(known) else None
        if earlier is not None:
            required = _told(earlier)
            if not reported <= required <= number:
                raise _strange(journal, number)
        while reported < required:
            trial = finished()
            reported += 1
            yield trial
        try:
            proposal = sampler.ask() if number else RECORDED
        except NoPlanLeftError:
            break
        if earlier is not None:
            check_same(earlier, proposal, journal)
            evaluations.remember(proposal.plan, earlier.prediction)
        open_.append(_Open(number, proposal, required))
        evaluations.request(proposal.plan)
    while open_:
        yield finished()


def journaled(trials: Iterable[Trial], journal: Journal) -> Iterator[Trial]:
    """The trials; those that a journal does not have are appended to it."""
    for trial in trials:
        if trial.number >= len(journal.trials):
            journal.append(trial)
        yield trial


def recorded_trial(prediction: Prediction, journal: Journal) -> Trial:
    """Trial 0 of the journal, or from its prediction."""
    if journal.trials:
        check_same(journal.trials[0], RECORDED, journal)
        return journal.trials[0]
    return Trial(number=0, origin=RECORDED.origin, plan=RECORDED.plan, prediction=prediction)


def _told(trial: Trial) -> int:
    return trial.number if trial.told is None else trial.told


def check_same(known: Trial, proposal: Proposal, journal: Journal) -> None:
    """Raise `InputError` if a sampler does not propose the plan of a known trial."""
    if (known.plan, known.origin) != proposal:
        raise _strange(journal, known.number)


def _strange(journal: Journal, number: int) -> InputError:
    return InputError(
        f"{journal.path}: line {number + 1} is not what this version of the program and of Optuna would have tried;"
        " choose another --out"
    )


def shared_trials(evaluations: Evaluations, sampler: Sampler, study: SharedStudy, trials: int, window: int) -> Iterator[Trial]:
    """Finished trials of all searches that share a study, in its order, first the recorded setting.

    A plan that is in the study already is no new trial: the sampler receives its result at once. So a search that is repeated with
    its seed reaches its former state. Ends early when the sampler finds no new plan.
    """
    open_: deque[Proposal] = deque()
    best_us = math.inf
    repeated = 0
    news = study.news()
    if not len(study):
        evaluations.request(RECORDED.plan)
        news = study.add(RECORDED, evaluations.wait(RECORDED.plan))
    while True:
        for trial, is_this_run in news:
            evaluations.remember(trial.plan, trial.prediction)
            cost_us = trial.prediction.iteration_us
            if not trial.number or (not is_this_run and cost_us < best_us):
                sampler.observe(trial.plan, trial.prediction)
            best_us = min(best_us, cost_us)
            yield trial
            if trial.number + 1 == trials:
                return
        with suppress(NoPlanLeftError):
            while len(open_) < window:
                open_.append(sampler.ask())
                evaluations.request(open_[-1].plan)
        if not open_:
            return
        proposal = open_.popleft()
        prediction = evaluations.wait(proposal.plan)
        if proposal.plan in study:
            news, repeated = [], repeated + 1
            if repeated > len(study) + _MOST_REPEATED:
                return
        else:
            news, repeated = study.add(proposal, prediction), 0
        sampler.tell(proposal, prediction)
