"""`PlannedSteps`: recorded steps whose plans rewrite their op graphs, and the predictor that replays what they become."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Self

import msgspec
import numpy as np

from dpro_search.collect.trace import CollectiveKind, Floats, Trace
from dpro_search.costmodel.collectives.recorded import CollectivePrices
from dpro_search.errors import InputError
from dpro_search.kinds.recorded.cluster import recorded_place
from dpro_search.kinds.recorded.job import RecordedSteps, as_prediction
from dpro_search.kinds.recorded.predictor import RecordedPrediction, RecordedPredictor
from dpro_search.quantities import size_text
from dpro_search.replay.timeline import Timeline
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.recorded.cluster_change import Placed, Recorded
from dpro_search.space.recorded.events import RUNS
from dpro_search.space.recorded.memory import MemoryChange, peak_bytes
from dpro_search.space.recorded.ops import RecordedOps
from dpro_search.space.recorded.step_edit import StepEdit
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.scenario import ClusterChange, Scale
from dpro_search.space.transformations import PlanSpace

Rewriting = Callable[[StepEdit, int, Plan], None]


class PlannedPredictor(RecordedPredictor):
    """As `RecordedPredictor`, of the recorded steps under a plan.

    Parameters
    ----------
    prepare
        Cuts the ops of a step where plans change them.
    rewrite
        Changes a prepared step as a plan says.
    """

    def __init__(
        self, trace: Trace, *, without: Sequence[int] = (), prepare: Callable[[StepEdit, int], None], rewrite: Rewriting
    ) -> None:
        super().__init__(trace, without=without)
        self._prepare, self._rewrite = prepare, rewrite
        self._plan = Plan()
        self._prepared: dict[int, StepEdit] = {}

    def under(self, plan: Plan) -> Self:
        """The same job under a plan."""
        if plan == self._plan:
            return self
        self.ops  # noqa: B018 (they are the same, and take longest)
        changed = copy.copy(self)
        changed._plan, changed._asked = plan, {}
        changed._replays = self._replays if plan == Plan() else {}
        changed.__dict__.pop("graph", None)
        changed.__dict__.pop("_clock_ends", None)
        return changed

    def with_ops(self, ops: RecordedOps) -> PlannedPredictor:
        return self._with(ops, self._prepare, self._rewrite)

    def _at_durations(self, duration_us: Floats) -> PlannedPredictor:
        return self.with_ops(replace(self.ops, duration_us=duration_us)).under(self._plan)

    def of_job(self, job: PlannedSteps) -> PlannedPredictor:
        """The same steps, prepared and rewritten with the prices of another job."""
        return self._with(self.ops, job._prepare, job._rewrite)

    def _with(self, ops: RecordedOps, prepare: Callable[[StepEdit, int], None], rewrite: Rewriting) -> PlannedPredictor:
        changed = PlannedPredictor(self._trace, without=self._without, prepare=prepare, rewrite=rewrite)
        changed.__dict__["ops"] = ops
        return changed

    def sampled(self, scales: Sequence[Scale] = (), *, samples: int, seed: int = 0) -> Floats:
        if self._plan == Plan():
            return super().sampled(scales, samples=samples)
        replays_us = np.array(self.predict(scales).steps_us)
        sampled_us: Floats = np.random.default_rng(seed).choice(replays_us, samples)
        return sampled_us

    def op_count(self) -> int:
        """How many ops a step has."""
        return len(self.graph if self._plan == Plan() else self._changed(self.middle_step, ()))

    def _has_own_durations(self, step: int) -> bool:
        return self._plan == Plan() and super()._has_own_durations(step)

    def _alternatives(self, scales: Sequence[Scale]) -> Iterator[list[Scale]]:
        yield from super()._alternatives(scales)
        if self._plan != Plan():  # Unknown time may be a wait for what the plan changes.
            yield [Scale(text="unknown=0", what="unknown", factor=0.0)]

    def _changed(self, step: int, scales: Sequence[Scale]) -> ReplayGraph:
        """The step under the plan: single sorts of recorded ops change before it is rewritten, all others after."""
        if self._plan == Plan():
            return super()._changed(step, scales)
        by_op = [scale for scale in scales if scale.needs_ops]
        foreign = next((scale for scale in by_op if scale.what == "collectives" or scale.group is not None), None)
        if foreign is not None:
            raise InputError(f"'{foreign.text}': a plan posts other collectives than the recorded ones; use communication= with it")
        edit = self._edit(step, by_op)
        self._rewrite(edit, step, self._plan)
        return self._scaled(step, edit.graph(), [scale for scale in scales if not scale.needs_ops])

    def _edit(self, step: int, scales: Sequence[Scale]) -> StepEdit:
        if not scales and step in self._prepared:
            return self._prepared[step].copy()
        edit = StepEdit(self.ops, step, self._scaled(step, self._graph_of(step), scales))
        self._prepare(edit, step)
        if scales:
            return edit
        self._prepared[step] = edit
        return edit.copy()


class PlannedSteps(RecordedSteps):
    """A job whose plans change its collectives. A subclass says how (`_rewrite`), and which there are (`_space`)."""

    predictor: PlannedPredictor

    def __init__(self, trace: Trace, space: PlanSpace) -> None:
        super().__init__(trace)
        self.space = space

    @abstractmethod
    def _prepare(self, edit: StepEdit, step: int) -> None:
        """Cut the ops of a step where plans change them."""

    @abstractmethod
    def _rewrite(self, edit: StepEdit, step: int, plan: Plan) -> None:
        """Change a prepared step as a legal plan says."""

    def _predictor(self, *, without: Sequence[int] = ()) -> PlannedPredictor:
        return PlannedPredictor(self.trace, without=without, prepare=self._prepare, rewrite=self._rewrite)

    @cached_property
    def prices(self) -> CollectivePrices:
        """Times of collectives on the recorded cluster."""
        return prices_of(self.trace, self.predictor.ops, self._part_bytes())

    def _part_bytes(self) -> dict[int, int]:
        """Bytes of the collectives that the trace has without a size, where the job knows them, by event."""
        return {}

    def _moved(self, change: ClusterChange) -> Self:
        changed = super()._moved(change)
        changed.__dict__.pop("prices", None)  # they are of the moved collectives then
        changed.predictor = changed.predictor.of_job(changed)
        return changed

    @property
    def place(self) -> Placed | None:
        """The place where the job runs; None: the machine that it was recorded on is not known."""
        if self._elsewhere is not None:
            return self._elsewhere.place
        recorded, _ = self._recorded_place
        return None if recorded.cluster is None else Placed(cluster=recorded.cluster, ranks=recorded.ranks)

    @property
    def place_is_unknown(self) -> str:
        """Why it is not known where the job runs."""
        return self._recorded_place[1]

    @cached_property
    def _recorded_place(self) -> tuple[Recorded, str]:
        return recorded_place(self.trace.meta, needed=False)

    def _memory_changes(self, plan: Plan) -> Sequence[MemoryChange] | None:
        """Changes of allocated memory by a plan; None: not known."""
        return None if plan != Plan() else ()

    def _peak_memory_bytes(self, plan: Plan) -> int | None:
        if not len(self.trace.memory):
            return None
        changes = self._memory_changes(plan)
        return None if changes is None else peak_bytes(self.trace.memory, changes)

    def _least_bytes(self, plan: Plan) -> int | None:
        """Memory of parameters, gradients and the optimizer's state alone under a plan; None: not known."""
        return None

    @property
    def _optimizer_copies(self) -> int:
        """How many times the parameters the optimizer keeps, by its name; 0 of those that may keep nothing."""
        return 2 if any(name.startswith("Optimizer.step#Adam") for name in self.trace.names) else 0

    def _predict(self, plan: Plan) -> Prediction:
        prediction = self._timed(plan)
        needed, at_least = prediction.peak_memory_bytes, ""
        if needed is None:
            needed, at_least = self._least_bytes(plan), "at least "
        if needed is None or self.place is None or (plan == Plan() and self._elsewhere is None):
            return prediction
        devices = {group.host.device for group in self.place.cluster.groups}
        known = [(device.memory_bytes, device.name) for device in devices if device.memory_bytes is not None]
        has, name = min(known, default=(needed, ""))
        if needed <= has:
            return prediction
        return msgspec.structs.replace(
            prediction, infeasible=f"needs {at_least}{size_text(needed)}, and {name} has {size_text(has)}"
        )

    def _timed(self, plan: Plan) -> Prediction:
        """The prediction, whatever memory it needs."""
        if plan == Plan():
            return super()._predict(plan)
        prediction = self.predictor.under(plan).predict(self._scales)
        interval_us = self._wider(prediction, self._compute_error_us(plan))
        if self._elsewhere is not None:  # by as much as the recorded plan's, for the same errors of the cost models
            unchanged = super()._predict(Plan())
            low, high = (end / unchanged.iteration_us - 1 for end in unchanged.interval_us)
            below, above = (end / prediction.iteration_us - 1 for end in interval_us)
            low, high = -math.hypot(low, below), math.hypot(high, above)
            interval_us = max(prediction.iteration_us * (1 + low), 0.0), prediction.iteration_us * (1 + high)
            prediction = replace(prediction, busy_us=min(prediction.busy_us, unchanged.floor_us))
        return msgspec.structs.replace(
            as_prediction(prediction, "extrapolated", self._peak_memory_bytes(plan)), interval_us=interval_us
        )

    def _compute_error_us(self, plan: Plan) -> float:
        """Uncertainty of the core time of compute that a plan adds, relative to its price (90 %)."""
        return 0.0

    def _wider(self, prediction: RecordedPrediction, compute_error_us: float) -> tuple[float, float]:
        """The interval with the error of collectives that nothing hides or that the job waits for, and of added compute."""
        errors = [self.prices.error(kind) for kind in CollectiveKind if self.prices.knows(kind)]
        exposed_us = prediction.breakdown_us["exposed_communication"]
        more_us = math.hypot(1.645 * max(errors, default=0.0) * exposed_us, compute_error_us)
        low_us, high_us = prediction.interval_us
        middle_us = prediction.iteration_us
        return max(middle_us - math.hypot(middle_us - low_us, more_us), 0.0), middle_us + math.hypot(high_us - middle_us, more_us)

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        return self.predictor.under(plan).sampled(self._scales, samples=samples, seed=seed)

    def op_count(self, plan: Plan) -> int:
        return self.predictor.under(plan).op_count()

    def timeline(self, plan: Plan) -> Timeline:
        return self.predictor.under(plan).timeline(self._scales)

    def assumed(self) -> Iterator[str]:
        yield from super().assumed()
        yield from self.prices.doubts
        if len(self.trace.memory):
            yield "memory is what tensors take; what the allocator holds beside them is not in the profile"
            return
        least = self._least_bytes(Plan())
        alone = "" if least is None else f"; parameters, gradients and the optimizer's state take {size_text(least)} at least"
        yield f"memory is not known: profile with profile_memory=True{alone}"


