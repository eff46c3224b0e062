"""`Horovod`: a Horovod job, whose plans may also change its compute, its memory and its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import CommSettings, Floats, Trace
from dpro_search.costmodel.memory import peak_bytes
from dpro_search.errors import InputError
from dpro_search.graph.core_time import polls
from dpro_search.kinds._at_scale import AtScale, RankWorkload
from dpro_search.kinds._job import Job, Table
from dpro_search.kinds._options import PlanOptions
from dpro_search.kinds._predicted_job import PredictedJob
from dpro_search.kinds.horovod.exchanges import horovod_exchanges
from dpro_search.kinds.horovod.predictor import Predictor
from dpro_search.replay.exchanges import Exchange
from dpro_search.replay.horovod.ops import iteration_ops
from dpro_search.replay.outputs import MeasuredOps, measured_ops, perfetto_json
from dpro_search.replay.replayer import replay
from dpro_search.replay.timeline import Timeline
from dpro_search.space.data_parallel import rank_step_of
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import CLUSTER_SETTINGS, SCALES
from dpro_search.space.schemes import HorovodSettings
from dpro_search.space.tensorflow.fusion_moves import threshold_groups
from dpro_search.space.tensorflow.op_level import op_level, typical_step
from dpro_search.space.transformations import PlanSpace, Transformation, horovod_facts, horovod_space
from dpro_search.space.transformations.compute import ComputeGraph, transformed
from dpro_search.space.transformations.gradients import Accumulation, Compression
from dpro_search.space.transformations.horovod import AllReduceAlgorithms
from dpro_search.space.transformations.op_fusion import OpFusion
from dpro_search.space.transformations.precision import Precision
from dpro_search.space.transformations.recomputation import Recomputation

if TYPE_CHECKING:
    from dpro_search.costmodel.collectives.model_file import CommunicationModel
    from dpro_search.space.tensor_groups import TensorGroups

_COMMUNICATION = ("fusion_threshold_bytes", "cycle_time_us", "tensor_groups", "allreduce_algorithms")
_REMEMBERED = 64  # changed steps whose predictors are kept: samplers change communication more often than compute


class Horovod(PredictedJob[Predictor]):
    """Predictions by the replay of communication, after the step was changed as a plan's other fields say.

    Parameters
    ----------
    predictor
        The recorded job.
    compute
        The recorded step op by op; only needed with transformations.
    transformations
        What plans may do beyond fusing tensors and setting the cycle. Algorithms of all-reduces are among what plans may choose
        where the predictor knows what they take.
    trace
        The recording; None: of a predictor alone: only predictions are available.
    exact_groups
        Whether plans may name the tensors of a group.
    """

    title = "a Horovod job"
    askable = ("fusion_threshold_bytes", "cycle_time_us", "micro_batches", "compression")
    settings = ("groups", *CLUSTER_SETTINGS, *SCALES)
    recorded: CommSettings
    predictor_type = Predictor

    @classmethod
    def of(cls, trace: Trace, options: PlanOptions) -> Horovod:
        return horovod_job(trace, options)

    def __init__(
        self,
        predictor: Predictor,
        compute: ComputeGraph | None = None,
        transformations: tuple[Transformation, ...] = (),
        trace: Trace | None = None,
        *,
        exact_groups: bool = True,
    ) -> None:
        super().__init__(predictor, trace)
        self.recorded = predictor.recorded
        self.unplaced = predictor.graph.unplaced
        self.guides = exact_groups  # the collectives of an iteration tell samplers which tensors to group
        self._own, self._compute, self._exact_groups, self._changed = transformations, compute, exact_groups, False
        if predictor.all_reduces is not None:
            facts = horovod_facts(predictor.tensors, predictor.recorded)
            transformations = (AllReduceAlgorithms(facts, predictor.all_reduce_choice()), *transformations)
        self.space = horovod_space(predictor.tensors, predictor.recorded, others=transformations, exact_groups=exact_groups)
        self._steps: dict[Plan, _Step] = {Plan(): _Step(predictor, 0.0, 0.0)}

    def at_scale(self, cluster: Cluster, ranks: int | None = None) -> Job:
        """Groups are a plan's, or neighbours up to the threshold: what a cycle finds enqueued is not known of another cluster."""
        graph, recorded = self.predictor.graph, self.recorded
        number = {tensor.name: place for place, tensor in enumerate(self.tensors)}
        steps = tuple(rank_step_of(graph, rank) for rank in range(graph.ranks))

        def workload(plan: Plan) -> RankWorkload:
            named, threshold = plan.tensor_groups, HorovodSettings.of(plan).fusion_threshold_bytes
            if named is None and threshold is None:
                named = recorded.groups
            if named is None:
                named = threshold_groups(self.tensors, recorded.fusion_threshold_bytes if threshold is None else threshold)
            together = tuple(tuple(number[name] for name in group) for group in named)
            alone = tuple((place,) for place in number.values() if not any(place in group for group in together))
            return RankWorkload(steps=steps, groups=(*together, *alone))

        fusion = [each for each in self.space.transformations if "fusion_threshold_bytes" in each.fields]
        space = PlanSpace(self.space.job, fusion)
        return AtScale(
            title=self.title,
            tensors=self.tensors,
            space=space,
            workload=workload,
            cluster=cluster,
            ranks=ranks,
            trace=self.trace,
        )

    def allowing(self, plan: Plan, options: PlanOptions) -> Horovod:
        if HorovodSettings.of(plan).allreduce_algorithms is not None and options.all_reduce_model is None:
            raise InputError(
                "plan: allreduce_algorithms: give --all-reduce-model, which 'dpro-search fit' makes of all-reduces measured on "
                "Open MPI"
            )
        job = horovod_job(self.trace, options.allowing(plan), self.predictor, exact_groups=plan.tensor_groups is not None)
        job._changed = self._changed
        return job

    def _with(self, predictor: Predictor) -> Horovod:
        job = Horovod(predictor, self._compute, self._own, self.trace, exact_groups=self._exact_groups)
        job._changed = True
        return job

    def op_count(self, plan: Plan) -> int:
        return len(self.applied(plan)[0].graph)

    def timeline(self, plan: Plan) -> Timeline:
        """The recorded step, op by op: what fuses under another plan is decided while a job runs."""
        if plan != Plan() or self._changed:
            raise InputError("--timeline has the ops of the recorded setting: leave out --plan, --set and --what-if")
        graph = op_level(self.trace, self.predictor.graph, self.predictor.costs, step=self._typical_step)
        return replay(graph)

    def measured_ops(self, timeline: Timeline) -> MeasuredOps | None:
        return measured_ops(self.trace, self._typical_step)

    def perfetto(self, plan: Plan, *, recorded: bool) -> bytes:
        if recorded:
            return super().perfetto(plan, recorded=True)
        predictor, communication = self.applied(plan)
        timeline = predictor.timeline(communication, log=True, iterations=8)
        return perfetto_json(iteration_ops(timeline), measured=measured_ops(self.trace, int(predictor.graph.steps[0])))

    @cached_property
    def _typical_step(self) -> int:
        return typical_step(self.trace, self.predictor.graph)

    @property
    def questions(self) -> Mapping[str, Plan]:
        from dpro_search.kinds.horovod.what_if import questions

        return questions()

    def diagnose(self) -> dict[str, Any]:
        from dpro_search.kinds.horovod.diagnosis import diagnosis

        return diagnosis(self.trace, self.predictor)

    def tables(self, facts: Mapping[str, Any]) -> list[Table]:
        from dpro_search.kinds.horovod.diagnosis import diagnosis_tables

        return diagnosis_tables(facts)

    def tensor_groups(self, step: int | None, best: Plan | None) -> TensorGroups | None:
        from dpro_search.kinds.horovod.groups import tensor_groups

        return tensor_groups(self.trace, self.predictor, step, best)

    def applied(self, plan: Plan) -> tuple[Predictor, Plan]:
        """The predictor of the step that a legal plan makes, and what is left of the plan: communication."""
        return self._under(plan).predictor, _communication(plan)

    def exchanges(self, plan: Plan) -> tuple[Exchange, ...]:
        """The collectives of an iteration under a legal plan with exact groups, in the order of their posts."""
        return horovod_exchanges(*self.applied(plan))

    def sampled(self, plan: Plan, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        predictor, communication = self.applied(plan)
        return predictor.sampled(communication, samples=samples, seed=seed, on_sample=on_sample)

    def _predict(self, plan: Plan) -> Prediction:
        communication = _communication(plan)
        step = self._under(plan)
        prediction = step.predictor.predict(communication)
        if step.predictor is self.predictor:
            return prediction
        low, high = prediction.interval_us
        half = math.hypot((high - low) / 2, step.uncertainty_us)
        peak, more = prediction.peak_memory_bytes, step.more_bytes
        return msgspec.structs.replace(
            prediction,
            interval_us=(prediction.iteration_us - half, prediction.iteration_us + half),
            source="extrapolated",
            peak_memory_bytes=None if peak is None or more is None else max(round(peak + more), 0),
        )

    def _under(self, plan: Plan) -> _Step:
        compute = plan.changed(**dict.fromkeys(_COMMUNICATION))
        if compute not in self._steps:
            assert self._compute is not None, "a legal plan has no other fields"
            graph, uncertainty_us = transformed(self._compute, compute, self.space.transformations)
            if len(self._steps) > _REMEMBERED:
                del self._steps[next(key for key in self._steps if key != Plan())]
            self._steps[compute] = _Step(self.predictor.at(graph=graph), uncertainty_us, self._more_bytes(compute))
        return self._steps[compute]

    def _more_bytes(self, plan: Plan) -> float | None:
        """Change of peak memory by changes of compute, from liveness; None if it is not known."""
        if plan.recomputed_ops is None and plan.micro_batches is None and plan.bfloat16_ops is None:
            return 0.0
        step = self.predictor.graph.memory
        if step is None:
            return None
        changed = peak_bytes(
            step, recomputed=plan.recomputed_ops or (), micro_batches=plan.micro_batches or 1, bfloat16=plan.bfloat16_ops or ()
        )
        return changed.bytes - self._recorded_bytes

    @cached_property
    def _recorded_bytes(self) -> float:
        step = self.predictor.graph.memory
        assert step is not None, "only asked for where it is known"
        return peak_bytes(step).bytes


class _Step(NamedTuple):
    """A step under some compute: its predictor, how uncertain its length is, and what it needs of memory beside the recorded."""

    predictor: Predictor
    uncertainty_us: float
    more_bytes: float | None


def horovod_job(trace: Trace, options: PlanOptions, predictor: Predictor | None = None, *, exact_groups: bool = False) -> Horovod:
    """A recorded Horovod job.

    Parameters
    ----------
    predictor
        Of the trace, where it was made already, perhaps on another cluster.
    exact_groups
        Whether plans may name the tensors of a group, although no job of the trace's framework could follow them.

    Raises
    ------
    InputError
        The options ask for what the recording does not have.
    """
    predictor = predictor or Predictor.from_trace(trace)
    exact_groups = exact_groups or trace.meta.framework == "tensorflow"
    if options.all_reduce_model is not None:
        predictor = predictor.at(all_reduces=_all_reduces(trace, options.all_reduce_model))
    requested = set(options.compute)
    if requested and trace.meta.framework != "tensorflow":
        raise InputError(f"{min(requested)}: only for TensorFlow's graphs, and this trace is of {trace.meta.framework}")
    if options.memory_limit_bytes is not None and predictor.graph.memory is not None:
        requested |= {"recomputation", "accumulation"}
    if not requested and not options.allow_lossy:
        return Horovod(predictor, trace=trace, exact_groups=exact_groups)
    facts, compute = horovod_facts(predictor.tensors, predictor.recorded), ComputeGraph(predictor.graph)
    transformations: list[Transformation] = []
    precision = None
    if "precision" in requested:
        from dpro_search.costmodel.precision import named_model

        precision = Precision(facts, compute, named_model(options.precision_table, "tensorflow"))
    if "op-fusion" in requested:
        from dpro_search.costmodel.fused.clusters import ClusterCosts, default_model
        from dpro_search.costmodel.fused.model_file import FusionModel

        model = default_model() if options.cluster_model is None else FusionModel.load(options.cluster_model)
        # A job is planned as its first rank ran; a trace may hold the shapes of its tensors.
        recorded = trace.graphs[trace.graph_of_rank[0]] if trace.graphs else None
        transformations.append(OpFusion(facts, compute, ClusterCosts(model, predictor.graph, recorded=recorded), precision))
    if precision is not None:
        transformations.append(precision)
    if "recomputation" in requested:
        transformations.append(Recomputation(facts, compute))
    if "accumulation" in requested:
        transformations.append(Accumulation(facts, compute, allow_lossy=options.allow_lossy))
    if options.allow_lossy:
        transformations.append(Compression(facts, compute, copy_us_per_byte=predictor.costs.copy_in_us, allow_lossy=True))
    return Horovod(predictor, compute, tuple(transformations), trace, exact_groups=exact_groups)


def _all_reduces(trace: Trace, folder: Path) -> CommunicationModel:
    """Costs of Open MPI's algorithms; raises `InputError` if the job uses another library."""
    from dpro_search.costmodel.collectives.model_file import CommunicationModel

    if not polls(trace):
        raise InputError("the all-reduce model is for jobs on Open MPI, and this one was recorded on Gloo, which has one algorithm")
    return CommunicationModel.load(folder)


def _communication(plan: Plan) -> Plan:
    return plan.changed(**{name: None for name in plan.settings if name not in _COMMUNICATION})
