"""What jobs of PyTorch have in common, whose ranks run a program on their main threads: `ProgramJob`, its gains and diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec

from dpro_search.collect.trace import Floats, Trace
from dpro_search.costmodel.horovod import CommCosts
from dpro_search.errors import InputError
from dpro_search.graph.measured import measured_iteration_us
from dpro_search.kinds._base import Comparison, Job, Table
from dpro_search.kinds._evaluate import held_out_step, own_durations_of_steps
from dpro_search.kinds._facts import critical_ops, gain_table, rank_facts, rank_table
from dpro_search.kinds._program import ProgramPredictor
from dpro_search.kinds._terms import cost_terms
from dpro_search.machine import Calibration
from dpro_search.quantities import time_text
from dpro_search.replay.ddp.ops import iteration_ops
from dpro_search.replay.outputs import MeasuredOps, measured_ops
from dpro_search.replay.path_segments import Segment, path_segments
from dpro_search.replay.timeline import Timeline
from dpro_search.report.quality import Term
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import CLUSTER_SETTINGS, SCALES, Scale

_Predictor = TypeVar("_Predictor", bound=ProgramPredictor)
_Gains = list[dict[str, float | str]]


class ProgramJob(Job, Generic[_Predictor]):
    """A job whose `ProgramPredictor` prices its plans."""

    settings = (*CLUSTER_SETTINGS, *SCALES)
    predictor_type: ClassVar[type[ProgramPredictor]]

    def __init__(self, predictor: _Predictor, trace: Trace | None = None) -> None:
        if trace is not None:
            self.trace = trace
        self.predictor: _Predictor = predictor
        self.tensors = predictor.tensors

    def _predict(self, plan: Plan) -> Prediction:
        return self.predictor.predict(plan)

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        return self.predictor.sampled(plan, samples=samples, seed=seed, on_sample=on_sample)

    @property
    def calibration(self) -> Calibration:
        return self.predictor.calibration

    @property
    def cluster(self) -> ClusterSpec:
        return self.predictor.wanted_cluster

    def on(self, cluster: ClusterSpec) -> Self:
        return self._with(self.predictor.at(cluster=cluster))

    def scaled(self, scale: Scale) -> Self:
        return self._with(scaled(self.predictor, scale))

    def _with(self, predictor: _Predictor) -> Self:
        """The same job with another predictor."""
        raise NotImplementedError

    def op_count(self, plan: Plan) -> int:
        return len(self.predictor.graph)

    def timeline(self, plan: Plan) -> Timeline:
        return iteration_ops(self.predictor.job(plan), self.predictor.timeline(plan))

    def measured_ops(self, timeline: Timeline) -> MeasuredOps | None:
        replayed = self.predictor.timeline(Plan())
        return measured_ops(self.trace, int(self.predictor.graph.steps[replayed.sample_of[replayed.typical]]))

    def held_out(self, step: int) -> Comparison:
        return held_out_step(self.trace, step, self.predictor_type)

    def own_durations(self) -> Comparison:
        return own_durations_of_steps(self.trace, self.predictor_type)

    def terms(self) -> tuple[Term, ...]:
        return cost_terms(self.predictor.costs)


def scaled(predictor: _Predictor, scale: Scale) -> _Predictor:
    """The predictor of the job with a part that takes another time.

    Raises
    ------
    InputError
        The rank does not exist, or the link's rate is not known.
    """
    if scale.what == "bandwidth":
        return predictor.at(cluster=predictor.wanted_cluster.faster(scale.factor, scale.text))
    if scale.what == "communication":
        if scale.rank is not None:
            raise InputError(f"'{scale.text}': communication of all ranks can be scaled, not of one")
        return predictor.at(costs=_cheaper(predictor.costs, scale.factor))
    scale.check_rank(predictor.graph.ranks)
    return predictor.faster(scale.factor, scale.rank)


def ranked_gains(predictor: ProgramPredictor, changed: Mapping[str, Prediction]) -> list[dict[str, float | str]]:
    """The questions that every job raises and those of its own kind with their answers, largest gain first."""
    base_us = predictor.predict(Plan()).iteration_us
    texts = ["compute=0.9", "communication=0"]
    texts += [f"rank{rank}.compute=0.9" for rank in range(predictor.graph.ranks)]
    texts += ["bandwidth=2"] if predictor.cluster.rate_bps is not None else []
    answers = {text: scaled(predictor, Scale.parse(text)).predict(Plan()) for text in texts} | dict(changed)
    found: list[dict[str, float | str]] = [
        {"what_if": text, "predicted_iteration_us": answer.iteration_us, "gain_us": base_us - answer.iteration_us}
        for text, answer in answers.items()
    ]
    return sorted(found, key=lambda row: -float(row["gain_us"]))


def diagnosis(
    trace: Trace,
    predictor: ProgramPredictor,
    gained: _Gains,
    findings: Callable[[Sequence[Segment], _Gains, float], tuple[str, ...]],
) -> dict[str, Any]:
    """The facts of `Job.diagnose` that any such job has."""
    job, timeline = predictor.job(Plan()), predictor.timeline(Plan())
    ops = iteration_ops(job, timeline)
    path = path_segments(ops)
    return {
        "iteration_us": timeline.iteration_us,
        "measured_iteration_us": measured_iteration_us(trace),
        "critical_path": msgspec.to_builtins(path),
        "critical_ops": critical_ops(ops),
        "ranks": rank_facts(trace, timeline.rank_breakdown_us),
        "gains": gained,
        "findings": list(findings(path, gained, timeline.iteration_us)),
        "warnings": list(trace.meta.warnings),
    }


def diagnosis_tables(facts: Mapping[str, Any], own: Table) -> list[Table]:
    """The facts of `diagnosis` for people, with a table of the kind of job's own."""
    path = [
        (
            {"compute": "compute", "late_rank": f"others wait for it, {row['name']}"}.get(row["kind"], row["name"]),
            "" if row["rank"] < 0 else str(row["rank"]),
            time_text(row["start_us"]),
            time_text(row["duration_us"]),
        )
        for row in facts["critical_path"]
    ]
    return [
        Table(title="critical path", columns=("what", "rank", "from", "takes"), rows=path),
        rank_table(facts["ranks"]),
        own,
        gain_table(facts["gains"], facts["iteration_us"]),
    ]


def _cheaper(costs: CommCosts, factor: float) -> CommCosts:
    names = ("alpha_busy_us", "alpha_more_us", "alpha_tail_us", "beta_busy_us", "beta_tail_us", "cpu_us", "collective_cpu_us")
    return replace(costs, **{name: max(getattr(costs, name) * factor, 1e-9) for name in names})
