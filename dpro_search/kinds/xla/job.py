"""`XlaJob`: a compiled XLA program, replayed on the devices that it was compiled for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from dpro_search._text import listed
from dpro_search.cluster import Cluster
from dpro_search.collect.trace import Floats
from dpro_search.costmodel.collectives.torus_groups import Places, places_of
from dpro_search.errors import InputError
from dpro_search.graph.measured import ProfiledSteps
from dpro_search.kinds._comparison import MeasuredIterations
from dpro_search.kinds._diagnosis import Diagnosis
from dpro_search.kinds._job import Job, JobInScenario, JobObjective
from dpro_search.kinds._options import PlanOptions
from dpro_search.kinds._work import Work
from dpro_search.kinds.xla.answers import axes_us, breakdown_us, diagnosis
from dpro_search.kinds.xla.compilations import Compilations
from dpro_search.kinds.xla.lowering import XlaStep, scaled, step_of
from dpro_search.kinds.xla.order import MOST_COMPILED, CompileOrder, StepParts
from dpro_search.kinds.xla.plans import ChoiceKnob, MeshKnob, Point, choices_of, pairs_text
from dpro_search.kinds.xla.prices import Prices, prices_of
from dpro_search.kinds.xla.processors import ProcessorPrices, TimedProgram
from dpro_search.kinds.xla.program import XlaProgram
from dpro_search.quantities import memory_shortage_text, time_text
from dpro_search.replay import Timeline, replay
from dpro_search.replay.iterations import IterationTimes
from dpro_search.replay.lowered import ErrorModel, Lowered
from dpro_search.replay.replayer import settled_us
from dpro_search.search.objective import BoundedPlan
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import SCALES, ClusterChange, Scenario
from dpro_search.space.transformations import PlanningFacts, PlanSpace

RAN_ERROR, OTHER_MESH_ERROR = 0.15, 0.3
"""Programs on processors, as they ran and with another mesh: nine of ten runs of three steps are inside (experiments/xla). Chosen
on two of the steps, such intervals hold 59 to 95 % and 82 to 100 % of the third's."""
COMPARED_DEVICES = ("Google TPU v4", "Google TPU v5p")
COMPARED_ERROR, OTHER_DEVICE_ERROR = 0.3, 0.5
"""Estimates. Intervals of the first hold 21 of 22 published runs of dense decoders on `COMPARED_DEVICES` (experiments/xla). No run
on another device was compared; collectives alone are up to 34 % off there (experiments/costmodel/torus)."""


