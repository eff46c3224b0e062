"""`StrategySpace`: the plans of a parallel job, legal by construction, and in the order of a bound on their step time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from dpro_search.errors import InputError
from dpro_search.parallel.search.candidates import Candidates
from dpro_search.parallel.settings import Fixed, change, resolved, settings_of, under
from dpro_search.parallel.strategy import ParallelSettings, Strategy
from dpro_search.space.plan import Plan
from dpro_search.space.transformations import Choice, Knob, PlanningFacts, PlanSpace

_ATTEMPTS = 16  # moves of which one should be legal


class SettingKnob(Knob):
    """One setting with some values; which combinations are legal the space says."""

    def __init__(self, job: PlanningFacts, name: str, values: Callable[[], Mapping[str, Sequence[Any]]]) -> None:
        super().__init__(job)
        self.name, self.fields = name, (name,)  # type: ignore[misc]
        self._values = values  # of all settings; computed when a sampler needs them, because that takes a while

    @cached_property
    def choice(self) -> Choice:
        name = self.name
        return self.offered([value for value in self._values()[name] if value != self.job.values.get(name)])


class StrategySpace(PlanSpace):
    """Plans are what changes in how a job runs today.

    Parameters
    ----------
    runs, fixed
        How it runs today, and what no plan changes.
    candidates
        What a search may propose.
    """

    def __init__(self, title: str, runs: ParallelSettings, fixed: Fixed, candidates: Candidates, tensors: Sequence[Any]) -> None:
        self._runs, self._fixed, self.candidates = runs, fixed, candidates
        self.today = resolved(runs, fixed)
        facts = PlanningFacts(name=title, tensors=tuple(tensors), values=settings_of(self.today).settings)
        super().__init__(facts, [SettingKnob(facts, name, lambda: self._values) for name in ParallelSettings.__struct_fields__])

    def strategy(self, plan: Plan) -> Strategy:
        """The strategy that a plan describes; raises `InputError` with the nearest legal value if it is impossible."""
        return resolved(under(self._runs, ParallelSettings.of(plan)), self._fixed)

    def plan(self, strategy: Strategy) -> Plan:
        """The shortest plan that means a strategy."""
        changes = change(self._runs, self.today, strategy, self._fixed)
        return Plan.of(**changes.settings) if changes.settings else Plan()

    def refusal(self, plan: Plan) -> str | None:
        reason = super().refusal(plan)
        if reason is None:
            try:
                self.strategy(plan)
            except InputError as error:
                return str(error)
        return reason

    def simplest(self, plan: Plan) -> Plan:
        return self.plan(self.strategy(plan)) if self.refusal(plan) is None else plan

    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float] | None = None) -> Plan:
        for _ in range(_ATTEMPTS):
            moved = super().propose(plan, rng, hot)
            if rng.random() < 0.5:  # degrees change in pairs
                moved = super().propose(moved, rng, hot)
            if moved != plan and self.refusal(moved) is None:
                return self.simplest(moved)
        return plan

    @cached_property
    def _values(self) -> dict[str, list[Any]]:
        """Values of each setting in any candidate."""
        candidates = self.candidates.values()
        return {name: sorted(candidates[name]) for name in ParallelSettings.__struct_fields__}
