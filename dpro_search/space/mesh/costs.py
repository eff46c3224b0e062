"""`step_costs`: what the parts of a training step take under a strategy on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import CollectiveKind
from dpro_search.costmodel.gpu_ops import OpCosts
from dpro_search.graph.model import Block, Model, OpType, blocks_of, elements
from dpro_search.space.mesh.compile import BlockProgram, Collective, LocalOp, compile_block
from dpro_search.space.mesh.groups import Groups
from dpro_search.space.mesh.runtime import Runtime
from dpro_search.space.mesh.step_graph import LayerCosts, StepCosts
from dpro_search.space.mesh.strategy import Recompute, Strategy, layout_of

ADAM_PASSES_BYTES = 30.0
"""Read and written by Adam for each parameter: gradient (4), two moments and the fp32 parameter twice (24), the parameter (2)."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, how it is trained, and on what."""

    model: Model
    sequence: int
    strategy: Strategy
    cluster: Cluster
    precision: str = "bf16"
    runtime: Runtime = field(default_factory=Runtime)
    frozen: bool = False  # Only adapters are trained (LoRA): no gradients of the model's weights, and no optimizer state of them.

    @property
    def element_bytes(self) -> float:
        """Of activations and parameters."""
        return 4.0 if self.precision in ("fp32", "tf32") else 2.0


def stages_of(workload: Workload) -> tuple[tuple[Block, ...], ...]:
    """Blocks of each pipeline stage, layers one by one: as many on each, the first ones with those that are left over."""
    strategy = workload.strategy
    embedding, *layers, head = blocks_of(workload.model)
    each = [replace(block, count=1) for block in layers for _ in range(block.count)]
    count = strategy.pp * strategy.virtual_stages
    stages: list[tuple[Block, ...]] = []
    for size in _stages_by_cost(each, head, count) if workload.runtime.stages_by_cost else _even_stages(len(each), count):
        stages.append(tuple(each[:size]))
        each = each[size:]
    stages[0] = (embedding, *stages[0])
    stages[-1] = (*stages[-1], head)
    return tuple(stages)


def _even_stages(layers: int, count: int) -> list[int]:
    per_stage, left = divmod(layers, count)
    return [per_stage + (stage < left) for stage in range(count)]


def _stages_by_cost(layers: Sequence[Block], head: Block, count: int) -> list[int]:
    """Layers of each stage, where a stage ends with the layer that reaches its share of all multiply-adds with weights."""
    costs = [sum(elements(op.weight, block.sizes) for op in block.ops if op.rows) for block in layers]
    total = sum(costs) + sum(elements(op.columns, head.sizes) * elements(op.reduction, head.sizes) for op in head.ops if op.rows)
    found, spent, stage = [0] * count, 0.0, 0
    for cost in costs:
        spent += cost
        found[stage] += 1
        if spent >= total * (stage + 1) / count and stage < count - 1:
            stage += 1
    return found


