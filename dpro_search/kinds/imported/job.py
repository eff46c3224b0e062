"""`Imported`: a job of which nothing is known but a trace with streams and dependencies, or the operations of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Self

import numpy as np

from dpro_search.collect.readers.straggler_analysis import FORMAT as PIPELINE_FORMAT
from dpro_search.collect.trace import CollectiveKind, EventKind, Ints, Trace
from dpro_search.errors import InputError
from dpro_search.kinds._options import PlanOptions, refuse_compute
from dpro_search.kinds.recorded.job import ProfiledJob
from dpro_search.kinds.recorded.steps import MeasuredSteps, RecordedSteps
from dpro_search.replay.device_time import busiest_us
from dpro_search.replay.replayer import replay
from dpro_search.replay.sensitivity import StragglerGone
from dpro_search.space.recorded.pipeline_parallel import pipeline_graph
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.scenario import Scale, Scenario
from dpro_search.space.transformations import PlanningFacts, PlanSpace


class Imported(ProfiledJob):
    """Its knobs are not known, so there are no plans."""

    title = "an imported trace"

    @classmethod
    def of(cls, trace: Trace, options: PlanOptions) -> Self:
        refuse_compute(options, trace)
        return cls(trace)

    def plans(self, scenario: Scenario) -> PlanSpace:
        return PlanSpace(PlanningFacts(name=self.title, tensors=self.tensors), [], why_empty=self._nothing_to_search())

    def _nothing_to_search(self) -> str:
        """Why the trace has no plans; empty: nothing more is known than that it has none."""
        events = self.trace.events
        kinds = np.unique(events.collective_kind[events.kind == EventKind.COLLECTIVE]).tolist()
        if self.trace.meta.format != "kineto":
            return ""
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
        """Steps by operation where the trace was recorded so, else by streams."""
        return (PipelineSteps if self.trace.meta.format == PIPELINE_FORMAT else RecordedSteps)(self.trace)


class PipelineSteps(RecordedSteps):
    """As `RecordedSteps`, but for recordings whose steps are samples of a long job.

    Such steps do not follow each other, so what is measured and predicted is a step by itself: from its start to the last end of
    any rank. Steps are graphs of `space.recorded.pipeline_parallel`.
    """

    are_samples = True

    @cached_property
    def measured(self) -> MeasuredSteps:
        """Measured lengths of all steps."""
        steps = self.trace.steps
        lengths = dict(zip(steps.index.tolist(), (steps.end_us - steps.start_us).tolist(), strict=True))
        return MeasuredSteps(iterations_us=dict(sorted(lengths.items())))

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(self.measured.iterations_us)

    @property
    def unmeasured(self) -> str:
        return ""  # steps are measured by themselves

    def refused_holdout(self, step: int) -> InputError:
        measured_us = self.measured.iterations_us
        return InputError(
            f"--holdout-step {step}: {len(measured_us)} steps were recorded, from {min(measured_us)} to {max(measured_us)}"
        )

    @property
    def has_launches(self) -> bool:
        return False

    def graph(self, step: int, without: Sequence[int] = ()) -> ReplayGraph:
        return pipeline_graph(self.trace, [step])

    def sampled_graph(self, step: int, without: Sequence[int] = ()) -> ReplayGraph:
        """The step with the median durations of all steps but those left out, and a sample for each."""
        return pipeline_graph(self.trace, [number for number in self.numbers if number not in without])

    def scaled(self, step: int, graph: ReplayGraph, scale: Scale) -> ReplayGraph:
        if scale.what == "usual" and scale.rank is not None:
            return StragglerGone(rank=scale.rank).apply(graph)
        raise InputError(f"'{scale.text}': the trace holds operations of a pipeline, not kernels and their launches")

    def rows(self, step: int) -> Ints:
        return np.zeros(0, np.int64)

    def has_own_durations(self, step: int) -> bool:
        return True

    def busy_us(self, step: int, graph: ReplayGraph) -> float:
        return busiest_us(graph, np.zeros(len(graph)))

    def own_durations(self) -> dict[int, tuple[float, float]]:
        """Measured and replayed length of each step, with the durations that it had itself."""
        return {step: (us, replay(self.graph(step)).iteration_us) for step, us in self.measured.iterations_us.items()}
