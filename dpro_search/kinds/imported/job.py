"""`Imported`: a job of which nothing is known but a trace with streams and dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from dpro_search.collect.trace import Trace
from dpro_search.kinds._base import PlanOptions, refuse_compute
from dpro_search.kinds._recorded import RecordedPredictor
from dpro_search.kinds._recorded_job import RecordedSteps
from dpro_search.kinds.imported.pipeline import recorded_predictor


class Imported(RecordedSteps):
    """Its knobs are not known, so there are no plans."""

    title = "an imported trace"

    @classmethod
    def of(cls, trace: Trace, options: PlanOptions) -> Self:
        refuse_compute(options, trace)
        return cls(trace)

    def _predictor(self, *, without: Sequence[int] = ()) -> RecordedPredictor:
        return recorded_predictor(self.trace, without=without)
