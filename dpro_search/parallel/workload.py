"""`Workload`: a model, how it is trained and on what; which of its blocks each pipeline stage and each rank has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dpro_search.cluster import Cluster
from dpro_search.cluster.device import BLOCK_SCALED
from dpro_search.parallel.costs.block_times import BlockTimes
from dpro_search.parallel.costs.compile import BlockProgram
from dpro_search.parallel.costs.groups import UNSCALED, KnownAlgorithms
from dpro_search.parallel.costs.recorded import RecordedTimes
from dpro_search.parallel.costs.scales import Scales
from dpro_search.parallel.gpu_ops import NARROW
from dpro_search.parallel.legality import stage_costs
from dpro_search.parallel.memory.kept import Kept
from dpro_search.parallel.model import Architecture, Block, Model, blocks_of
from dpro_search.parallel.runtime import GRAPH_TIMES, HostTimes, Runtime
from dpro_search.parallel.schedule import stages_on
from dpro_search.parallel.steps.step_costs import LayerCosts
from dpro_search.parallel.strategy import Recompute, Strategy

_DTYPE_BYTES = {"fp32": 4.0, "bf16": 2.0}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, how it is trained, and on what."""

    model: Model
    sequence: int
    strategy: Strategy
    cluster: Cluster
    precision: str = "bf16"
    runtime: Runtime = field(default_factory=Runtime)
    # Whether groups that exchange at the same time share links, and collectives slow the compute beside them; False: neither, to
    # see what that is worth.
    interference: bool = True
    # Of blocks that somebody measured: passes take as much longer or shorter than predicted as they did there.
    measured: tuple[BlockTimes, ...] = ()
    scales: Scales = UNSCALED  # Parts that take another time: as measured steps say, or as somebody asks.
    times: RecordedTimes | None = None  # Of blocks and exchanges, in place of what cost models say.
    cores: int = 0  # That all ranks share in turn; 0: each has its own.

    @property
    def element_bytes(self) -> float:
        """Bytes of an element of activations and parameters."""
        return 4.0 if self.precision in ("fp32", "tf32") else 2.0

    @property
    def product_bytes(self) -> float:
        """Bytes of an element of a weight that nothing updates, as products read it.

        Blocks with scales are of rows for one pass and of columns for the other: both are kept (Transformer Engine).
        """
        narrow = NARROW.get(self.precision)
        if narrow is None:
            return self.element_bytes
        return narrow.element_bytes * (2 if self.precision in BLOCK_SCALED else 1)

    @property
    def frozen(self) -> bool:
        """Whether only adapters are trained (LoRA)."""
        return isinstance(self.model, Architecture) and self.model.adapters is not None

    @property
    def frozen_bytes(self) -> float:
        """See `Adapters.frozen_bytes`."""
        adapters = self.model.adapters if isinstance(self.model, Architecture) else None
        return 0.0 if adapters is None else adapters.frozen_bytes

    @property
    def host(self) -> HostTimes:
        """Times of the host to start work. An update is no part of a layer's graph."""
        usual = self.runtime.host
        return replace(GRAPH_TIMES, parameter_us=usual.parameter_us) if self.strategy.cuda_graphs else usual

    @property
    def gradient_bytes(self) -> float:
        """Bytes of an element of a gradient while it is summed over micro-batches and ranks."""
        dtype = self.strategy.gradient_dtype
        return self.runtime.gradient_bytes if dtype is None else _DTYPE_BYTES[dtype]

    @property
    def reduces_once(self) -> bool:
        """Whether stages hold whole gradients until their last micro-batch: see `Runtime.stages_reduce_once`."""
        return self.runtime.stages_reduce_once and self.strategy.pp > 1 and self.strategy.zero_stage == 3

    @property
    def accumulate_bytes(self) -> float:
        """Moved for each parameter when gradients are added to those before, which are read and written."""
        return max(self.runtime.accumulate_bytes + 2 * (self.gradient_bytes - self.runtime.gradient_bytes), 0.0)


