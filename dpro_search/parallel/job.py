"""`MeshJob`: predictions of a described parallel job under its plans."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, Self

import msgspec

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import TensorInfo
from dpro_search.deploy.step_split import AloneUs, StepSplit
from dpro_search.errors import InputError
from dpro_search.kinds._answers import ParallelFacts, ParallelSetting, fields_of
from dpro_search.kinds._facts import critical_ops
from dpro_search.kinds._job import Job, Table
from dpro_search.kinds._options import PlanOptions
from dpro_search.kinds._work import EFFICIENCY_KEYS, Work, efficiency, price_source
from dpro_search.machine import Calibration
from dpro_search.parallel.answers.accuracy import accuracy
from dpro_search.parallel.answers.breakdown import breakdown_us, computation_us
from dpro_search.parallel.answers.diagnosis import findings, memory_sentence, pass_name, stage_facts, stage_spans, tables
from dpro_search.parallel.answers.explain import comparison, doubt
from dpro_search.parallel.costs.domain import harder
from dpro_search.parallel.costs.groups import UNSCALED
from dpro_search.parallel.costs.recorded import Own
from dpro_search.parallel.costs.scales import Scales
from dpro_search.parallel.file.description import MOST as MOST_BATCH
from dpro_search.parallel.file.description import MeshDescription, global_batch_of
from dpro_search.parallel.file.keys import PRECISIONS
from dpro_search.parallel.file.usual_strategy import MEMORY_HEADROOM, usual_of, usual_strategy
from dpro_search.parallel.frameworks import FRAMEWORKS
from dpro_search.parallel.gpu_ops import OpCosts, capped_clock
from dpro_search.parallel.model import CapturedModel, Model, blocks_of
from dpro_search.parallel.search.candidates import Candidates, choices_of
from dpro_search.parallel.search.changes import change_text, remedies, single_changes
from dpro_search.parallel.search.cuts import balanced_cut
from dpro_search.parallel.search.ranking import family, ranked
from dpro_search.parallel.search.space import MeshSpace
from dpro_search.parallel.settings import Fixed, MeshSettings, resolved, settings_of, strategy_text, under
from dpro_search.parallel.steps.predicted_steps import ParallelSteps
from dpro_search.parallel.strategy import Strategy
from dpro_search.parallel.timed.split import alone_us, predicted_split
from dpro_search.parallel.workload import Workload
from dpro_search.quantities import memory_shortage_text, size_text
from dpro_search.replay.path_segments import path_totals
from dpro_search.replay.replayer import replay
from dpro_search.replay.timeline import Timeline
from dpro_search.search.objective import BoundedPlan, ListedPlan
from dpro_search.space.cluster import ClusterSpec, spec_on
from dpro_search.space.plan import Plan, Prediction
from dpro_search.space.scenario import SCALES, ClusterChange, Scale

_MOST_COMPARED = 2  # plans behind the best that a search explains


class MeshJob(Job):
    """A described job on its cluster or on another."""

    title = "a parallel job"
    settings = ("ranks", "rate", "global_batch", "sequence", "precision", *SCALES)
    can_begin_with = True

    def __init__(self, description: MeshDescription, scales: Scales = UNSCALED) -> None:
        self._description, self._scales = description, scales
        fixed, cluster = description.fixed, description.cluster
        framework = FRAMEWORKS[description.framework]
        self.tensors = _gradients(description)
        per_host = min(cluster.ranks_per_host or fixed.devices, fixed.devices)
        self._steps = steps = ParallelSteps(replace(description.workload(description.strategy), scales=scales))
        candidates = Candidates(
            fixed,
            choices_of(fixed, framework._replace(runtime=description.runtime), per_host),
            description.strategy,
            lambda strategy: balanced_cut(steps, strategy),
        )
        self.space = self._mesh = MeshSpace(self.title, description.runs, fixed, candidates, self.tensors)
        self.askable = self.space.fields
        self._predicted: dict[Plan, Prediction] = {}
        self._parts: dict[Plan, dict[str, float]] = {}
        self._device_bytes = cluster.groups[0].host.device.memory_bytes

    @classmethod
    def of(cls, source: MeshDescription, options: PlanOptions) -> Self:
        for name in ("compute", "all_reduce_model", "cluster_model", "precision_table"):
            if getattr(options, name):
                what = name.replace("_", " ")
                raise InputError(f"{cls.title} has no plans for '{what}'; it changes {', '.join(MeshSettings.__struct_fields__)}")
        return cls(source)

    # What it runs on.

    @property
    def description(self) -> MeshDescription:
        """The job, with the cluster and the setting that it has here."""
        return self._description

    @property
    def cluster(self) -> ClusterSpec:
        return spec_on(self._description.cluster, self._description.fixed.devices).spec

    @property
    def recorded_ranks(self) -> int:
        return self._description.fixed.devices

    def moved(self, change: ClusterChange) -> Job:
        """On other machines, or on other devices and NICs of these."""
        return super().moved(change if change.machines is not None else replace(change, machines=self._description.cluster))

    def at_scale(self, cluster: Cluster, ranks: int | None = None) -> Job:
        return self._with(description=elsewhere(self._description, cluster, cluster.ranks if ranks is None else ranks))

    def with_batch(self, global_batch: int) -> MeshJob:
        return self._with(with_batch(self._description, global_batch))

    def with_sequence(self, tokens: int) -> MeshJob:
        return self._with(with_sequence(self._description, tokens))

    def with_precision(self, precision: str) -> MeshJob:
        return self._with(with_precision(self._description, precision))

    def starting_from(self, plan: Plan) -> MeshJob:
        runs = under(self._description.runs, MeshSettings.of(plan))
        return self._with(replace(self._description, runs=runs, strategy=self._mesh.strategy(plan), chosen=False))

    def left_out(self, change: ClusterChange) -> tuple[str, ...]:
        description, assumed = self._description, list(self._description.warnings)
        if description.batch_per_replica is not None:
            samples, total = description.batch_per_replica, description.fixed.global_batch
            assumed.append(f"each replica has a batch of {samples}, so that all devices together have {total}")
        if description.chosen:
            today = strategy_text(self._mesh.today)
            assumed.append(f"how the job runs was not given; assumed is a usual plan of its framework: {today}")
        return tuple(assumed)

    def scaled(self, scale: Scale) -> MeshJob:
        if scale.rank is not None or scale.group is not None:
            raise self.cannot("scaled", f"be asked '{scale.text}': all ranks of a stage are one")
        before = self._scales
        value = getattr(before, scale.what) * scale.factor
        return self._with(scales=replace(before, **{scale.what: value}))

    def _with(self, description: MeshDescription | None = None, scales: Scales | None = None) -> MeshJob:
        return MeshJob(description or self._description, self._scales if scales is None else scales)

    @property
    def workload(self) -> Callable[[Plan], Workload]:
        return lambda plan: self._description.workload(self._mesh.strategy(plan))

    def own(self, plan: Plan) -> dict[str, Own]:
        """By the name of each block, what a rank does itself for a micro-batch."""
        return self._steps.own(self._mesh.strategy(plan))

    # What a plan costs.

    @property
    def calibration(self) -> Calibration:
        return accuracy().calibration(self._steps.domain(self._mesh.today), self._description.gpu_vendor)

    def _predict(self, plan: Plan) -> Prediction:
        if plan not in self._predicted:
            self._predicted[plan] = self._new_prediction(self._mesh.strategy(plan))
        return self._predicted[plan]

    def _new_prediction(self, strategy: Strategy) -> Prediction:
        step_us = self._steps.step_us(strategy)
        peak, has = round(self._steps.memory(strategy).total_bytes), self._device_bytes
        fits = has is None or peak <= has
        low_us, high_us = self._interval_us(step_us, strategy)
        likely, least = capped_clock(self._description.device)
        return Prediction(
            iteration_us=step_us,
            interval_us=(low_us, high_us * likely / least),
            breakdown_us={},
            peak_memory_bytes=peak,
            source="extrapolated",
            floor_us=min(self._least_us, step_us),
            infeasible=None if fits or has is None else memory_shortage_text(peak, has),
        )

    def _interval_us(self, step_us: float, strategy: Strategy) -> tuple[float, float]:
        """The interval of a measured step; it holds eager and compiled code if the description leaves that open."""
        vendor, domain = self._description.gpu_vendor, self._steps.domain(strategy)
        possible = [step_us, *(steps.step_us(strategy) for steps in self._possible_steps)]
        intervals_us = [accuracy().interval_us(each_us, domain, vendor) for each_us in possible]
        return min(low_us for low_us, _ in intervals_us), max(high_us for _, high_us in intervals_us)

    @cached_property
    def _possible_steps(self) -> tuple[ParallelSteps, ...]:
        workload = replace(self._description.workload(self._description.strategy), scales=self._scales)
        return tuple(ParallelSteps(replace(workload, runtime=runtime)) for runtime in self._description.possible_runtimes)

    @cached_property
    def _least_us(self) -> float:
        """Time of the model's FLOPs at the peak of a device, with what-ifs of faster computation; 0: not known."""
        work, scales = self.work, self._scales
        if work.flops is None or not work.peak_flops_per_s:
            return 0.0
        faster = min(scales.compute, 1.0) * min(scales.matmul, scales.attention, 1.0)
        return work.flops / work.peak_flops_per_s * 1e6 * faster

    def replayed(self, plan: Plan) -> Prediction:
        prediction = self.predict(plan)
        return msgspec.structs.replace(prediction, breakdown_us=self._parts_us(plan))

    def split(self, plan: Plan) -> StepSplit:
        """Breakdown of the time of a step, in the parts that paced ranks measure."""
        return predicted_split(self._steps, self._mesh.strategy(plan))

    def alone_us(self, plan: Plan) -> AloneUs:
        """Times of a plan's exchanges on links that nothing else uses."""
        return alone_us(replace(self.workload(plan), scales=self._scales))

    def plan_facts(self, plan: Plan) -> ParallelFacts:
        strategy, prediction = self._mesh.strategy(plan), self.predict(plan)
        memory_bytes = self._memory_bytes(strategy)
        possible = () if prediction.infeasible is None else remedies(self, plan, strategy)
        return ParallelFacts(
            strategy=settings_of(strategy).settings,
            computation_us=computation_us(self._steps, strategy, self.replayed(plan).breakdown_us["compute"]),
            memory_bytes=memory_bytes,
            infeasible=prediction.infeasible,
            remedies=possible,
            notes=(memory_sentence(memory_bytes, self._limit_bytes, possible),),
        )

    def _memory_bytes(self, strategy: Strategy) -> dict[str, float]:
        """Memory of the rank that needs most, by purpose."""
        memory = self._steps.memory(strategy)
        return {
            field.name.removesuffix("_bytes"): getattr(memory, field.name)
            for field in fields(memory)
            if field.name.endswith("_bytes")
        }

    @property
    def work(self) -> Work:
        fixed, cluster = self._description.fixed, self._description.cluster
        device = cluster.groups[0].host.device
        power_w = cluster.power_per_device_w
        return Work(
            devices=fixed.devices,
            device=device.name,
            tokens=fixed.global_batch * fixed.sequence if fixed.has_tokens else None,
            flops=3 * fixed.global_batch * forward_flops(fixed.model, fixed.sequence) / fixed.devices,
            peak_flops_per_s=device.peak_flops_per_s(self._description.precision),
            precision=self._description.precision,
            price_per_device_hour_usd=cluster.price_per_device_hour_usd,
            price_source=price_source(cluster),
            power_per_device_w=power_w if power_w is not None else device.power_w,
            power_with_host=power_w is not None,
        )

    # Which plans there are.

    def ranked(self, settled: Callable[[Hashable, float], bool] = lambda family, bound_us: False) -> Iterator[BoundedPlan]:
        """Plans that fit in memory, in the order of a bound on their time."""
        limit = self._searched_bytes
        for strategy, bound_us in ranked(self._mesh.candidates, self._steps, math.inf if limit is None else limit, settled):
            yield BoundedPlan(self._mesh.plan(strategy), bound_us)

    def family(self, plan: Plan) -> Hashable:
        """Equal for plans that a list of different plans has once."""
        return family(self._mesh.strategy(plan))

    def listed(self, plans: Sequence[tuple[Plan, Prediction]]) -> list[ListedPlan]:
        """The whole strategy of each plan, what it gives and costs, its memory with the margin, and what it loses to the first."""
        best = plans[0][0] if plans else Plan()
        return [self._listed(plan, prediction, best) for plan, prediction in plans]

    def _listed(self, plan: Plan, prediction: Prediction, best: Plan) -> ListedPlan:
        strategy, peak = self._mesh.strategy(plan), prediction.peak_memory_bytes
        parts_us, best_us = self._parts_us(plan), self._parts_us(best)
        gives = efficiency(self.work, prediction.iteration_us)
        margin = None if self._device_bytes is None or peak is None else self._device_bytes - peak
        lost_us = {name: parts_us.get(name, 0.0) - best_us.get(name, 0.0) for name in {**parts_us, **best_us}}
        return ListedPlan(
            strategy_text(strategy),
            {
                "strategy": settings_of(strategy).settings,
                **{key: getattr(gives, key) for key in EFFICIENCY_KEYS},
                "memory_margin_bytes": margin,
                "slower_than_best_pct": (sum(parts_us.values()) / sum(best_us.values()) - 1) * 100,
                "breakdown_us": parts_us,
                "lost_to_best_us": {name: us for name, us in lost_us.items() if us},
            },
        )

    def _parts_us(self, plan: Plan) -> dict[str, float]:
        if plan not in self._parts:
            self._parts[plan] = breakdown_us(self._steps, self._mesh.strategy(plan), self.predict(plan).iteration_us)
        return self._parts[plan]

    def search_facts(self) -> dict[str, Any]:
        """The setting that a search compares with, and the memory that plans may take."""
        name, facts = self._listed(Plan(), self.predict(Plan()), Plan())
        usual = usual_of(FRAMEWORKS[self._description.framework])
        chosen = self._description.chosen
        return {
            "baseline": {
                "name": name,
                **facts,
                "usual_plan": usual.words if chosen else None,
                "source": usual.source if chosen else None,
            },
            "memory": {
                "device_bytes": self._device_bytes,
                "limit_bytes": self._searched_bytes,
                "headroom_pct": None if self.memory_limit_bytes is not None else MEMORY_HEADROOM * 100,
            },
        }

    @property
    def _searched_bytes(self) -> int | None:
        """Memory that proposed plans may take: the limit that was given, or the device's memory less the headroom."""
        if self.memory_limit_bytes is not None or self._device_bytes is None:
            return self._limit_bytes
        return int(self._device_bytes * (1 - MEMORY_HEADROOM))

    @property
    def _limit_bytes(self) -> int | None:
        """Memory that a rank may use: that of its device, or less if the user limits it."""
        known = [limit for limit in (self._device_bytes, self.memory_limit_bytes) if limit is not None]
        return min(known, default=None)

    def reasons(self, plans: Sequence[Plan]) -> tuple[str, ...]:
        """Sentences that say what today's plan and the other best plans lose to the first, and whether their order is certain."""
        if not plans:
            return ()
        best, *others = plans
        parts = self.replayed(best).breakdown_us
        sentences = []
        for number, plan in enumerate(others[:_MOST_COMPARED], 2):
            sentences.append(comparison(f"Plan {number}", "plan 1", self.replayed(plan).breakdown_us, parts))
        if others:
            domain = harder(*(self._steps.domain(self._mesh.strategy(plan)) for plan in (best, others[0])))
            sentences += filter(None, [doubt(self.predict(best).iteration_us, self.predict(others[0]).iteration_us, domain)])
        if Plan() not in plans[: _MOST_COMPARED + 1]:
            today = "The usual plan" if self._description.chosen else "The described setting"
            sentences.append(comparison(today, "plan 1", self.replayed(Plan()).breakdown_us, parts))
        return (*sentences, *self._stated())

    def _stated(self) -> Iterator[str]:
        """Sentences on the setting that a search compares with, and on the memory that it leaves free."""
        if self._description.chosen:
            usual = usual_of(FRAMEWORKS[self._description.framework])
            name, plan = self._description.framework, strategy_text(self._mesh.today)
            yield f"Compared with a usual plan of {name}: {plan} ({usual.words}). Sources: {usual.source}."
        limit = self._searched_bytes
        if limit is None:
            return
        if self.memory_limit_bytes is not None:
            yield f"Plans may take {size_text(limit)} of memory, as given."
        elif self._device_bytes is not None:
            has, spare = size_text(self._device_bytes), MEMORY_HEADROOM * 100
            yield (
                f"Plans may take {size_text(limit)} of the {has} of a device: {spare:.1f} % are left free, the mean error of "
                "predicted memory. --memory-limit sets another limit."
            )

    # One iteration, op by op.

    def op_count(self, plan: Plan) -> int:
        return len(self._steps.graph(self._mesh.strategy(plan)))

    def timeline(self, plan: Plan) -> Timeline:
        """One rank of each pipeline stage: the others of a stage do the same."""
        return replay(self._steps.graph(self._mesh.strategy(plan)))

    def parallel_setting(self, plan: Plan, name: str) -> ParallelSetting:
        strategy, prediction, facts = self._mesh.strategy(plan), self.replayed(plan), self.plan_facts(plan)
        return ParallelSetting(
            name=name,
            step_us=prediction.iteration_us,
            interval_us=prediction.interval_us,
            parts_us={**prediction.breakdown_us, "compute": 0.0, **facts.computation_us},
            memory_bytes=facts.memory_bytes,
            limit_bytes=self._limit_bytes,
            strategy=facts.strategy,
            stages=stage_spans(self.timeline(plan), strategy.pp),
            efficiency=fields_of(efficiency(self.work, prediction.iteration_us)),
        )

    def diagnose(self) -> dict[str, Any]:
        """The facts of `Job.diagnose`; of ranks that behave alike one, with how many they are (``alike``)."""
        plan, strategy = Plan(), self._mesh.today
        timeline, prediction, more = self.timeline(plan), self.replayed(plan), self.plan_facts(plan)
        gained = self._gains(prediction.iteration_us)
        plan_facts = {name: value for name, value in fields_of(more).items() if name != "notes"}
        return {
            "iteration_us": prediction.iteration_us,
            "measured_iteration_us": None,
            "breakdown_us": prediction.breakdown_us,
            "peak_memory_bytes": prediction.peak_memory_bytes,
            **plan_facts,
            "notes": more.notes,
            "critical_path": msgspec.to_builtins(path_totals(timeline)),
            "critical_ops": critical_ops(timeline, row_name=pass_name),
            "ranks": stage_facts(timeline, strategy),
            "gains": gained,
            "findings": [*more.notes, *findings(prediction.breakdown_us, gained)],
            "warnings": list(self._description.warnings),
        }

    def _gains(self, base_us: float) -> list[dict[str, Any]]:
        """Gains of other speeds and of single changes of the plan that are legal, fit into memory, and gain anything."""
        scales = ("compute=0.9", "communication=0", "bandwidth=2")
        predicted_us = {text: self.scaled(Scale.parse(text)).predict(Plan()).iteration_us for text in scales}
        for values in single_changes(self._mesh.today):
            try:
                changed = self.predict(Plan.of(**values))
            except InputError:
                continue
            if changed.infeasible is None:
                predicted_us[change_text(values)] = changed.iteration_us
        gained = {text: us for text, us in predicted_us.items() if us < base_us}
        rows = [{"what_if": text, "predicted_iteration_us": us, "gain_us": base_us - us} for text, us in gained.items()]
        return sorted(rows, key=lambda row: -float(row["gain_us"]))

    def tables(self, facts: Mapping[str, Any]) -> list[Table]:
        return tables(facts)


