"""`PreparedJob`: a described job in a scenario, with everything that no plan changes: prices, candidates, cluster, work.

It is prepared once for all plans of the scenario; `PreparedJob.lowered` makes of a strategy what `ParallelJob.lower` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property

from dpro_search.collect.trace import Floats, TensorInfo
from dpro_search.deploy.step_split import AloneUs, StepSplit
from dpro_search.errors import InputError
from dpro_search.kinds._work import Work, price_source
from dpro_search.parallel.answers.accuracy import accuracy
from dpro_search.parallel.answers.breakdown import breakdown_us
from dpro_search.parallel.costs.domain import Domain
from dpro_search.parallel.costs.groups import UNSCALED
from dpro_search.parallel.costs.recorded import RankWork
from dpro_search.parallel.costs.scales import Scales
from dpro_search.parallel.file.description import ParallelDescription
from dpro_search.parallel.file.scenario import in_scenario
from dpro_search.parallel.frameworks import FRAMEWORKS
from dpro_search.parallel.gpu_ops import NARROW, capped_clock
from dpro_search.parallel.model import Model, blocks_of
from dpro_search.parallel.search.candidates import Candidates, choices_of
from dpro_search.parallel.search.cuts import balanced_cut
from dpro_search.parallel.search.space import StrategySpace
from dpro_search.parallel.settings import strategy_text
from dpro_search.parallel.steps.step_prices import StepPrices
from dpro_search.parallel.strategy import Strategy
from dpro_search.parallel.timed.split import alone_us, predicted_split
from dpro_search.parallel.workload import Workload
from dpro_search.quantities import memory_shortage_text
from dpro_search.replay.iterations import IterationTimes
from dpro_search.replay.lowered import ErrorModel, Lowered
from dpro_search.replay.replayer import replay
from dpro_search.replay.timeline import Timeline
from dpro_search.space.cluster import ClusterSpec, spec_on
from dpro_search.space.plan import Plan
from dpro_search.space.scenario import Scenario

TITLE = "a parallel job"  # the name of the kind


class PreparedJob:
    """A described job in a scenario.

    Parameters
    ----------
    description
        The job as its file describes it.
    scenario
        Changes of it; the scenario's plan does not matter.

    Attributes
    ----------
    description
        The job in the scenario.
    prices
        Prices of its steps, with the scenario's scales.
    space
        Its plans.

    Raises
    ------
    InputError
        The job cannot run like that.
    """

    def __init__(self, description: ParallelDescription, scenario: Scenario) -> None:
        self.scenario = scenario
        self.description = description = in_scenario(description, scenario)
        fixed, per_host = description.fixed, description.cluster.ranks_per_host or description.fixed.devices
        self.tensors = _gradients(description)
        self._scales = _scales(scenario)
        workload = replace(description.workload(description.strategy), scales=self._scales)
        self.prices = prices = StepPrices(workload)
        choices = choices_of(
            fixed, FRAMEWORKS[description.framework]._replace(runtime=description.runtime), min(per_host, fixed.devices)
        )
        candidates = Candidates(fixed, choices, description.strategy, lambda strategy: balanced_cut(prices, strategy))
        self.space = StrategySpace(TITLE, description.runs, fixed, candidates, self.tensors)
        self.device_bytes = description.device.memory_bytes
        self._lowered: dict[Strategy, Lowered] = {}

    def lowered(self, strategy: Strategy) -> Lowered:
        """The job under a strategy."""
        if strategy not in self._lowered:
            self._lowered[strategy] = self._newly_lowered(strategy)
        return self._lowered[strategy]

    def _newly_lowered(self, strategy: Strategy) -> Lowered:
        domain = self.prices.domain(strategy)
        peak_bytes, has_bytes = round(sum(self.memory_bytes(strategy).values())), self.device_bytes
        host_bytes, host_has = self.host_memory(strategy)
        if host_has is not None and host_bytes > host_has:
            shortage = f"the host {memory_shortage_text(host_bytes, host_has)}"
        elif has_bytes is not None and peak_bytes > has_bytes:
            shortage = memory_shortage_text(peak_bytes, has_bytes)
        else:
            shortage = None
        return Lowered(
            replayable=StepReplay(job=self, strategy=strategy, domain=domain),
            error=ErrorModel(model=0.0),  # the interval of each replay includes it
            as_recorded=False,
            cluster=self.cluster,
            calibration=accuracy().calibration(domain, self.description.gpu_vendor),
            assumptions=self.assumptions,
            peak_memory_bytes=peak_bytes,
            infeasible=shortage,
        )

    def workload(self, plan: Plan) -> Workload:
        """The job under a plan."""
        return self.description.workload(self.space.strategy(plan))

    def rank_work(self, plan: Plan) -> dict[str, RankWork]:
        """The work of a rank for a micro-batch, by the name of each block."""
        return self.prices.rank_work(self.space.strategy(plan))

    def split(self, plan: Plan) -> StepSplit:
        """Breakdown of the time of a step, in the parts that paced ranks measure."""
        return predicted_split(self.prices, self.space.strategy(plan))

    def alone_us(self, plan: Plan) -> AloneUs:
        """Times of a plan's exchanges on links that nothing else uses."""
        return alone_us(self.prices.workload_of(self.space.strategy(plan)))

    def parts_us(self, plan: Plan) -> dict[str, float]:
        """The parts of a step under a plan, which add up to it."""
        replayable = self.lowered(self.space.strategy(plan)).replayable
        assert isinstance(replayable, StepReplay)
        return replayable.parts_us

    def memory_bytes(self, strategy: Strategy) -> dict[str, float]:
        """Memory of the rank that needs most, by purpose."""
        memory = self.prices.memory(strategy)
        return {
            field.name.removesuffix("_bytes"): getattr(memory, field.name)
            for field in fields(memory)
            if field.name.endswith("_bytes")
        }

    def host_memory(self, strategy: Strategy) -> tuple[int, int | None]:
        """Bytes that the ranks of a host move to its memory, and what it has; None: not known."""
        host = self.description.cluster.groups[0].host
        moved = self.prices.memory(strategy).offloaded * min(host.devices, strategy.devices)
        return round(moved), None if host.memory_bytes is None else round(host.memory_bytes)

    def interval_us(self, step_us: float, strategy: Strategy, domain: Domain) -> tuple[float, float]:
        """The interval of a measured step; it holds eager and compiled code if the description leaves that open."""
        vendor = self.description.gpu_vendor
        possible_us = [step_us, *(prices.step_us(strategy) for prices in self._possible_prices)]
        intervals_us = [accuracy().interval_us(each_us, domain, vendor) for each_us in possible_us]
        likely, least = capped_clock(self.description.device)
        return min(low_us for low_us, _ in intervals_us), max(high_us for _, high_us in intervals_us) * likely / least

    @cached_property
    def _possible_prices(self) -> tuple[StepPrices, ...]:
        workload = self.prices.workload
        return tuple(StepPrices(replace(workload, runtime=runtime)) for runtime in self.description.possible_runtimes)

    @cached_property
    def least_us(self) -> float:
        """Time of the model's FLOPs at the peak of a device, with what-ifs of faster computation; 0: not known."""
        work, scales = self.work, self._scales
        if work.flops is None or not work.peak_flops_per_s:
            return 0.0
        faster = min(scales.compute, 1.0) * min(scales.matmul, scales.attention, 1.0)
        return work.flops / work.peak_flops_per_s * 1e6 * faster

    @cached_property
    def cluster(self) -> ClusterSpec:
        """Cores and links of the ranks."""
        return spec_on(self.description.cluster, self.description.fixed.devices).spec

    @cached_property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences that say what predictions take for granted: what the description leaves open."""
        description, assumed = self.description, list(self.description.warnings)
        if description.batch_per_replica is not None:
            samples, total = description.batch_per_replica, description.fixed.global_batch
            assumed.append(f"each replica has a batch of {samples}, so that all devices together have {total}")
        if description.chosen:
            today = strategy_text(self.space.today)
            assumed.append(f"how the job runs was not given; assumed is a usual plan of its framework: {today}")
        return tuple(assumed)

    @cached_property
    def work(self) -> Work:
        """Work of a step."""
        fixed, cluster, precision = self.description.fixed, self.description.cluster, self.description.precision
        device, power_w = self.description.device, cluster.power_per_device_w
        return Work(
            devices=fixed.devices,
            device=device.name,
            tokens=fixed.global_batch * fixed.sequence if fixed.has_tokens else None,
            flops=fixed.global_batch * model_flops(fixed.model, fixed.sequence) / fixed.devices,
            peak_flops_per_s=device.peak_flops_per_s(precision),
            precision=precision,
            price_per_device_hour_usd=cluster.price_per_device_hour_usd,
            price_source=price_source(cluster),
            power_per_device_w=power_w if power_w is not None else device.power_w,
            power_with_host=power_w is not None,
        )


@dataclass(frozen=True, kw_only=True)
class StepReplay:
    """A step of a described job under a strategy, as verbs replay it."""

    job: PreparedJob
    strategy: Strategy
    domain: Domain  # The domain whose errors the prediction has.

    @property
    def op_count(self) -> int:
        return len(self.job.prices.graph(self.strategy))

    def iterations(self, *, detailed: bool = False) -> IterationTimes:
        step_us = self.job.prices.step_us(self.strategy)
        return IterationTimes(
            iteration_us=step_us,
            settled=True,
            breakdown_us=dict(self.parts_us) if detailed else {},
            interval_us=self.job.interval_us(step_us, self.strategy, self.domain),
            floor_us=min(self.job.least_us, step_us),
        )

    @cached_property
    def parts_us(self) -> dict[str, float]:
        """The parts of the step, which add up to it."""
        prices = self.job.prices
        return breakdown_us(prices, self.strategy, prices.step_us(self.strategy))

    def timeline(self) -> Timeline:
        """One rank of each pipeline stage: the others of a stage do the same."""
        return replay(self.job.prices.graph(self.strategy))

    def sampled_us(self, *, samples: int, seed: int = 0, on_sample: Callable[[], None] = lambda: None) -> Floats:
        raise InputError("cost models give one duration of each op: they cannot be drawn anew")


def _scales(scenario: Scenario) -> Scales:
    """All changes of speed of a scenario together."""
    scales = UNSCALED
    for scale in scenario.scales:
        scales = replace(scales, **{scale.what: getattr(scales, scale.what) * scale.factor})
    return scales


def model_flops(model: Model, sequence: int) -> float:
    """FLOPs of a forward and a backward pass of one sequence, without masked scores; frozen weights have no gradients."""
    return sum(
        (2 if op.fixed and op.weight else 3) * block.count * op.forward_flops(block.sizes_at(1, sequence))
        for block in blocks_of(model)
        for op in block.ops
    )


def _gradients(description: ParallelDescription) -> tuple[TensorInfo, ...]:
    """One for each block, the last one first: what data parallel ranks exchange."""
    dtype = {"bf16": "bfloat16", "fp16": "float16", **dict.fromkeys(NARROW, "bfloat16")}.get(description.precision, "float32")
    tensors = []
    for block in reversed(blocks_of(description.fixed.model)):
        count = round(block.parameters())
        for number in reversed(range(block.count)):
            name = f"{block.name}.{number}" if block.count > 1 else block.name
            size = count * (4 if dtype == "float32" else 2)
            tensors.append(TensorInfo(name=name, node=name, dtype=dtype, shape=(count,), size_bytes=size))
    return tuple(tensors)
