"""`Fsdp`: a fully sharded job, whose plans set how its units gather and keep their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpro_search.collect.trace import Trace
from dpro_search.kinds._base import PlanOptions, Table, refuse_compute
from dpro_search.kinds._program_job import ProgramJob
from dpro_search.kinds.fsdp.predictor import NAME, FsdpPredictor


class Fsdp(ProgramJob[FsdpPredictor]):
    """Predictions of prefetching and resharding."""

    title = NAME
    askable = ("prefetch", "reshard_after_forward")
    predictor_type = FsdpPredictor

    def __init__(self, predictor: FsdpPredictor, trace: Trace | None = None) -> None:
        super().__init__(predictor, trace)
        self.space = predictor.space

    def _with(self, predictor: FsdpPredictor) -> Fsdp:
        return Fsdp(predictor, self.trace)

    def diagnose(self) -> dict[str, Any]:
        from dpro_search.kinds.fsdp.diagnosis import diagnosis

        return diagnosis(self.trace, self.predictor)

    def tables(self, facts: Mapping[str, Any]) -> list[Table]:
        from dpro_search.kinds.fsdp.diagnosis import diagnosis_tables

        return diagnosis_tables(facts)


def fsdp_job(trace: Trace, options: PlanOptions) -> Fsdp:
    """A recorded fully sharded job; raises `InputError` for options that it does not have."""
    refuse_compute(options, trace, Fsdp.askable)
    return Fsdp(FsdpPredictor.from_trace(trace), trace)
