"""`PlanSpace`: all plans of a job that make sense, as transformations compose them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from dpro_search.errors import InputError
from dpro_search.space.plan import Plan, refuse_unknown
from dpro_search.space.transformations._base import Choice, JobFacts, Transformation

_ATTEMPTS = 8  # transformations that are tried for a move, as some have none for a plan


class PlanSpace:
    """The plans of one job.

    Attributes
    ----------
    job
        What of the job decides which plans make sense.
    transformations
        Those that its kind knows, each with fields of its own.
    fields
        Plan fields that the kind of job knows.
    defaults
        Plans that are worth a look before all others.
    questions
        Plans whose gains `diagnose` shows, which follow them.
    choices
        The outer knobs of all transformations.
    """

    def __init__(
        self,
        job: JobFacts,
        transformations: Sequence[Transformation],
        defaults: Sequence[Plan] = (),
        questions: Sequence[Plan] = (),
    ) -> None:
        self.job = job
        self.transformations = tuple(transformations)
        self.defaults, self.questions = tuple(defaults), tuple(questions)
        self.fields = tuple(name for transformation in self.transformations for name in transformation.fields)
        assert len(set(self.fields)) == len(self.fields), "two transformations set one field"
        self._upto = np.cumsum([transformation.weight for transformation in self.transformations])

    def asking_first(self, questions: Sequence[Plan]) -> PlanSpace:
        """The same space with other questions, which are legal plans."""
        return PlanSpace(self.job, self.transformations, self.defaults, questions)

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """See above."""
        return tuple(t.choice for t in self.transformations if t.choice is not None)

    def refusal(self, plan: Plan) -> str | None:
        """Why the job cannot follow a plan; None: it can."""
        try:
            refuse_unknown(plan, self.fields, self.job.name)
        except InputError as error:
            return str(error).removeprefix("plan: ")
        return next((reason for t in self.transformations if (reason := t.legal(plan)) is not None), None)

    def check(self, plan: Plan) -> None:
        """Raise `InputError` if the job cannot follow a plan."""
        reason = self.refusal(plan)
        if reason is not None:
            raise InputError(f"plan: {reason}")

    def simplest(self, plan: Plan) -> Plan:
        """The simplest plan that means the same: fields that repeat the recording, or have no effect, are left out."""
        for transformation in self.transformations:
            plan = transformation.simplest(plan)
        return plan

    def detailed(self, plan: Plan) -> Plan:
        """The plan with every field that moves start from filled in."""
        for transformation in self.transformations:
            plan = transformation.detailed(plan)
        return plan

    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float] | None = None) -> Plan:
        """A random neighbour of a legal plan, itself legal; the plan where none was found.

        Parameters
        ----------
        hot
            How much is to be gained by changing what a tensor does, by name; None: not known.
        """
        for _ in range(_ATTEMPTS):
            place = int(np.searchsorted(self._upto, rng.random() * self._upto[-1], side="right"))
            moved = self.transformations[min(place, len(self._upto) - 1)].propose(plan, rng, hot or {})
            if moved != plan:
                return moved
        return plan

    def starts(self, count: int) -> list[Plan]:
        """Plans to begin walks from, in full: the recorded setting, then `count` - 1 spread over the space."""
        plans = [self.detailed(Plan())]
        for number in range(count - 1):
            plan = Plan()
            for transformation in self.transformations:
                plan = transformation.start(plan, number, count - 1)
            plans.append(self.detailed(plan if self.refusal(plan) is None else Plan()))
        return plans
