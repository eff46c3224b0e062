"""Finished trials, whole or as lines of the journal, and how much their plans say."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import msgspec

from dpro_search.search.run_folder import Trial, line_of
from dpro_search.space.plan import Plan, Prediction


class PlanSize(msgspec.Struct, frozen=True, order=True, array_like=True):
    """How much a plan says: fields, and then groups, clusters and ops that it names. Less is simpler."""

    fields: int
    named: int


_TRIAL = msgspec.json.Decoder(Trial)


class LazyTrial(msgspec.Struct, array_like=True, eq=False, dict=True):
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

    line: bytes
    key: bytes
    size: PlanSize
    number: int
    origin: str
    prediction: Prediction
    told: ClassVar[int | None] = None

    @cached_property
    def plan(self) -> Plan:
        """What was priced."""
        return _TRIAL.decode(self.line).plan


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
