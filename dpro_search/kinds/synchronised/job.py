"""`SynchronisedJob`: when a job of workers of unequal speed reaches its target loss, by the synchronisation scheme."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import msgspec
import numpy as np

from dpro_search.collect.trace import Floats, TensorInfo
from dpro_search.errors import InputError
from dpro_search.kinds._answers import ConvergenceFacts, TrainingFacts, fields_of
from dpro_search.kinds._facts import critical_ops
from dpro_search.kinds._job import Job, Table
from dpro_search.kinds._options import PlanOptions
from dpro_search.kinds.synchronised.diagnosis import findings, gains_of, tables, worker_facts
from dpro_search.kinds.synchronised.recording import RecordedRun, ShortRuns
from dpro_search.kinds.synchronised.space import WhichScheme
from dpro_search.kinds.synchronised.timeline import training_graph
from dpro_search.kinds.synchronised.training import Trainings
from dpro_search.replay.path_segments import path_totals
from dpro_search.replay.replayer import replay
from dpro_search.replay.synchronisation import TimeToLoss
from dpro_search.replay.timeline import Timeline
from dpro_search.runtime.schemes import Scheme, parse_scheme
from dpro_search.search.objective import BoundedPlan
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import ClusterChange, Scale
from dpro_search.space.transformations import JobFacts, PlanSpace

_REASONS = 2  # plans behind the best that a search explains


class SynchronisedJob(Job):
    """A job with the workers of its recording, or with others. An iteration is a training to the target loss."""

    title = "a job of workers of unequal speed"
    askable = ("synchronisation",)
    settings = ("ranks", "speeds", "delay", "target_loss", "compute", "communication")

    @classmethod
    def of(cls, source: ShortRuns, options: PlanOptions) -> Self:
        for name in ("compute", "all_reduce_model", "cluster_model", "precision_table"):
            if getattr(options, name):
                raise InputError(f"{cls.title} has no plans for '{name.replace('_', ' ')}'; it changes synchronisation")
        return cls(source, Trainings.of(source.runs, source.target_loss), source.runs[0].scheme)

    def __init__(self, source: ShortRuns, trainings: Trainings, today: Scheme, *, changed: bool = False) -> None:
        """A job.

        Parameters
        ----------
        today
            The scheme that it runs with without a plan.
        changed
            Whether workers, links, target or scheme are others than recorded.
        """
        self._source, self._trainings, self._today, self._changed = source, trainings, today, changed
        elements = source.runs[0].elements
        whole = TensorInfo(name="parameters", node="parameters", dtype="float32", shape=(elements,), size_bytes=4 * elements)
        self.tensors = (whole,)  # a commit holds all
        facts = JobFacts(name=self.title, tensors=self.tensors, values={"synchronisation": str(today)})
        momentum = trainings.factors
        self._which = WhichScheme(
            facts,
            workers=trainings.workers,
            longest_s=trainings.longest_s,
            momentum=momentum,
            collectives=source.framework != "mxnet",
        )
        self.space = PlanSpace(facts, [self._which])
        self._found: dict[Scheme, TimeToLoss] = {}

    @property
    def origin(self) -> str:
        return "recorded"

    # Workers, links and target.

    @property
    def cluster(self) -> ClusterSpec:
        return ClusterSpec(cores=tuple(range(self._trainings.workers)))

    @property
    def recorded_ranks(self) -> int:
        return self._source.workers

    def moved(self, change: ClusterChange) -> Job:
        """With other workers and links."""
        if change.machines is not None:
            raise InputError(f"{change.machines.name}: {self.title} is predicted for workers of given speeds: --set speeds=1:1:2:3")
        trainings = self._trainings
        if change.speeds is not None and change.ranks is not None:
            raise InputError("ranks and speeds both say how many workers there are: give one of them")
        if change.speeds is not None:
            trainings = trainings.with_speeds(change.speeds)
        if change.ranks is not None:
            trainings = trainings.with_workers(change.ranks)
        if trainings.workers < 2:
            raise InputError("one worker has nobody to exchange updates with; ask for two or more")
        if change.delay_us is not None:
            trainings = replace(trainings, delay_s=change.delay_us / 1e6)
        return self._with(trainings)

    def left_out(self, change: ClusterChange) -> tuple[str, ...]:
        more = () if change.speeds is not None else super().left_out(change)
        ways = {run.scheme.collective for run in self._source.runs}
        if len(ways) == 2:
            return more
        known, other = ("an all-reduce", "an update at a server") if True in ways else ("an update at a server", "an all-reduce")
        return (*more, f"{other} takes as long as {known}, of which a run was recorded")

    def scaled(self, scale: Scale) -> SynchronisedJob:
        if scale.rank is not None:
            scale.check_rank(self._trainings.workers)
        now = self._trainings
        if scale.what == "communication" and scale.rank is None and scale.group is None:
            commit_s = {way: each * scale.factor for way, each in now.commit_s.items()}
            return self._with(replace(now, commit_s=commit_s, delay_s=now.delay_s * scale.factor))
        if scale.what != "compute":
            raise self.cannot("scaled", f"be asked '{scale.text}'")
        if not scale.factor > 0:
            raise InputError(f"'{scale.text}': steps of no time are not simulated; the factor must be above 0")
        numbers = range(now.workers) if scale.rank is None else (scale.rank,)
        step_s = tuple(each * scale.factor if worker in numbers else each for worker, each in enumerate(now.step_s))
        return self._with(replace(now, step_s=step_s))

    def trained_to(self, loss: float) -> SynchronisedJob:
        fitted = Trainings.of(self._source.runs, loss)
        now = self._trainings
        return self._with(replace(fitted, step_s=now.step_s, commit_s=now.commit_s, delay_s=now.delay_s))

    can_begin_with = True

    def starting_from(self, plan: Plan) -> SynchronisedJob:
        return self._with(self._trainings, self._scheme(plan))

    def _with(self, trainings: Trainings, today: Scheme | None = None) -> SynchronisedJob:
        return SynchronisedJob(self._source, trainings, today or self._today, changed=True)

    # What a plan costs.

    @cached_property
    def _measured(self) -> tuple[RecordedRun, ...]:
        """Recorded runs of the job as it is, that reached its target."""
        target = self._trainings.target_loss
        today = (run for run in self._source.runs if run.scheme == self._today and run.workers == self._source.workers)
        return () if self._changed else tuple(run for run in today if run.curve[1].min() <= target)

    @property
    def measured_iteration_us(self) -> float | None:
        measured_us = self.measured_iterations_us()
        return float(np.median(measured_us)) if len(measured_us) else None

    def measured_iterations_us(self) -> Floats:
        target = self._trainings.target_loss
        return np.array([1e6 * run.curve[0][np.argmax(run.curve[1] <= target)] for run in self._measured])

    def _scheme(self, plan: Plan) -> Scheme:
        return self._today if plan.synchronisation is None else parse_scheme(plan.synchronisation)

    @property
    def today(self) -> Scheme:
        """The scheme without a plan."""
        return self._today

    @property
    def target_loss(self) -> float:
        """The target loss."""
        return self._trainings.target_loss

    def training(self, plan: Plan) -> TimeToLoss:
        """The simulated training under a plan."""
        scheme = self._scheme(plan)
        if scheme not in self._found:
            self._found[scheme] = self._trainings.predicted(scheme)
        return self._found[scheme]

    def _predict(self, plan: Plan) -> Prediction:
        training = self.training(plan)
        end_s = training.simulated.end_s if training.time_s is None else training.time_s
        low_s, high_s = training.interval_s
        never = (
            f"does not reach a loss of {self._trainings.target_loss:g} within {end_s:.0f} s" if training.time_s is None else None
        )
        return Prediction(
            iteration_us=1e6 * end_s,
            interval_us=(1e6 * min(low_s, end_s), 1e6 * (high_s if math.isfinite(high_s) else 2 * end_s)),
            breakdown_us={},
            peak_memory_bytes=None,
            source="recorded" if plan == Plan() and not self._changed else "extrapolated",
            infeasible=never,
        )

    def replayed(self, plan: Plan) -> Prediction:
        """With the mean time of a worker for steps, commits and waiting."""
        prediction = self.predict(plan)
        rows = [row["breakdown_us"] for row in self._workers(plan)]
        return msgspec.structs.replace(
            prediction, breakdown_us={name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
        )

    def plan_facts(self, plan: Plan) -> TrainingFacts:
        training, convergence = self.training(plan), self._trainings.convergence
        return TrainingFacts(
            synchronisation=str(training.scheme),
            target_loss=self._trainings.target_loss,
            time_to_loss_s=training.time_s,
            training_steps=training.steps,
            commits=training.commits,
            sent_bytes=2 * 4 * self._source.runs[0].elements * training.commits,
            waiting_share=training.waiting_share,
            convergence=ConvergenceFacts(drift=convergence.drift, staleness=convergence.staleness, runs=convergence.runs),
            notes=(f"An iteration is a training to a loss of {self._trainings.target_loss:g} by {training.scheme}.",),
        )

    def reasons(self, plans: Sequence[Plan]) -> tuple[str, ...]:
        words = [f"An iteration is a training to a loss of {self._trainings.target_loss:g}."]
        for number, plan in enumerate(plans[:_REASONS], 1):
            training = self.training(plan)
            words.append(f"Plan {number}: {_work(training)}.")
        return (*words, f"Today: {_work(self.training(Plan()))}.")

    def ranked(self, settled: Callable[[Hashable, float], bool]) -> Iterator[BoundedPlan]:
        """All plans: they are few, and no bound is known without a simulation."""
        yield BoundedPlan(Plan(), 0.0)
        for scheme in self._which.schemes():
            plan = self.space.simplest(Plan(synchronisation=str(scheme)))
            if plan != Plan():
                yield BoundedPlan(plan, 0.0)

    # One training, step by step.

    def op_count(self, plan: Plan) -> int:
        return len(self._graph(plan))

    def timeline(self, plan: Plan) -> Timeline:
        return replay(self._graph(plan))

    def _graph(self, plan: Plan) -> Any:
        self.space.check(plan)
        training = self.training(plan)
        until_s = training.simulated.end_s if training.time_s is None else training.time_s
        return training_graph(training.simulated, self._trainings.paces(training.scheme), until_s)

    def _workers(self, plan: Plan) -> list[dict[str, Any]]:
        training = self.training(plan)
        return worker_facts(training, self._trainings.paces(training.scheme))

    def diagnose(self) -> dict[str, Any]:
        """The facts of `Job.diagnose`, and ``target_loss``."""
        plan = Plan()
        prediction, timeline, rows = self.replayed(plan), self.timeline(plan), self._workers(plan)
        gains = gains_of(self, prediction.iteration_us, self._trainings.step_s)
        plan_facts = fields_of(self.plan_facts(plan))
        plan_facts = plan_facts | {"bytes": plan_facts.pop("sent_bytes"), "notes": plan_facts.pop("notes")}
        return {
            "iteration_us": prediction.iteration_us,
            "measured_iteration_us": self.measured_iteration_us,
            "breakdown_us": prediction.breakdown_us,
            **plan_facts,
            "critical_path": msgspec.to_builtins(path_totals(timeline)),
            "critical_ops": critical_ops(timeline),
            "ranks": rows,
            "gains": gains,
            "findings": findings(self.training(plan), self._trainings, rows, gains),
            "warnings": list(self._source.warnings),
        }

    def tables(self, facts: Mapping[str, Any]) -> list[Table]:
        return tables(facts)


def _work(training: TimeToLoss) -> str:
    waiting = f"waiting {training.waiting_share:.0%} of the time"
    return f"{training.scheme}, {training.steps} steps and {training.commits} commits, {waiting}"
