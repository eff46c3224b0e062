"""`ProfiledFsdp`: a profiled fully sharded job, whose plans change how its units gather and reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

import msgspec
import numpy as np

from dpro_search.collect.trace import Trace
from dpro_search.costmodel.collectives.sharding import Sharding
from dpro_search.graph.sharded_units import ROOT, ShardedUnits, sharded_units_of, unit_groups
from dpro_search.kinds._diagnosis import Diagnosis, Table
from dpro_search.kinds._job import JobInScenario
from dpro_search.kinds._options import PlanOptions, refuse_compute
from dpro_search.kinds.recorded.cluster import StepsOnCluster
from dpro_search.kinds.recorded.diagnosis import ProfileDiagnosis, with_plans
from dpro_search.kinds.recorded.planned import PlannableJob
from dpro_search.quantities import size_text, time_text
from dpro_search.space.plan import Plan
from dpro_search.space.recorded.memory import MemoryChange, units_changes
from dpro_search.space.recorded.step_edit import StepEdit
from dpro_search.space.recorded.units import UnitPlan, cut_at_units, explain_units, with_units
from dpro_search.space.scenario import Scale, Scenario
from dpro_search.space.schemes import FsdpSettings
from dpro_search.space.transformations import PlanningFacts, PlanSpace
from dpro_search.space.transformations.sharding import (
    BackwardPrefetch,
    ForwardPrefetch,
    KeptUnits,
    RecomputedUnits,
    ReduceDtype,
    ShardRanks,
    UnitsTogether,
)

_QUESTIONS: dict[str, Plan] = {
    "prefetch=1": Plan.of(prefetch=True),
    "backward_prefetch_depth=2": Plan.of(backward_prefetch_depth=2),
    "reshard_after_forward=0": Plan.of(reshard_after_forward=False),
    "units_together=2": Plan.of(units_together=2),
    "reduce_dtype=bfloat16": Plan.of(reduce_dtype="bfloat16"),
    "shard_ranks=8": Plan.of(shard_ranks=8),
}


class ProfiledFsdp(PlannableJob):
    """Predictions of prefetching, resharding, units wrapped together, and on request of reductions in fewer bytes."""

    title = "a profiled fully sharded job"
    askable = (
        *("prefetch", "prefetch_depth", "backward_prefetch_depth", "reshard_after_forward", "kept_last_units", "kept_units"),
        *("units_together", "reduce_dtype", "shard_ranks", "recomputed_modules"),
    )

    @classmethod
    def of(cls, trace: Trace, options: PlanOptions) -> Self:
        refuse_compute(options, trace, cls.askable)
        return cls(trace, sharded_units_of(trace), allow_lossy=options.allow_lossy)

    def __init__(self, trace: Trace, units: ShardedUnits, *, allow_lossy: bool = False) -> None:
        super().__init__(trace, allow_lossy=allow_lossy)
        self.units = units
        self.tensors = units.tensors

    @property
    def _recorded_ranks(self) -> int:
        """All ranks of the recorded job."""
        return max(self.trace.meta.world_size or 0, self.trace.meta.ranks)

    def _shared_by(self, on_cluster: StepsOnCluster) -> int | None:
        """How many ranks share the parameters on a cluster without a plan; None: not known."""
        recorded = self.units.shared_by
        return recorded if on_cluster.place is None or recorded != self._recorded_ranks else on_cluster.place.ranks

    def _prepare(self, edit: StepEdit, step: int) -> None:
        cut_at_units(edit, self.units, step)
        explain_units(edit, self.trace, self.units, step)

    def _rewriter(self, plan: Plan, on_cluster: StepsOnCluster) -> Callable[[StepEdit, int], None]:
        units, unit_plan, prices = self.units, self._unit_plan(plan, on_cluster), on_cluster.steps.prices
        return lambda edit, step: with_units(edit, units, step, unit_plan, prices)

    def _unit_plan(self, plan: Plan, on_cluster: StepsOnCluster) -> UnitPlan:
        settings = FsdpSettings.of(plan)
        back = [each.unit for each in self.units.first.backward]  # the last of the forward pass first
        kept = back if settings.reshard_after_forward is False else settings.kept_units or back[: settings.kept_last_units or 0]
        sharding = None
        if settings.shard_ranks is not None:
            place, shared_by = on_cluster.place, self._shared_by(on_cluster)
            assert place is not None, "else refused"
            assert shared_by is not None, "likewise"
            sharding = Sharding(cluster=place.cluster, ranks=place.ranks, was=shared_by, becomes=settings.shard_ranks)
        return UnitPlan(
            ahead=settings.prefetch_depth or 1 if settings.prefetch else 0,
            backward_ahead=settings.backward_prefetch_depth or 1,
            kept=frozenset(kept),
            groups=unit_groups([tensor.name for tensor in self.tensors], settings.units_together),
            reduced_share=0.5 if settings.reduce_dtype else 1.0,
            again=frozenset(plan.recomputed_modules or ()),
            sharding=sharding,
        )

    def _memory_changes(self, plan: Plan, on_cluster: StepsOnCluster) -> list[MemoryChange] | None:
        if not self.units.tensors:
            return []  # there is no plan
        shared_by = FsdpSettings.of(plan).shard_ranks or self._shared_by(on_cluster)
        return units_changes(self.trace, self.units, self._unit_plan(plan, on_cluster), shared_by=shared_by)

    def _plans_on(self, on_cluster: StepsOnCluster, *, allow_lossy: bool) -> PlanSpace:
        units = self.units
        facts = PlanningFacts(name=self.title, tensors=units.tensors)
        if not units.tensors:
            return PlanSpace(facts, [], why_empty=f"{units.why}; search it on a cluster, like --cluster 16xhgx-h100")
        back = [each.unit for each in units.first.backward]
        unsized = None if units.sized else (
            "the profile does not have the sizes of the units' collectives; profile with record_shapes=True"
        )  # fmt: skip
        ranks = self._recorded_ranks if on_cluster.place is None else on_cluster.place.ranks
        shared_by, no_sharding = self._shared_by(on_cluster), unsized or self._no_sharding(on_cluster)
        return PlanSpace(
            facts,
            [
                ForwardPrefetch(facts, units=len(units.tensors)),
                BackwardPrefetch(facts, units=len(back)),
                KeptUnits(facts, back),
                UnitsTogether(facts, units=len(units.tensors) - 1, refused=unsized),
                ReduceDtype(facts, allow_lossy=allow_lossy, refused=unsized),
                ShardRanks(facts, ranks=ranks, shared_by=shared_by, refused=no_sharding),
                RecomputedUnits(facts, [each.unit for each in units.first.passes if each.unit != ROOT]),
            ],
        )

    def _no_sharding(self, on_cluster: StepsOnCluster) -> str | None:
        """Why other groups of ranks cannot share the parameters; None: they can."""
        if on_cluster.place is None:
            return f"what collectives of other groups of ranks take needs the machine: {on_cluster.recorded_on}"
        if self._shared_by(on_cluster) is None:
            return "the profile does not name the process groups"
        return None

    def _least_bytes(self, plan: Plan, on_cluster: StepsOnCluster) -> int | None:
        shared_by = FsdpSettings.of(plan).shard_ranks or self._shared_by(on_cluster)
        if not self.units.sized or shared_by is None:
            return None
        sizes = {tensor.name: tensor.size_bytes for tensor in self.tensors}
        kept = sum(sizes[unit] for unit in self._unit_plan(plan, on_cluster).kept)
        gathered = max(kept, sum(sorted(sizes.values())[-2:]))  # one unit computes while another is gathered
        return sum(sizes.values()) * (2 + self._optimizer_copies) // shared_by + gathered

    def _part_bytes(self) -> dict[int, int]:
        sizes = {tensor.name: tensor.size_bytes for tensor in self.tensors}
        steps = self.units.steps.values()
        gathers = {each.part: sizes[each.unit] for step in steps for each in (*step.forward, *step.backward)}
        return gathers | {each.parts[0]: sizes[each.unit] for step in steps for each in step.reductions}

    def assumed(self, on_cluster: StepsOnCluster, scales: Sequence[Scale]) -> Iterator[str]:
        yield self.units.why
        if self.units.tensors and (why := self._no_sharding(on_cluster)) is not None:
            yield f"other shard groups are not offered: {why}"
        yield from super().assumed(on_cluster, scales)

    def questions(self, scenario: Scenario) -> Mapping[str, Plan]:
        return _QUESTIONS

    def diagnose(self, here: JobInScenario) -> Diagnosis:
        return ProfiledFsdpDiagnosis(units=self._unit_facts(), **with_plans(here, self._profile_diagnosis(here)))

    def _unit_facts(self) -> tuple[ShardedUnit, ...]:
        facts = []
        for tensor in self.tensors:
            steps = self.units.steps.values()
            gathers = [each.part for step in steps for each in (*step.forward, *step.backward) if each.unit == tensor.name]
            reductions = [part for step in steps for each in step.reductions if each.unit == tensor.name for part in each.parts]
            facts.append(
                ShardedUnit(
                    unit=tensor.name,
                    size_bytes=tensor.size_bytes or None,
                    gathers=len(gathers) // len(self.units.steps),
                    gather_us=self._mean_us(gathers),
                    reduce_us=self._mean_us(reductions),
                )
            )
        return tuple(facts)

    def _mean_us(self, parts: list[int]) -> float | None:
        events = self.trace.events
        return float(np.mean(events.end_us[parts] - events.start_us[parts])) if parts else None


class ShardedUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A unit of a sharded model: its bytes, and its all-gathers and reductions with waits, mean over ranks and steps.

    None: not known.
    """

    unit: str
    size_bytes: int | None = msgspec.field(name="bytes")
    gathers: int
    gather_us: float | None
    reduce_us: float | None


class ProfiledFsdpDiagnosis(ProfileDiagnosis, frozen=True, kw_only=True, omit_defaults=True):
    """The diagnosis of a profiled FSDP job."""

    units: tuple[ShardedUnit, ...]

    @property
    def tables(self) -> Sequence[Table]:
        def shown(us: float | None) -> str:
            return "-" if us is None else time_text(us)

        rows = [
            (
                row.unit,
                "unknown" if row.size_bytes is None else size_text(row.size_bytes),
                str(row.gathers),
                shown(row.gather_us),
                shown(row.reduce_us),
            )
            for row in self.units
        ]
        columns = ("unit", "parameters", "gathers", "gather, with waits", "reduce")
        return (*super().tables, *([Table(title="units", columns=columns, rows=rows)] if rows else []))
