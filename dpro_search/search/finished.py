"""Finished trials, whole or as lines of the journal, and how much their plans say."""

from __future__ import annotations

import msgspec

from dpro_search.search.run_folder import Trial, line_of
from dpro_search.space.plan import Plan, Prediction


class TrialFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A `Trial` without its plan, which is most of it: quickly read from its line."""

    number: int
    origin: str
    prediction: Prediction


class PlanSize(msgspec.Struct, frozen=True, order=True, array_like=True):
    """How much a plan says: fields, and then groups, clusters and ops that it names. Less is simpler."""

    fields: int
    named: int


_TRIAL = msgspec.json.Decoder(Trial)
_FACTS = msgspec.json.Decoder(TrialFacts)


class LazyTrial:
    """A trial of an island, as the journal's line of it; its plan is read when somebody looks at it.

    Attributes
    ----------
    line
        As the journal holds it.
    key
        What tells its plan from others.
    size
        How much its plan says.
    number, origin, prediction, told
        As a `Trial` has them.
    """

    __slots__ = ("_plan", "key", "line", "number", "origin", "prediction", "size")

    told: int | None = None

    def __init__(self, line: bytes, key: bytes, size: PlanSize) -> None:
        facts = _FACTS.decode(line)
        self.line, self.key, self.size = line, key, size
        self.number, self.origin, self.prediction = facts.number, facts.origin, facts.prediction
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            self._plan = _TRIAL.decode(self.line).plan
        return self._plan


FinishedTrial = Trial | LazyTrial


def line_as_written(trial: FinishedTrial) -> bytes:
    """A trial as the journal holds it."""
    return trial.line if isinstance(trial, LazyTrial) else line_of(trial)


def plan_size(plan: Plan) -> PlanSize:
    """How much a plan says."""
    changes = plan.changes
    return PlanSize(len(changes), sum(len(value) for name in changes if isinstance(value := getattr(plan, name), tuple)))


def size_of(trial: FinishedTrial) -> PlanSize:
    """How much a trial's plan says."""
    return trial.size if isinstance(trial, LazyTrial) else plan_size(trial.plan)


def plan_key(trial: FinishedTrial) -> object:
    """What tells a trial's plan from those of other trials of its kind."""
    return trial.key if isinstance(trial, LazyTrial) else trial.plan
