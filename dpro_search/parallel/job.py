"""`ParallelJob`: a described parallel job, its plans and what verbs tell about them.

`prepared.py` has what `ParallelJob.lower` prepares for each scenario; this module turns it into facts, sentences and tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Self

from dpro_search.deploy.step_split import AloneUs, StepSplit
from dpro_search.errors import InputError
from dpro_search.graph.measured import ProfiledSteps
from dpro_search.kinds._answers import ComparedSetting, ParallelFacts, ParallelSetting, PlanMemory, SearchFacts, fields_of
from dpro_search.kinds._diagnosis import Diagnosis, PredictedGain, critical_ops, sorted_gains
from dpro_search.kinds._job import Job
from dpro_search.kinds._options import PlanOptions
from dpro_search.kinds._work import EFFICIENCY_KEYS, Work, efficiency
from dpro_search.parallel.answers.breakdown import computation_us
from dpro_search.parallel.answers.diagnosis import (
    ParallelDiagnosis,
    comparison,
    doubt,
    findings,
    memory_sentence,
    pass_name,
    stage_facts,
    stage_spans,
)
from dpro_search.parallel.costs.domain import harder
from dpro_search.parallel.costs.recorded import RankWork
from dpro_search.parallel.file.description import ParallelDescription
from dpro_search.parallel.file.usual_strategy import MEMORY_HEADROOM, usual_of
from dpro_search.parallel.frameworks import FRAMEWORKS
from dpro_search.parallel.prepared import PreparedJob, StepReplay
from dpro_search.parallel.search.changes import change_text, remedies, single_changes
from dpro_search.parallel.search.ranking import family, ranked
from dpro_search.parallel.search.space import StrategySpace
from dpro_search.parallel.settings import settings_of, strategy_text
from dpro_search.parallel.steps.step_prices import StepPrices
from dpro_search.parallel.strategy import ParallelSettings
from dpro_search.parallel.timed.split import alone_us, predicted_split
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
    """A described job in a scenario.

    Parameters
    ----------
    description
        The job as its file describes it.
    scenario
        Changes of it under every plan.
    prepared
        What was prepared for scenarios of the same description; jobs in several scenarios share it.
    """

    title = "a parallel job"
    settings = ("ranks", "rate", "global_batch", "sequence", "precision", *SCALES)
    can_begin_with = True
    varies = False
    space: StrategySpace

    def __init__(
        self, description: ParallelDescription, scenario: Scenario | None = None, prepared: list[PreparedJob] | None = None
    ) -> None:
        self._described, self._prepared = description, [] if prepared is None else prepared
        self.scenario = scenario or Scenario()
        self._here = self._prepare(self.scenario)
        self.space, self.tensors = self._here.space, self._here.tensors
        self.askable = self.space.fields

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
        prepared = self._prepare(scenario)
        prepared.space.check(scenario.plan)
        return prepared.lowered(prepared.space.strategy(scenario.plan))

    def plans(self, scenario: Scenario) -> StrategySpace:
        return self._prepare(scenario).space

    def _prepare(self, scenario: Scenario) -> PreparedJob:
        """The job in a scenario, whatever its plan; prepared once."""
        scenario = replace(scenario, plan=Plan())
        for prepared in self._prepared:
            if prepared.scenario == scenario:
                return prepared
        self.check_changes(scenario)
        for scale in scenario.scales:
            if scale.rank is not None or scale.needs_ops:
                raise self.cannot("compute", f"be asked '{scale.text}': all ranks of a stage are one")
        if scenario.begins_with is not None:
            self._prepare(replace(scenario, begins_with=None)).space.check(scenario.begins_with)
        self._prepared.append(PreparedJob(self.title, self._described, scenario))
        return self._prepared[-1]

    def _in(self, scenario: Scenario) -> ParallelJob:
        self.lower(scenario)  # raises what it raises before anything is predicted
        job = ParallelJob(self._described, replace(scenario, plan=Plan()), self._prepared)
        job.memory_limit_bytes = self.memory_limit_bytes
        return job

    @property
    def description(self) -> ParallelDescription:
        """The job, with the cluster and the setting that it has in `scenario`."""
        return self._here.description

    @property
    def prices(self) -> StepPrices:
        """Prices of the job's steps in `scenario`."""
        return self._here.prices

    @property
    def work(self) -> Work:
        return self._here.work

    @property
    def workload(self) -> Callable[[Plan], Workload]:
        return lambda plan: self.description.workload(self.space.strategy(plan))

    def rank_work(self, plan: Plan) -> dict[str, RankWork]:
        """The work of a rank for a micro-batch, by the name of each block."""
        return self.prices.rank_work(self.space.strategy(plan))

    def _parts_us(self, plan: Plan) -> dict[str, float]:
        """The parts of a step under a plan."""
        replayable = self._here.lowered(self.space.strategy(plan)).replayable
        assert isinstance(replayable, StepReplay)
        return replayable.parts_us

    # What a plan costs.

    def split(self, plan: Plan) -> StepSplit:
        """Breakdown of the time of a step, in the parts that paced ranks measure."""
        return predicted_split(self.prices, self.space.strategy(plan))

    def alone_us(self, plan: Plan) -> AloneUs:
        """Times of a plan's exchanges on links that nothing else uses."""
        return alone_us(self.prices.workload_of(self.space.strategy(plan)))

    def plan_facts(self, plan: Plan) -> ParallelFacts:
        strategy, prediction = self.space.strategy(plan), self.predict(plan)
        memory_bytes = self._here.memory_bytes(strategy)
        possible = () if prediction.infeasible is None else remedies(self.predict, plan, strategy)
        return ParallelFacts(
            strategy=settings_of(strategy).settings,
            computation_us=computation_us(self.prices, strategy, self._parts_us(plan)["compute"]),
            memory_bytes=memory_bytes,
            infeasible=prediction.infeasible,
            remedies=possible,
            notes=(memory_sentence(memory_bytes, self.limit_bytes, possible),),
        )

    # Which plans there are.

    def ranked(self, settled: Callable[[Hashable, float], bool] = lambda family, bound_us: False) -> Iterator[BoundedPlan]:
        """Plans that fit in memory, in the order of a bound on their time."""
        limit = self._searched_bytes
        for strategy, bound_us in ranked(self.space.candidates, self.prices, math.inf if limit is None else limit, settled):
            yield BoundedPlan(self.space.plan(strategy), bound_us)

    def family(self, plan: Plan) -> Hashable:
        """Equal for plans that a list of different plans has once."""
        return family(self.space.strategy(plan))

    def listed(self, plans: Sequence[tuple[Plan, Prediction]]) -> list[ListedPlan]:
        """The whole strategy of each plan, what it gives and costs, its memory with the margin, and what it loses to the first."""
        best = plans[0][0] if plans else Plan()
        return [self._listed(plan, prediction, best) for plan, prediction in plans]

    def _listed(self, plan: Plan, prediction: Prediction, best: Plan) -> ListedPlan:
        strategy, peak = self.space.strategy(plan), prediction.peak_memory_bytes
        parts_us, best_us = self._parts_us(plan), self._parts_us(best)
        gives = efficiency(self.work, prediction.iteration_us)
        margin = None if self._here.device_bytes is None or peak is None else self._here.device_bytes - peak
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

    def search_facts(self) -> SearchFacts:
        """The setting that a search compares with, and the memory that plans may take."""
        name, facts = self._listed(Plan(), self.predict(Plan()), Plan())
        usual = usual_of(FRAMEWORKS[self.description.framework])
        chosen = self.description.chosen
        return SearchFacts(
            baseline=ComparedSetting(
                name=name,
                usual_plan=usual.words if chosen else None,
                source=usual.source if chosen else None,
                **fields_of(facts),
            ),
            memory=PlanMemory(
                device_bytes=self._here.device_bytes,
                limit_bytes=self._searched_bytes,
                headroom_pct=None if self.memory_limit_bytes is not None else MEMORY_HEADROOM * 100,
            ),
        )

    @property
    def _searched_bytes(self) -> int | None:
        """Memory that proposed plans may take: the limit that was given, or the device's memory less the headroom."""
        if self.memory_limit_bytes is not None or self._here.device_bytes is None:
            return self.limit_bytes
        return int(self._here.device_bytes * (1 - MEMORY_HEADROOM))

    @property
    def limit_bytes(self) -> int | None:
        """Memory that a rank may use: that of its device, or less if the user limits it."""
        known = [limit for limit in (self._here.device_bytes, self.memory_limit_bytes) if limit is not None]
        return min(known, default=None)

    def reasons(self, plans: Sequence[Plan]) -> tuple[str, ...]:
        """Sentences that say what today's plan and the other best plans lose to the first, and whether their order is certain."""
        if not plans:
            return ()
        best, *others = plans
        parts = self._parts_us(best)
        sentences = []
        for number, plan in enumerate(others[:_MOST_COMPARED], 2):
            sentences.append(comparison(f"Plan {number}", "plan 1", self._parts_us(plan), parts))
        if others:
            domain = harder(*(self.prices.domain(self.space.strategy(plan)) for plan in (best, others[0])))
            sentences += filter(None, [doubt(self.predict(best).iteration_us, self.predict(others[0]).iteration_us, domain)])
        if Plan() not in plans[: _MOST_COMPARED + 1]:
            today = "The usual plan" if self.description.chosen else "The described setting"
            sentences.append(comparison(today, "plan 1", self._parts_us(Plan()), parts))
        return (*sentences, *self._stated())

    def _stated(self) -> Iterator[str]:
        """Sentences on the setting that a search compares with, and on the memory that it leaves free."""
        if self.description.chosen:
            usual = usual_of(FRAMEWORKS[self.description.framework])
            name, plan = self.description.framework, strategy_text(self.space.today)
            yield f"Compared with a usual plan of {name}: {plan} ({usual.words}). Sources: {usual.source}."
        limit = self._searched_bytes
        if limit is None:
            return
        if self.memory_limit_bytes is not None:
            yield f"Plans may take {size_text(limit)} of memory, as given."
        elif self._here.device_bytes is not None:
            has, spare = size_text(self._here.device_bytes), MEMORY_HEADROOM * 100
            yield (
                f"Plans may take {size_text(limit)} of the {has} of a device: {spare:.1f} % are left free, the mean error of "
                "predicted memory. --memory-limit sets another limit."
            )

    # One iteration, op by op.

    def parallel_setting(self, plan: Plan, name: str) -> ParallelSetting:
        strategy, prediction, facts = self.space.strategy(plan), self.replayed(plan), self.plan_facts(plan)
        return ParallelSetting(
            name=name,
            step_us=prediction.iteration_us,
            interval_us=prediction.interval_us,
            parts_us={**prediction.breakdown_us, "compute": 0.0, **facts.computation_us},
            memory_bytes=facts.memory_bytes,
            limit_bytes=self.limit_bytes,
            strategy=facts.strategy,
            stages=stage_spans(self.timeline(plan), strategy.pp),
            efficiency=fields_of(efficiency(self.work, prediction.iteration_us)),
        )

    def diagnose(self) -> Diagnosis:
        plan, strategy = Plan(), self.space.today
        timeline, prediction, more = self.timeline(plan), self.replayed(plan), self.plan_facts(plan)
        gains = self._gains(prediction.iteration_us)
        return ParallelDiagnosis(
            iteration_us=prediction.iteration_us,
            measured_iteration_us=None,
            breakdown_us=prediction.breakdown_us,
            peak_memory_bytes=prediction.peak_memory_bytes,
            critical_path=path_totals(timeline),
            critical_ops=critical_ops(timeline, row_name=pass_name),
            ranks=stage_facts(timeline, strategy),
            gains=gains,
            findings=(*more.notes, *findings(prediction.breakdown_us, gains)),
            warnings=tuple(self.description.warnings),
            **fields_of(more),
        )

    def _gains(self, base_us: float) -> tuple[PredictedGain, ...]:
        """Gains of other speeds and of single changes of the plan that are legal, fit into memory, and gain anything."""
        predicted_us = {text: self._at_speed(text).replayable.iterations().iteration_us for text in _SPEEDS}
        for values in single_changes(self.space.today):
            try:
                changed = self.predict(Plan.of(**values))
            except InputError:
                continue
            if changed.infeasible is None:
                predicted_us[change_text(values)] = changed.iteration_us
        return sorted_gains(base_us, {text: us for text, us in predicted_us.items() if us < base_us})

    def _at_speed(self, text: str) -> Lowered:
        return self.lower(self.scenario.then(Scenario(scales=(Scale.parse(text),))))
