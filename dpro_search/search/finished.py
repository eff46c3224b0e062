"""Finished trials, decoded or as lines of the journal, and the sizes of their plans."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import ClassVar

import msgspec

from dpro_search.search.run_folder import Trial, line_of
from dpro_search.space.plan import Plan, Prediction


class PlanSize(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Size of a plan: its number of fields, then of the groups, clusters and ops that it names. Smaller is simpler."""

    fields: int
    named: int


_TRIAL = msgspec.json.Decoder(Trial)


class LazyTrial(msgspec.Struct, array_like=True, eq=False, dict=True):
    """A trial of an island, as a line of the journal; its plan is decoded on first access."""

    line: bytes  # As the journal holds it.
    key: bytes  # Hash of its plan.
    size: PlanSize  # Size of its plan.
    # number, origin, prediction, told: As a `Trial` has them.
    number: int
    origin: str
    prediction: Prediction
    told: ClassVar[int | None] = None

    @cached_property
    def plan(self) -> Plan:
        """The evaluated plan."""
        return _TRIAL.decode(self.line).plan


FinishedTrial = Trial | LazyTrial


def line_as_written(trial: FinishedTrial) -> bytes:
    """A trial as the journal holds it."""
    return trial.line if isinstance(trial, LazyTrial) else line_of(trial)


def plan_size(plan: Plan) -> PlanSize:
    """The size of a plan."""
    values = plan.settings.values()
    return PlanSize(len(values), sum(len(value) for value in values if isinstance(value, tuple)))


def size_of(trial: FinishedTrial) -> PlanSize:
    """The size of a trial's plan."""
    return trial.size if isinstance(trial, LazyTrial) else plan_size(trial.plan)


def plan_key(trial: FinishedTrial) -> object:
    """A key that is equal for trials of equal plans."""
    return trial.key if isinstance(trial, LazyTrial) else trial.plan


def key_of(plan_json: bytes) -> bytes:
    """A hash of a plan, 16 bytes."""
    return hashlib.blake2b(plan_json, digest_size=16).digest()


def compact_trial(trial: FinishedTrial) -> LazyTrial:
    """A trial as its line, which takes a tenth of the memory."""
    if isinstance(trial, LazyTrial):
        return trial
    key = key_of(msgspec.json.encode(trial.plan))
    return LazyTrial(line_of(trial), key, plan_size(trial.plan), trial.number, trial.origin, trial.prediction)