class Pricer:
    """Costs of the blocks of a workload; equal blocks are priced once."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._layout = layout_of(workload.strategy)
        self.groups = Groups(workload.strategy, workload.cluster)
        device = workload.cluster.groups[0].host.device
        self._ops = OpCosts(device, workload.precision, workload.element_bytes)
        self._programs: dict[str, BlockProgram] = {}
        self._layers: dict[str, LayerCosts] = {}

    def program(self, block: Block) -> BlockProgram:
        """What a rank does in a block."""
        if block.name not in self._programs:
            workload = self._workload
            self._programs[block.name] = compile_block(block, self._layout, workload.strategy.micro_batch, workload.sequence)
        return self._programs[block.name]

    def layer(self, block: Block) -> LayerCosts:
        """What a block takes."""
        if block.name not in self._layers:
            self._layers[block.name] = self._priced(block)
        return self._layers[block.name]

    def _priced(self, block: Block) -> LayerCosts:
        program, workload = self.program(block), self._workload
        strategy, runtime = workload.strategy, workload.runtime
        forward_us = sum(self._step_us(step, backward=False) for step in program.forward)
        backward_us = sum(self._step_us(step, backward=True) for step in program.backward)
        is_layer = block.name.startswith("layer")
        if is_layer:
            forward_us = max(forward_us, runtime.layer_host_us)
            backward_us = max(backward_us, 2 * runtime.layer_host_us)
        if is_layer and strategy.recompute is Recompute.FULL:
            backward_us += forward_us
        elif is_layer and strategy.recompute is Recompute.SELECTIVE and not runtime.flash_attention:
            core = [step for step in program.forward if isinstance(step, LocalOp) and step.op.type is OpType.ATTENTION]
            backward_us += sum(self._step_us(step, backward=False) for step in core)
        gather_us, reduce_us = self._exchanges(program)
        return LayerCosts(forward_us=forward_us, backward_us=backward_us, gather_us=gather_us, reduce_us=reduce_us)

    def _step_us(self, step: LocalOp | Collective, *, backward: bool) -> float:
        if isinstance(step, Collective):
            return step.repeats * self.groups.us(step.type, step.elements * self._workload.element_bytes, step.axis)
        if backward:
            return self._ops.backward_us(step.op, step.sizes, frozen=self._workload.frozen)
        return self._ops.forward_us(step.op, step.sizes)

    def _exchanges(self, program: BlockProgram) -> tuple[float, float]:
        """All-gather of parameters and reduction of gradients of a block, over the ranks that hold the same."""
        strategy, runtime = self._workload.strategy, self._workload.runtime
        gather_us = reduce_us = 0.0
        if self._workload.frozen and strategy.zero_stage < 3:
            return 0.0, 0.0
        for expert in (False, True):
            reduced = (weight for weight in program.weights if weight.expert == expert and not weight.sparse)
            elements = sum(weight.elements for weight in reduced)
            axis = "expert replicas" if expert else "replicas"
            gradients = elements * runtime.gradient_bytes
            if not elements:
                continue
            if self._workload.frozen:
                gather_us += self.groups.us(CollectiveKind.ALL_GATHER, elements * self._workload.element_bytes, axis)
            elif strategy.zero_stage:
                gather_us += self.groups.us(CollectiveKind.ALL_GATHER, elements * self._workload.element_bytes, axis)
                reduce_us += self.groups.us(CollectiveKind.REDUCE_SCATTER, gradients, axis)
            else:
                reduce_us += self.groups.us(CollectiveKind.ALL_REDUCE, gradients, axis)
        return gather_us, reduce_us

    def update_us(self, blocks: tuple[Block, ...]) -> float:
        """The optimizer's work for some blocks on one rank."""
        strategy = self._workload.strategy
        if self._workload.frozen:
            return 0.0
        held = 0.0
        for block in blocks:
            for weight in self.program(block).weights:
                if weight.sparse:
                    continue
                ways = (strategy.expert_dp if weight.expert else strategy.dp * strategy.cp) if strategy.zero_stage else 1
                held += weight.elements / ways
        return self._ops.moved_us(held * ADAM_PASSES_BYTES)


def step_costs(workload: Workload) -> StepCosts:
    """What the parts of a step take."""
    strategy, pricer = workload.strategy, Pricer(workload)
    stages = stages_of(workload)
    stream = strategy.micro_batch * workload.sequence * workload.model.hidden / strategy.cp
    sent_bytes = stream * workload.element_bytes / (strategy.tp if strategy.sequence_parallel else 1)
    on_rank = [tuple(block for stage in stages[rank :: strategy.pp] for block in stage) for rank in range(strategy.pp)]
    return StepCosts(
        stages=tuple(tuple(pricer.layer(block) for block in stage) for stage in stages),
        send_us=pricer.groups.send_us(sent_bytes),
        update_us=tuple(pricer.update_us(blocks) for blocks in on_rank),
        every_pass=strategy.zero_stage == 3,
        regather=strategy.reshard_after_forward,
        overlap=workload.runtime.overlap_gradients,
        overlap_send=workload.runtime.overlap_sends,
    )
