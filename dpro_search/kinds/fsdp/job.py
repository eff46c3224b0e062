"""`Fsdp`: a fully sharded job, whose plans set how its units gather and keep their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import Trace
from dpro_search.kinds._at_scale import AtScale, RankWorkload
from dpro_search.kinds._job import Job, Table
from dpro_search.kinds._options import PlanOptions, refuse_compute
from dpro_search.kinds._program_job import ProgramJob
from dpro_search.kinds.fsdp.predictor import NAME, FsdpPredictor
from dpro_search.kinds.fsdp.what_if import PLANS
from dpro_search.space.plan import Plan
from dpro_search.space.programs.fsdp_job import fsdp_steps
from dpro_search.space.schemes import FsdpSettings


class Fsdp(ProgramJob[FsdpPredictor]):
    """Predictions of prefetching and resharding."""

    title = NAME
    askable = ("prefetch", "reshard_after_forward")
    predictor_type = FsdpPredictor

    @classmethod
    def of(cls, trace: Trace, options: PlanOptions) -> Self:
        refuse_compute(options, trace, cls.askable)
        return cls(FsdpPredictor.from_trace(trace), trace)

    def __init__(self, predictor: FsdpPredictor, trace: Trace | None = None) -> None:
        super().__init__(predictor, trace)
        self.space = predictor.space

    def at_scale(self, cluster: Cluster, ranks: int | None = None) -> Job:
        """Units as recorded, gathered and scattered in rings over all ranks."""

        def workload(plan: Plan) -> RankWorkload:
            settings = FsdpSettings.of(plan)
            reshard = settings.reshard_after_forward is None
            steps, collectives = fsdp_steps(self.predictor.graph, prefetch=bool(settings.prefetch), reshard=reshard)
            alone = tuple((place,) for place in range(len(collectives)))
            return RankWorkload(steps=steps, groups=alone, collectives=collectives)

        return AtScale(
            title=self.title,
            tensors=self.tensors,
            space=self.space,
            workload=workload,
            cluster=cluster,
            ranks=ranks,
            trace=self.trace,
            questions=PLANS,
        )

    def _with(self, predictor: FsdpPredictor) -> Fsdp:
        return Fsdp(predictor, self.trace)

    @property
    def questions(self) -> Mapping[str, Plan]:
        return PLANS

    def diagnose(self) -> dict[str, Any]:
        from dpro_search.kinds.fsdp.diagnosis import diagnosis

        return diagnosis(self.trace, self.predictor)

    def tables(self, facts: Mapping[str, Any]) -> list[Table]:
        from dpro_search.kinds.fsdp.diagnosis import diagnosis_tables

        return diagnosis_tables(facts)
