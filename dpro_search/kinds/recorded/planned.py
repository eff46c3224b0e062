"""`PlannableJob`: a profiled job whose plans rewrite the op graphs of its recorded steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from dpro_search.collect.trace import CollectiveKind, Trace
from dpro_search.kinds._options import PlanOptions
from dpro_search.kinds.recorded.cluster import StepsOnCluster
from dpro_search.kinds.recorded.job import ProfiledJob, recorded_replay
from dpro_search.kinds.recorded.replay import Rewriting
from dpro_search.kinds.recorded.steps import RecordedSteps
from dpro_search.quantities import size_text
from dpro_search.replay.lowered import Lowered
from dpro_search.space.plan import Plan
from dpro_search.space.recorded.memory import MemoryChange, peak_bytes
from dpro_search.space.recorded.step_edit import StepEdit
from dpro_search.space.scenario import Scale, Scenario
from dpro_search.space.transformations import PlanSpace

_Z_90 = 1.645  # standard deviations within which nine in ten values of a normal distribution lie


class PlannableJob(ProfiledJob):
    """A job whose plans change its collectives. A subclass says how (`_rewrite`), and which there are (`_plans_on`)."""

    _possible_plans: tuple[StepsOnCluster, PlanSpace] | None = None  # See `_check`.

    def __init__(self, trace: Trace, *, allow_lossy: bool = False) -> None:
        super().__init__(trace)
        self._allow_lossy = allow_lossy

    @cached_property
    def recorded_steps(self) -> RecordedSteps:
        return RecordedSteps(self.trace, prepare=self._prepare, part_bytes=self._part_bytes)

    @abstractmethod
    def _prepare(self, edit: StepEdit, step: int) -> None:
        """Cut the ops of a step where plans change them."""

    @abstractmethod
    def _rewriter(self, plan: Plan, on_cluster: StepsOnCluster) -> Callable[[StepEdit, int], None]:
        """A function that changes a prepared step as a legal plan says."""

    @abstractmethod
    def _plans_on(self, on_cluster: StepsOnCluster, *, allow_lossy: bool) -> PlanSpace:
        """The plans that the job can follow on a cluster."""

    def plans(self, scenario: Scenario) -> PlanSpace:
        on_cluster = self._unplanned(replace(scenario, plan=Plan())).on_cluster
        allowed = PlanOptions(allow_lossy=self._allow_lossy).allowing(scenario.plan)
        return self._plans_on(on_cluster, allow_lossy=allowed.allow_lossy)

    def _planned(self, lowered: Lowered, plan: Plan, on_cluster: StepsOnCluster) -> Lowered:
        if self._possible_plans is None or self._possible_plans[0] is not on_cluster:
            self._possible_plans = on_cluster, self._plans_on(on_cluster, allow_lossy=True)
        self._possible_plans[1].check(plan)
        prices, unplanned = on_cluster.steps.prices, recorded_replay(lowered)
        rewriting = Rewriting(
            rewrite=self._rewriter(plan, on_cluster),
            unplanned=unplanned,
            price_error=_Z_90 * max((prices.error(kind) for kind in CollectiveKind if prices.knows(kind)), default=0.0),
            compute_error_us=self._compute_error_us(plan),
        )
        peak_memory_bytes, infeasible = self._memory(plan, on_cluster)
        return replace(
            lowered,
            replayable=replace(unplanned, rewriting=rewriting),
            as_recorded=False,
            peak_memory_bytes=peak_memory_bytes,
            infeasible=infeasible,
        )

    def _part_bytes(self) -> Mapping[int, int]:
        """Bytes of the collectives that the trace has without a size, where the job knows them, by event."""
        return {}

    def _compute_error_us(self, plan: Plan) -> float:
        """Uncertainty of the core time of compute that a plan adds (90 %)."""
        return 0.0

    @abstractmethod
    def _memory_changes(self, plan: Plan, on_cluster: StepsOnCluster) -> Sequence[MemoryChange] | None:
        """Changes of allocated memory by a plan; None: not known."""

    @abstractmethod
    def _least_bytes(self, plan: Plan, on_cluster: StepsOnCluster) -> int | None:
        """Memory of parameters, gradients and the optimizer's state alone under a plan; None: not known."""

    @property
    def _optimizer_copies(self) -> int:
        """How many times the parameters the optimizer keeps, by its name; 0 of those that may keep nothing."""
        return 2 if any(name.startswith("Optimizer.step#Adam") for name in self.trace.names) else 0

    def _memory(self, plan: Plan, on_cluster: StepsOnCluster) -> tuple[int | None, str | None]:
        if on_cluster.precision is not None:
            return None, None
        changes = self._memory_changes(plan, on_cluster) if len(self.trace.memory) else None
        peak_memory_bytes = None if changes is None else peak_bytes(self.trace.memory, changes)
        needed, at_least = peak_memory_bytes, ""
        if needed is None:
            needed, at_least = self._least_bytes(plan, on_cluster), "at least "
        if needed is None or (plan == Plan() and on_cluster.moved_to is None) or on_cluster.place is None:
            return peak_memory_bytes, None
        devices = {group.host.device for group in on_cluster.place.cluster.groups}
        known = [(device.memory_bytes, device.name) for device in devices if device.memory_bytes is not None]
        limit_bytes, name = min(known, default=(needed, ""))
        if needed <= limit_bytes:
            return peak_memory_bytes, None
        return peak_memory_bytes, f"needs {at_least}{size_text(needed)}, and {name} has {size_text(limit_bytes)}"

    def assumed(self, on_cluster: StepsOnCluster, scales: Sequence[Scale]) -> Iterator[str]:
        yield from super().assumed(on_cluster, scales)
        yield from on_cluster.steps.prices.doubts
        if len(self.trace.memory):
            yield "memory is what tensors take; what the allocator holds beside them is not in the profile"
            return
        least = self._least_bytes(Plan(), on_cluster)
        alone = "" if least is None else f"; parameters, gradients and the optimizer's state take {size_text(least)} at least"
        yield f"memory is not known: profile with profile_memory=True{alone}"