def with_batch(description: MeshDescription, global_batch: int) -> MeshDescription:
    """The same job with another batch; raises `InputError` where it cannot be split as the job runs today."""
    if not 0 < global_batch <= MOST_BATCH:
        raise InputError(f"global_batch must be from 1 to {MOST_BATCH:g}, not {global_batch}")
    fixed = replace(description.fixed, global_batch=global_batch)
    return _with_fixed(replace(description, batch_per_replica=None), fixed, description.cluster, description.runs)


def with_sequence(description: MeshDescription, tokens: int) -> MeshDescription:
    """The same job with sequences of another length; raises `InputError` where the model has none, or they cannot be split."""
    if not description.fixed.has_tokens:
        raise InputError(f"{description.fixed.model.name} has no sequences of tokens")
    if not 0 < tokens <= MOST_BATCH:
        raise InputError(f"sequence must be from 1 to {MOST_BATCH:g} tokens, not {tokens}")
    return _with_fixed(description, replace(description.fixed, sequence=tokens), description.cluster, description.runs)


def with_precision(description: MeshDescription, precision: str) -> MeshDescription:
    """The same job in another precision of matmuls; raises `InputError` where the device has no such speed."""
    if precision not in PRECISIONS:
        raise InputError(f"'{precision}' is none of {', '.join(PRECISIONS)}")
    if precision != description.precision and (description.times is not None or isinstance(description.fixed.model, CapturedModel)):
        held = "times of blocks" if description.times is not None else "graph"
        raise InputError(f"the job's {held} are in {description.precision}: record them in {precision}, or leave precision= out")
    OpCosts(description.device, precision)
    return _with_fixed(replace(description, precision=precision), description.fixed, description.cluster, description.runs)