def prices_of(trace: Trace, ops: RecordedOps, known_bytes: Mapping[int, int]) -> CollectivePrices:
    """Prices of the trace's collectives whose sizes are known.

    If all ranks were recorded, every occurrence counts. If only one was, the minimum over the steps counts, because it contains the
    least waiting.


    `known_bytes` are those of events that have no size in the trace.
    """
    events = trace.events
    of_kind: dict[CollectiveKind, list[tuple[int, float]]] = defaultdict(list)
    alone: dict[tuple[CollectiveKind, int, int], list[float]] = defaultdict(list)
    for op in np.flatnonzero((ops.event >= 0) & np.isin(ops.step, ops.steps)).tolist():
        event = int(ops.event[op])
        kind, size = CollectiveKind(int(events.collective_kind[event])), int(events.size_bytes[event])
        size = size if size > 0 else known_bytes.get(event, -1)
        if kind is CollectiveKind.UNKNOWN or size <= 0 or ops.role[op] != RUNS:
            continue
        us = float(ops.duration_us[op] - ops.unexplained_us[op])
        if ops.collective[op] >= 0:
            of_kind[kind].append((size, us))
        else:
            alone[kind, int(events.tensor[event]), size].append(us)
    for (kind, _, size), durations_us in alone.items():
        of_kind[kind].append((size, min(durations_us)))
    return CollectivePrices(of_kind)