def stages_of(workload: Workload, known: SharedResults | None = None) -> tuple[tuple[Block, ...], ...]:
    """Blocks of each pipeline stage, layers one by one: as many on each, the first ones with those that are left over.

    A head that uses the embedding's matrix has a copy of it where it is on another rank.
    """
    strategy = workload.strategy
    count, copied = strategy.pp * strategy.virtual_stages, copies_embedding(workload)
    stages = {} if known is None else known.stages
    key = strategy.stage_layers or count, copied
    if key not in stages:
        stages[key] = _cut(workload, strategy.stage_layers, count, copied)
    return stages[key] * strategy.copies


def _cut(workload: Workload, given: Sequence[int], count: int, copied: bool) -> tuple[tuple[Block, ...], ...]:
    embedding, *layers, head = blocks_of(workload.model)
    if copied:
        head = blocks_of(replace(workload.model, tied=False))[-1]
    each = [one for block in layers for one in (replace(block, count=1),) * block.count]
    even = [len(part) for part in np.array_split(range(len(each)), count)]
    stages: list[tuple[Block, ...]] = []
    for size in given or (_stages_by_cost(each, head, count) if workload.runtime.stages_by_cost else even):
        stages.append(tuple(each[:size]))
        each = each[size:]
    stages[0] = (embedding, *stages[0])
    stages[-1] = (*stages[-1], head)
    return tuple(stages)


def _stages_by_cost(layers: Sequence[Block], head: Block, count: int) -> list[int]:
    """Layers of each stage, where a stage ends with the layer that reaches its share of all multiply-adds with weights.

    Every stage but the last one, which has the head, has a layer at least.
    """
    costs = stage_costs(layers, head)
    total = sum(costs)
    counts, spent, stage = [0] * count, 0.0, 0
    for number, cost in enumerate(costs[:-1], 1):
        spent += cost
        counts[stage] += 1
        full = spent >= total * (stage + 1) / count or len(layers) - number < count - 1 - stage
        if full and stage < count - 1:
            stage += 1
    return counts


def copies_embedding(workload: Workload) -> bool:
    """Whether the embedding and a head that uses its matrix are on different ranks of a pipeline."""
    plan = workload.strategy
    last = plan.pp * plan.virtual_stages * plan.copies - 1
    return workload.model.tied and last not in stages_on(plan.schedule, 0, plan.pp, plan.virtual_stages)


def ranks_of(workload: Workload, known: SharedResults | None = None) -> tuple[tuple[Block, ...], ...]:
    """Blocks of each rank of the pipeline."""
    plan, stages = workload.strategy, stages_of(workload, known)
    on_rank = (stages_on(plan.schedule, rank, plan.pp, plan.virtual_stages) for rank in range(plan.pp))
    return tuple(tuple(block for stage in stages_of_rank for block in stages[stage]) for stages_of_rank in on_rank)


def recomputed(strategy: Strategy, blocks: Sequence[Block]) -> tuple[bool, ...]:
    """Which blocks of a stage compute activations again in the backward pass: the first layers, or all."""
    if strategy.recompute is Recompute.NONE:
        return (False,) * len(blocks)
    most = strategy.recompute_layers or len(blocks)
    numbers = itertools.accumulate(block.name.startswith("layer") for block in blocks)
    return tuple(block.name.startswith("layer") and number <= most for block, number in zip(blocks, numbers, strict=True))


@dataclass(frozen=True, kw_only=True)
class SharedResults:
    """Intermediate results of a workload that are used again under the next strategy. Only the strategy may differ."""

    stages: dict[Any, tuple[tuple[Block, ...], ...]] = field(default_factory=dict)
    programs: dict[Any, BlockProgram] = field(default_factory=dict)
    passes: dict[Any, LayerCosts] = field(default_factory=dict)
    ways: KnownAlgorithms = field(default_factory=dict)
    kept: dict[Any, Kept] = field(default_factory=dict)
    parameters: dict[Any, dict[tuple[bool, bool, bool], float]] = field(default_factory=dict)
    held: dict[Any, dict[int, tuple[float, float, int]]] = field(default_factory=dict)
    factors: dict[tuple[str, BlockTimes, int], tuple[float, float]] = field(default_factory=dict)
