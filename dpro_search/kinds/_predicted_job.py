"""`PredictedJob`: a job whose plans a `JobPredictor` predicts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Generic, Self, TypeVar

from dpro_search.collect.trace import Floats, Trace
from dpro_search.kinds._evaluate import held_out_step, own_durations_of_steps
from dpro_search.kinds._job import Comparison, Job
from dpro_search.kinds._predictor import JobPredictor
from dpro_search.kinds._terms import Term, cost_terms
from dpro_search.machine import Calibration
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import CLUSTER_SETTINGS, SCALES, Scale

Predictor = TypeVar("Predictor", bound=JobPredictor)


class PredictedJob(Job, Generic[Predictor]):
    """Predictions of one predictor."""

    trace: Trace
    settings: ClassVar[tuple[str, ...]] = (*CLUSTER_SETTINGS, *SCALES)
    predictor_type: ClassVar[type[JobPredictor]]

    def __init__(self, predictor: Predictor, trace: Trace | None = None) -> None:
        if trace is not None:
            self.trace = trace
        self.predictor: Predictor = predictor
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
        return self._with(self.predictor.scaled(scale))

    @abstractmethod
    def _with(self, predictor: Predictor) -> Self:
        """The same job with another predictor."""

    def held_out(self, step: int) -> Comparison:
        return held_out_step(self.trace, step, self.predictor_type)

    def own_durations(self) -> Comparison:
        return own_durations_of_steps(self.trace, self.predictor_type)

    def terms(self) -> tuple[Term, ...]:
        return cost_terms(self.predictor.costs)
