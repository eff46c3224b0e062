"""`ParallelJob`: a described parallel job, its plans and what verbs tell about them.

`prepared.py` has what `ParallelJob.lower` prepares for each scenario; this module turns it into facts, sentences and tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Self

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError
from dpro_search.graph.measured import ProfiledSteps
from dpro_search.kinds._answers import ComparedSetting, ParallelFacts, ParallelSetting, PlanMemory, SearchFacts, fields_of
from dpro_search.kinds._diagnosis import Diagnosis, PredictedGain, critical_ops, sorted_gains
from dpro_search.kinds._job import Job, JobInScenario, JobObjective
from dpro_search.kinds._options import PlanOptions
from dpro_search.kinds._work import EFFICIENCY_KEYS, Work, efficiency
from dpro_search.parallel.answers.breakdown import computation_us
from dpro_search.parallel.answers.diagnosis import (
    ParallelDiagnosis,
    comparison,
    doubt,
    findings,
    host_sentences,
    memory_sentence,
    pass_name,
    stage_facts,
    stage_spans,
)
from dpro_search.parallel.answers.efficiencies import learned, plan_errors
from dpro_search.parallel.costs.domain import harder
from dpro_search.parallel.costs.scales import MEASURED
from dpro_search.parallel.file.description import ParallelDescription
from dpro_search.parallel.file.usual_strategy import MEMORY_HEADROOM, usual_of
from dpro_search.parallel.frameworks import FRAMEWORKS
from dpro_search.parallel.prepared import TITLE, PreparedJob
from dpro_search.parallel.search.changes import change_text, remedies, single_changes
from dpro_search.parallel.search.ranking import family, ranked
from dpro_search.parallel.search.space import StrategySpace
from dpro_search.parallel.settings import settings_of, strategy_text
from dpro_search.parallel.steps.step_prices import StepPrices
from dpro_search.parallel.strategy import ParallelSettings, Strategy
from dpro_search.parallel.workload import Workload
from dpro_search.quantities import size_text
from dpro_search.replay.lowered import Lowered
from dpro_search.replay.path.segments import path_totals
from dpro_search.search.objective import BoundedPlan, ListedPlan, StrategyFacts
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import SCALES, Scale, Scenario

_MOST_COMPARED = 2  # plans behind the best that a search explains
_SPEEDS = ("compute=0.9", "communication=0", "bandwidth=2")  # whose gains a diagnosis shows


class ParallelJob(Job):
    """A described job.

    Parameters
    ----------
    description
        The job as its file describes it.
    """

    title = TITLE
    settings = ("ranks", "rate", "global_batch", "sequence", "precision", *SCALES, *MEASURED)
    abilities = ("begins_with",)

    def __init__(self, description: ParallelDescription) -> None:
        self._described = description
        self._prepared: list[PreparedJob] = []
        recorded = self.prepared(Scenario())
        self.tensors, self.askable = recorded.tensors, recorded.space.fields

    @classmethod
    def of(cls, source: ParallelDescription, options: PlanOptions) -> Self:
        for name in ("compute", "all_reduce_model", "cluster_model", "precision_table"):
            if getattr(options, name):
                what = name.replace("_", " ")
                raise InputError(
                    f"{cls.title} has no plans for '{what}'; it changes {', '.join(ParallelSettings.__struct_fields__)}"
                )
        return cls(source)

    # In scenarios.

    def lower(self, scenario: Scenario, *, steps: ProfiledSteps | None = None) -> Lowered:
        self.check_changes(scenario, steps)
        prepared = self.prepared(scenario)
        prepared.space.check(scenario.plan)
        return prepared.lowered(prepared.space.strategy(scenario.plan))

    def plans(self, scenario: Scenario) -> StrategySpace:
        return self.prepared(scenario).space

    def prepared(self, scenario: Scenario) -> PreparedJob:
        """The job in a scenario, whatever its plan; prepared once."""
        scenario = replace(scenario, plan=Plan())
        for prepared in self._prepared:
            if prepared.scenario == scenario:
                return prepared
        self.check_changes(scenario)
        for scale in scenario.scales:
            if scale.rank is not None or scale.what not in (*SCALES, *MEASURED):
                raise self.cannot("compute", f"be asked '{scale.text}': all ranks of a stage are one")
        if scenario.begins_with is not None:
            self.prepared(replace(scenario, begins_with=None)).space.check(scenario.begins_with)
        self._prepared.append(PreparedJob(self._described, scenario))
        return self._prepared[-1]

    def work(self, scenario: Scenario) -> Work:
        return self.prepared(scenario).work

    def workload(self, scenario: Scenario) -> Callable[[Plan], Workload]:
        return self.prepared(scenario).workload

    # Lessons of measured plans.

    def plan_errors(self, here: JobInScenario, predictions: Mapping[Plan, Prediction]) -> Floats:
        return plan_errors(self._steps(here, predictions)) if self.learns_speeds else super().plan_errors(here, predictions)

    def learned(
        self, here: JobInScenario, measured_us: Mapping[Plan, tuple[float, float]], *, same_job: bool
    ) -> Mapping[str, float]:
        times_us, noise = np.array(list(measured_us.values())).T
        return learned(self._steps(here, measured_us), np.log(times_us), noise, same_job=same_job)

    @property
    def learns_speeds(self) -> bool:
        """Speeds of devices are learned unless the job has times of its own blocks, which say how fast these are."""
        return self._described.times is None

    def _steps(self, here: JobInScenario, plans: Iterable[Plan]) -> list[tuple[StepPrices, Strategy]]:
        prepared = self.prepared(here.scenario)
        return [(prepared.prices, prepared.space.strategy(plan)) for plan in plans]

    # Answers.

    def objective(self, here: JobInScenario) -> ParallelObjective:
        return ParallelObjective(here, self)

    def plan_facts(self, here: JobInScenario, plan: Plan) -> ParallelFacts:
        prepared = self.prepared(here.scenario)
        strategy, prediction = prepared.space.strategy(plan), here.predict(plan)
        memory_bytes = prepared.memory_bytes(strategy)
        possible = () if prediction.infeasible is None else remedies(here.predict, plan, strategy)
        return ParallelFacts(
            strategy=settings_of(strategy).settings,
            computation_us=computation_us(prepared.prices, strategy, prepared.parts_us(plan)["compute"]),
            memory_bytes=memory_bytes,
            infeasible=prediction.infeasible,
            remedies=possible,
            notes=(
                memory_sentence(memory_bytes, limit_bytes(here, prepared), possible),
                *host_sentences(*prepared.host_memory(strategy)),
            ),
        )

    def parallel_setting(self, here: JobInScenario, plan: Plan, name: str) -> ParallelSetting:
        prepared = self.prepared(here.scenario)
        strategy, prediction, facts = prepared.space.strategy(plan), here.replayed(plan), self.plan_facts(here, plan)
        return ParallelSetting(
            name=name,
            step_us=prediction.iteration_us,
            interval_us=prediction.interval_us,
            parts_us={**prediction.breakdown_us, "compute": 0.0, **facts.computation_us},
            memory_bytes=facts.memory_bytes,
            limit_bytes=limit_bytes(here, prepared),
            strategy=facts.strategy,
            stages=stage_spans(here.timeline(plan), strategy.pp),
            efficiency=fields_of(efficiency(prepared.work, prediction.iteration_us)),
        )

    def diagnose(self, here: JobInScenario) -> Diagnosis:
        plan, prepared = Plan(), self.prepared(here.scenario)
        timeline, prediction, more = here.timeline(plan), here.replayed(plan), self.plan_facts(here, plan)
        gains = self._gains(here, prepared.space.today, prediction.iteration_us)
        return ParallelDiagnosis(
            iteration_us=prediction.iteration_us,
            measured_iteration_us=None,
            breakdown_us=prediction.breakdown_us,
            peak_memory_bytes=prediction.peak_memory_bytes,
            critical_path=path_totals(timeline),
            critical_ops=critical_ops(timeline, row_name=pass_name),
            ranks=stage_facts(timeline, prepared.space.today),
            gains=gains,
            findings=(*more.notes, *findings(prediction.breakdown_us, gains)),
            warnings=tuple(prepared.description.warnings),
            **fields_of(more),
        )

    def _gains(self, here: JobInScenario, today: Strategy, base_us: float) -> tuple[PredictedGain, ...]:
        """Gains of other speeds and of single changes of the plan that are legal, fit into memory, and gain anything."""
        speeds = {text: here.scenario.then(Scenario(scales=(Scale.parse(text),))) for text in _SPEEDS}
        predicted_us = {text: self.lower(each).replayable.iterations().iteration_us for text, each in speeds.items()}
        for values in single_changes(today):
            try:
                changed = here.predict(Plan.of(**values))
            except InputError:
                continue
            if changed.infeasible is None:
                predicted_us[change_text(values)] = changed.iteration_us
        return sorted_gains(base_us, {text: us for text, us in predicted_us.items() if us < base_us})


def limit_bytes(here: JobInScenario, prepared: PreparedJob) -> int | None:
    """Memory that a rank may use: that of its device, or less if the user limits it; None: not known."""
    known = [limit for limit in (prepared.device_bytes, here.memory_limit_bytes) if limit is not None]
    return min(known, default=None)


class ParallelObjective(JobObjective[ParallelJob]):
    """A described parallel job as a search asks it."""

    def __init__(self, here: JobInScenario, job: ParallelJob) -> None:
        super().__init__(here, job)
        self.prepared = job.prepared(here.scenario)

    def ranked(self, settled: Callable[[Hashable, float], bool] = lambda family, bound_us: False) -> Iterator[BoundedPlan]:
        """Plans that fit in memory, in the order of a bound on their time."""
        limit, space = self._searched_bytes, self.prepared.space
        for strategy, bound_us in ranked(space.candidates, self.prepared.prices, math.inf if limit is None else limit, settled):
            yield BoundedPlan(space.plan(strategy), bound_us)

    def family(self, plan: Plan) -> Hashable:
        """Equal for plans that a list of different plans has once."""
        return family(self.prepared.space.strategy(plan))

    def listed(self, plans: Sequence[tuple[Plan, Prediction]]) -> list[ListedPlan]:
        """The whole strategy of each plan, what it gives and costs, its memory with the margin, and what it loses to the first."""
        best = plans[0][0] if plans else Plan()
        return [self._listed(plan, prediction, best) for plan, prediction in plans]

    def _listed(self, plan: Plan, prediction: Prediction, best: Plan) -> ListedPlan:
        prepared = self.prepared
        strategy, peak = prepared.space.strategy(plan), prediction.peak_memory_bytes
        parts_us, best_us = prepared.parts_us(plan), prepared.parts_us(best)
        gives = efficiency(prepared.work, prediction.iteration_us)
        margin = None if prepared.device_bytes is None or peak is None else prepared.device_bytes - peak
        lost_us = {name: parts_us.get(name, 0.0) - best_us.get(name, 0.0) for name in {**parts_us, **best_us}}
        return ListedPlan(
            strategy_text(strategy),
            StrategyFacts(
                strategy=settings_of(strategy).settings,
                **{key: getattr(gives, key) for key in EFFICIENCY_KEYS},
                memory_margin_bytes=margin,
                slower_than_best_pct=(sum(parts_us.values()) / sum(best_us.values()) - 1) * 100,
                breakdown_us=parts_us,
                lost_to_best_us={name: us for name, us in lost_us.items() if us},
            ),
        )

    def facts(self) -> SearchFacts:
        description, limited = self.prepared.description, self.here.memory_limit_bytes is not None
        name, facts = self._listed(Plan(), self.predict(Plan()), Plan())
        usual = usual_of(FRAMEWORKS[description.framework])
        return SearchFacts(
            baseline=ComparedSetting(
                name=name,
                usual_plan=usual.words if description.chosen else None,
                source=usual.source if description.chosen else None,
                **fields_of(facts),
            ),
            memory=PlanMemory(
                device_bytes=self.prepared.device_bytes,
                limit_bytes=self._searched_bytes,
                headroom_pct=None if limited else MEMORY_HEADROOM * 100,
            ),
        )

    @property
    def _searched_bytes(self) -> int | None:
        """Memory that proposed plans may take: the limit that was given, or the device's memory less the headroom."""
        device_bytes = self.prepared.device_bytes
        if self.here.memory_limit_bytes is not None or device_bytes is None:
            return limit_bytes(self.here, self.prepared)
        return int(device_bytes * (1 - MEMORY_HEADROOM))

    def reasons(self, plans: Sequence[Plan]) -> tuple[str, ...]:
        """Sentences that say what today's plan and the other best plans lose to the first, and whether their order is certain."""
        if not plans:
            return ()
        best, *others = plans
        prepared = self.prepared
        parts_us = prepared.parts_us(best)
        sentences = []
        for number, plan in enumerate(others[:_MOST_COMPARED], 2):
            sentences.append(comparison(f"Plan {number}", "plan 1", prepared.parts_us(plan), parts_us))
        if others:
            domain = harder(*(prepared.prices.domain(prepared.space.strategy(plan)) for plan in (best, others[0])))
            sentences += filter(None, [doubt(self.predict(best).iteration_us, self.predict(others[0]).iteration_us, domain)])
        if Plan() not in plans[: _MOST_COMPARED + 1]:
            today = "The usual plan" if prepared.description.chosen else "The described setting"
            sentences.append(comparison(today, "plan 1", prepared.parts_us(Plan()), parts_us))
        return (*sentences, *self._stated())

    def _stated(self) -> Iterator[str]:
        """Sentences on the setting that a search compares with, and on the memory that it leaves free."""
        description, device_bytes = self.prepared.description, self.prepared.device_bytes
        if description.chosen:
            usual = usual_of(FRAMEWORKS[description.framework])
            name, plan = description.framework, strategy_text(self.prepared.space.today)
            yield f"Compared with a usual plan of {name}: {plan} ({usual.words}). Sources: {usual.source}."
        limit = self._searched_bytes
        if limit is None:
            return
        if self.here.memory_limit_bytes is not None:
            yield f"Plans may take {size_text(limit)} of memory, as given."
        elif device_bytes is not None:
            has, spare = size_text(device_bytes), MEMORY_HEADROOM * 100
            yield (
                f"Plans may take {size_text(limit)} of the {has} of a device: {spare:.1f} % are left free, the mean error of "
                "predicted memory. --memory-limit sets another limit."
            )
