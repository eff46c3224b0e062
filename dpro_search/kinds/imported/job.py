"""`Imported`: a job of which nothing is known but a trace with streams and dependencies."""

from __future__ import annotations

from functools import cached_property
from typing import Self

import numpy as np

from dpro_search.collect.readers.straggler_analysis import FORMAT as PIPELINE_FORMAT
from dpro_search.collect.trace import CollectiveKind, EventKind, Trace
from dpro_search.kinds._options import PlanOptions, refuse_compute
from dpro_search.kinds.recorded.job import ProfiledJob
from dpro_search.kinds.recorded.pipeline import PipelineSteps
from dpro_search.kinds.recorded.steps import RecordedSteps


class Imported(ProfiledJob):
    """Its knobs are not known, so there are no plans."""

    title = "an imported trace"

    @classmethod
    def of(cls, trace: Trace, options: PlanOptions) -> Self:
        refuse_compute(options, trace)
        return cls(trace)

    @property
    def nothing_to_search(self) -> str:
        events = self.trace.events
        kinds = np.unique(events.collective_kind[events.kind == EventKind.COLLECTIVE]).tolist()
        if self.trace.meta.format != "kineto":
            return super().nothing_to_search
        if self.trace.meta.unrecorded_devices:
            return "the trace has launches of kernels, but no record of the device that ran them: there is nothing to search"
        if not kinds:
            return (
                "the trace shows no collective (one process, inference, or a profile without its communication): there is nothing "
                "to search; what-ifs such as kernels.gemm=0.5 and 'diagnose' answer"
            )
        names = ", ".join(CollectiveKind(kind).name.lower().replace("_", "-") if kind >= 0 else "unknown ones" for kind in kinds)
        return (
            f"the trace's collectives ({names}) are neither DDP's buckets nor FSDP's units, the same in all ranks and steps: there "
            "is nothing to search; what-ifs such as collectives.all_to_all=0 and 'diagnose' answer"
        )

    @cached_property
    def recorded_steps(self) -> RecordedSteps:
        """By operation where the trace was recorded so, else by streams."""
        return (PipelineSteps if self.trace.meta.format == PIPELINE_FORMAT else RecordedSteps)(self.trace)