def elsewhere(description: MeshDescription, cluster: Cluster, devices: int) -> MeshDescription:
    """The same job on some devices of another cluster; dp follows from their number.

    Raises
    ------
    InputError
        It cannot run there as it runs today.
    """
    if not 1 <= devices <= cluster.ranks:
        raise InputError(f"{devices} ranks do not fit on {cluster.name}: it has {cluster.ranks} devices")
    runs = msgspec.structs.replace(description.runs, dp=None)
    fixed = replace(description.fixed, devices=devices)
    if description.batch_per_replica is not None:
        given = None if description.chosen else runs
        fixed = replace(fixed, global_batch=global_batch_of(description.batch_per_replica, given, devices))
    return _with_fixed(description, fixed, cluster, runs)


def _with_fixed(description: MeshDescription, fixed: Fixed, cluster: Cluster, runs: MeshSettings) -> MeshDescription:
    """As it runs today, or, where the description leaves that open, as is usual."""
    if description.chosen:
        runs = usual_strategy(fixed, cluster, description.precision, description.runtime, description.framework)
    strategy = resolved(runs, fixed)
    return replace(description, fixed=fixed, cluster=cluster, runs=runs, strategy=strategy)


def forward_flops(model: Model, sequence: int) -> float:
    """FLOPs of the forward pass of one sequence, without masked scores."""
    return sum(block.count * op.forward_flops(block.sizes_at(1, sequence)) for block in blocks_of(model) for op in block.ops)


def _gradients(description: MeshDescription) -> tuple[TensorInfo, ...]:
    """One for each block, the last one first: what data parallel ranks exchange."""
    dtype = {"bf16": "bfloat16", "fp8": "bfloat16", "fp16": "float16"}.get(description.precision, "float32")
    tensors = []
    for block in reversed(blocks_of(description.fixed.model)):
        count = round(block.parameters())
        for number in reversed(range(block.count)):
            name = f"{block.name}.{number}" if block.count > 1 else block.name
            size = count * (4 if dtype == "float32" else 2)
            tensors.append(TensorInfo(name=name, node=name, dtype=dtype, shape=(count,), size_bytes=size))
    return tuple(tensors)