@dataclass(frozen=True)
class StepOfProgram:
    """One step, as verbs replay it."""

    step: XlaStep

    @property
    def op_count(self) -> int:
        return len(self.step.graph)

    def iterations(self, *, detailed: bool = False) -> IterationTimes:
        iteration_us, settled = settled_us(self.step.graph)
        return IterationTimes(
            iteration_us=iteration_us,
            settled=settled,
            breakdown_us=breakdown_us(self.step, self.timeline()) if detailed else {},
        )

    def sampled_us(self, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        raise InputError("cost models give one duration of each op: they cannot be drawn anew")

    def timeline(self) -> Timeline:
        return replay(self.step.graph)


class XlaJob(Job):
    """A job that a compiler turned into a program; its mesh and choices are what it was compiled for."""

    title = "a compiled XLA program"
    usual_trials = MOST_COMPILED
    settings = (*SCALES, "collectives")
    abilities = ()

    @classmethod
    def of(cls, source: XlaProgram, options: PlanOptions) -> Self:
        for name in ("compute", "all_reduce_model", "cluster_model", "precision_table"):
            if getattr(options, name):
                raise InputError(f"{cls.title} has no plans for '{name.replace('_', ' ')}'")
        return cls(source)

    def __init__(self, source: XlaProgram) -> None:
        self.source, self.tensors = source, ()
        self.askable = ("mesh", "choices") if self._can_compile else ()
        self.captured = Point.captured(source.facts)
        self.compilations = Compilations(source)
        self.order: CompileOrder | None = None  # That of the last search.
        self._steps: dict[tuple[str, str, str, float], XlaStep] = {}
        self._ran = None if source.times is None else TimedProgram(module=source.module, times=source.times)

    @property
    def _can_compile(self) -> bool:
        """Whether other meshes can be compiled: the capture wrote down its script."""
        return bool(self.source.facts.script_path and self.source.facts.mesh and self.source.cluster is not None)

    # What is replayed.

    def lower(self, scenario: Scenario, *, steps: ProfiledSteps | None = None) -> Lowered:
        self.check_changes(scenario, steps)
        self.plans(scenario).check(scenario.plan)
        program = self._program(scenario.plan)
        refused = program if isinstance(program, str) else None
        program = self.source if isinstance(program, str) else program  # its step stands for one that does not run
        cluster, step = self.cluster_in(scenario), self._step(program, scenario)
        memory, has_bytes = program.facts.memory, cluster.groups[0].host.device.memory_bytes
        needed = None if memory is None or refused is not None else memory.peak_bytes
        # A TPU's compiler refuses a program that does not fit: one that it made does, whatever its buffers sum up to.
        compiler_refuses = self.source.facts.platform == "tpu"
        if not compiler_refuses and needed is not None and has_bytes is not None and needed > has_bytes:
            refused = memory_shortage_text(needed, has_bytes)
        return Lowered(
            replayable=StepOfProgram(step),
            error=ErrorModel(model=self._model_error(program, cluster)),
            as_recorded=False,
            cluster=ClusterSpec(cores=tuple(range(self.source.module.devices)), ranks_per_host=cluster.ranks_per_host),
            assumptions=self._assumptions(step, cluster),
            peak_memory_bytes=needed,
            infeasible=refused,
        )

    def plans(self, scenario: Scenario) -> PlanSpace:
        captured = self.source.facts
        if not self._can_compile or scenario.cluster.machines is not None:
            why = "a compiled program has one mesh: capture it with 'dpro-search capture --jax', which can compile others"
            return PlanSpace(PlanningFacts(name=self.title, tensors=()), [], why_empty=why)
        facts = PlanningFacts(name=self.title, tensors=(), values={"mesh": pairs_text(captured.mesh)})
        return PlanSpace(facts, [MeshKnob(facts, captured.mesh), ChoiceKnob(facts, choices_of(captured), captured.chosen)])

    def objective(self, here: JobInScenario) -> XlaObjective:
        return XlaObjective(here, self)

    def _program(self, plan: Plan) -> XlaProgram | str:
        """The program under a plan, which is compiled if nobody did before; or why there is none."""
        return self.compilations.program(self.captured.under(plan)) if plan != Plan() else self.source

    def cluster_in(self, scenario: Scenario) -> Cluster:
        """The devices of a scenario; raises `InputError` if they are not known, or not as many as the program has."""
        change, source = scenario.cluster, self.source
        if replace(change, machines=None) != ClusterChange():
            raise InputError(f"{self.title} takes the number of its devices from its mesh: compile it for another one")
        cluster = change.machines or source.cluster
        if cluster is None:
            raise InputError(
                f"{source.path}: the text does not say which devices run the program; name them, like --cluster v6e:4x4 or "
                "4xhgx-h100"
            )
        devices = cluster.ranks if cluster.torus is None else cluster.ranks * cluster.torus.devices_per_chip
        if devices != source.module.devices:
            raise InputError(
                f"{cluster.name} has {devices} devices, and the program was compiled for {source.module.devices}: compile it for "
                "that mesh"
            )
        device, is_tpus = cluster.groups[0].host.device, source.facts.platform == "tpu"
        if is_tpus != (device.kind == "tpu"):
            what = "TPUs" if is_tpus else "other devices than TPUs"
            raise InputError(f"{cluster.name}: the program was compiled for {what}; compile it for {device.name}")
        if is_tpus and source.cluster is not None and device != source.cluster.groups[0].host.device:
            before = source.cluster.groups[0].host.device.name
            raise InputError(
                f"the program was compiled for {before}: fusions, cycles and memory are its own; compile it for {device.name}"
            )
        return cluster

    def step_in(self, scenario: Scenario) -> XlaStep:
        """The step in a scenario; raises `InputError` where its mesh does not run."""
        program = self._program(scenario.plan)
        if isinstance(program, str):
            raise InputError(program)
        return self._step(program, scenario)

    def _step(self, program: XlaProgram, scenario: Scenario) -> XlaStep:
        cluster, bandwidth = self.cluster_in(scenario), 1.0
        for scale in scenario.scales:
            if scale.rank is not None or scale.what not in self.settings:
                raise self.cannot("compute", f"be asked '{scale.text}': all devices run the same program")
            bandwidth *= scale.factor if scale.what == "bandwidth" else 1.0
        # Programs of one mesh with equal texts are the same: choices between them have no effect.
        key = program.text_digest, pairs_text(program.facts.mesh), cluster.name, bandwidth
        if key not in self._steps:
            self._steps[key] = step_of(program.module, self._prices(program, cluster, bandwidth), program.facts.mesh)
        step = self._steps[key]
        for scale in scenario.scales:
            step = step if scale.what == "bandwidth" else scaled(step, scale)
        return step

    def _prices(self, program: XlaProgram, cluster: Cluster, bandwidth: float) -> Prices:
        if cluster.groups[0].host.device.kind == "cpu":
            if self._ran is None:
                raise InputError(
                    f"{self.source.path}: a program for processors takes the times of a real run: capture it with --timed"
                )
            return ProcessorPrices(program.module, cluster, bandwidth, self._ran)
        return prices_of(program.module, cluster, self._places(program, cluster), bandwidth, ranks=program.facts.device_ids)

    def _model_error(self, program: XlaProgram, cluster: Cluster) -> float:
        if self._ran is None:
            return COMPARED_ERROR if cluster.groups[0].host.device.name in COMPARED_DEVICES else OTHER_DEVICE_ERROR
        return RAN_ERROR if program is self.source else OTHER_MESH_ERROR

    def measurement(self, scenario: Scenario) -> MeasuredIterations:
        if self._ran is None:
            return MeasuredIterations()
        steps_us = np.array(self._ran.times.steps_us)
        return MeasuredIterations(median_us=float(np.median(steps_us)), mean_us=float(steps_us.mean()), iterations_us=steps_us)

    def _places(self, program: XlaProgram, cluster: Cluster) -> Places | None:
        """Chips of a program's devices, in the order of its replica groups; None: no torus, or the cluster's order."""
        facts, torus = program.facts, cluster.torus
        if torus is None:
            return None
        if facts.coordinates and cluster == self.source.cluster:
            slices = facts.slices or (0,) * len(facts.coordinates)
            places = Places(coordinates=np.array(facts.coordinates, np.int64), slices=np.array(slices, np.int64))
        else:
            places = places_of(torus)
        if facts.device_ids:
            order = np.array(facts.device_ids, np.int64)
            places = Places(coordinates=places.coordinates[order], slices=places.slices[order])
        return places

    # What people want to know about it.

    def work(self, scenario: Scenario) -> Work | None:
        if self.source.cluster is None and scenario.cluster.machines is None:
            return None
        cluster, step, facts = self.cluster_in(scenario), self.step_in(scenario), self.source.facts
        device = cluster.groups[0].host.device
        per_chip = 1 if cluster.torus is None else cluster.torus.devices_per_chip
        peak = device.peak_flops_per_s("bf16")
        recomputed = step.recomputed_flops
        return Work(
            devices=self.source.module.devices // per_chip,
            device=device.name,
            tokens=facts.tokens,
            flops=(step.work.matrix_flops - recomputed) * per_chip if step.work.matrix_flops else None,
            flops_note="custom calls that state no operations" if step.work.unknown else "",
            peak_flops_per_s=peak,
            precision="bf16",
            price_per_device_hour_usd=cluster.price_per_device_hour_usd,
            power_per_device_w=cluster.power_per_device_w or device.power_w,
            power_with_host=cluster.power_per_device_w is not None,
        )

    def diagnose(self, here: JobInScenario) -> Diagnosis:
        return diagnosis(here, self.step_in(here.scenario), self.source)

    @cached_property
    def _stated(self) -> tuple[str, ...]:
        if self._ran is not None:
            return (
                "instructions and collectives take what was measured of them; those of another mesh that did not run follow from "
                "fitted times for each operation and byte",
            )
        return (
            *self.source.warnings,
            f"the interval is an estimate: +-{COMPARED_ERROR:.0%} on {listed(COMPARED_DEVICES)}, which holds 21 of 22 published "
            f"runs of dense decoders; +-{OTHER_DEVICE_ERROR:.0%} on other devices, of which no run was compared",
            "all devices run the program at the same speed, and input is ready in time",
        )

    def _assumptions(self, step: XlaStep, cluster: Cluster) -> tuple[str, ...]:
        assumed = list(self._stated)
        if self.source.cluster is not None and cluster != self.source.cluster:
            compiled_for, device = (each.groups[0].host.device.name for each in (self.source.cluster, cluster))
            if compiled_for != device:
                assumed.append(f"the program was compiled for {compiled_for}; for {device} XLA may fuse and schedule otherwise")
        if step.unknown_loops:
            assumed.append(
                f"{len(step.unknown_loops)} loops whose number of turns depends on data count once ({step.unknown_loops[0]})"
            )
        if step.branches:
            assumed.append(f"of {step.branches} branches the longest counts")
        if step.work.unknown:
            calls = f"{step.work.unknown} custom calls state" if step.work.unknown > 1 else "1 custom call states"
            assumed.append(f"{calls} no operations, and take as long as their bytes at least")
        if self.askable and self.source.facts.tokens is None:
            assumed.append("the script does not state the tokens of a step, so that nobody checks whether meshes compute the same")
        if not self.source.facts.device_ids:
            assumed.append(
                "the text does not say which device is which: its numbers are taken in the order in which JAX lists the devices, "
                "and another order changes which links collectives use"
            )
        return tuple(assumed)


class XlaObjective(JobObjective[XlaJob]):
    """A compiled program as a search asks it: few points are compiled, the most promising first."""

    estimates = True  # See `Ranked`.

    def ranked(self, settled: Callable[[Hashable, float], bool] = lambda family, bound_us: False) -> Iterator[BoundedPlan]:
        """Plans of the points that are worth a compilation. Nothing bounds their steps but a compilation."""
        job = self.job
        order = job.order = CompileOrder(job.captured, choices_of(job.source.facts))
        order.tell(job.captured, self.parts(job.captured))
        while (point := order.ask()) is not None:
            yield BoundedPlan(point.plan(job.captured), 0.0)
            order.tell(point, self.parts(point))

    def parts(self, point: Point) -> StepParts | None:
        """The parts of the step of a point, which is compiled for it; None: it does not run, or not within the memory limit."""
        scenario = replace(self.here.scenario, plan=point.plan(self.job.captured))
        lowered = self.job.lower(scenario)
        limit_bytes, needed_bytes = self.here.memory_limit_bytes, lowered.peak_memory_bytes
        is_over = limit_bytes is not None and (needed_bytes is None or needed_bytes > limit_bytes)
        if lowered.infeasible is not None or is_over:
            return None
        alone_us, of_axes_us = axes_us(self.job.step_in(scenario), lowered.replayable.timeline())
        return StepParts(alone_us, of_axes_us, needed_bytes)

    def reasons(self, plans: Sequence[Plan]) -> tuple[str, ...]:
        """How many points were compiled, which is the next, and which choices had no effect."""
        order = self.job.order
        if order is None or order.best is None:
            return ()
        if order.asked is not None and order.asked not in order.known and self.job.compilations.is_made(order.asked):
            order.tell(order.asked, self.parts(order.asked))  # the last trial
        points = "combinations of mesh and choices" if self.job.captured.chosen else "meshes"
        refused = sum(parts is None for parts in order.known.values())
        sentences = [
            f"{len(order.known)} of {len(order.points)} {points} were compiled"
            + (f"; {refused} of them cannot run or do not fit." if refused else ".")
        ]
        following, (_, best_us) = order.ask(), order.best
        if following is None:
            sentences.append("None of the others has an estimate that is worth a compilation.")
        else:
            estimate = f"estimated at {time_text(order.estimate_us(following))}, the best step takes {time_text(best_us)}"
            sentences.append(f"The next would be {following} ({estimate}): the same command with more --trials compiles it.")
        for first, other in self.job.compilations.equal_programs():
            pairs = zip(first.chosen, other.chosen, strict=True)
            changed = ", ".join(f"{name}={value}" for before, (name, value) in pairs if before[1] != value)
            mesh = pairs_text(dict(first.mesh)).replace("+", ", ")
            sentences.append(f"With {mesh}, {changed} has no effect: the compiler makes the same program, which was replayed once.")
        return tuple(dict.fromkeys(sentences))
