"""`step_costs`: what the parts of a training step take under a strategy on a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dpro_search.cluster import Cluster
from dpro_search.collect.trace import CollectiveKind
from dpro_search.costmodel.gpu_ops import OpCosts
from dpro_search.graph.model import Architecture, Block, OpType, blocks_of
from dpro_search.space.mesh.calibration import Calibration
from dpro_search.space.mesh.compile import BlockProgram, Collective, LocalOp, compile_block
from dpro_search.space.mesh.groups import Groups
from dpro_search.space.mesh.runtime import Runtime
from dpro_search.space.mesh.step_graph import LayerCosts, StepCosts
from dpro_search.space.mesh.strategy import Recompute, Strategy, layout_of

ADAM_PASSES_BYTES = 30.0
"""Read and written by Adam for each parameter: gradient (4), two moments and the fp32 parameter twice (24), the parameter (2)."""


CONTENTION = 0.2
"""By how much compute is slower beside collectives: Duan et al. ("Proteus", TPDS 2024) fit 0.1 to 0.3 to machines and models."""
SLOWED = CONTENTION / (1 + CONTENTION)
"""Of the time of a collective that runs beside compute, what the compute loses."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, how it is trained, and on what."""

    model: Architecture
    sequence: int
    strategy: Strategy
    cluster: Cluster
    precision: str = "bf16"
    runtime: Runtime = field(default_factory=Runtime)
    calibration: Calibration = field(default_factory=Calibration)
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
    per_stage, left = divmod(len(each), count)
    stages: list[tuple[Block, ...]] = []
    for stage in range(count):
        size = per_stage + (stage < left)
        stages.append(tuple(each[:size]))
        each = each[size:]
    stages[0] = (embedding, *stages[0])
    stages[-1] = (*stages[-1], head)
    return tuple(stages)


class Pricer:
    """Costs of the blocks of a workload; equal blocks are priced once."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._layout = layout_of(workload.strategy)
        self.groups = Groups(workload.strategy, workload.cluster)
        device = workload.cluster.groups[0].host.device
        self._ops = OpCosts(device, workload.precision, workload.element_bytes, workload.runtime.kernels, continuous=True)
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

    def is_bound_by_host(self, block: Block) -> bool:
        """Whether the host takes longer to start a block's forward pass than the device to compute it."""
        steps = self.program(block).forward
        return self._host_us(steps, backward=False) >= sum(self._step_us(step, backward=False) for step in steps)

    def _priced(self, block: Block) -> LayerCosts:
        program, workload = self.program(block), self._workload
        strategy, runtime = workload.strategy, workload.runtime
        gather_us, reduce_us = self._exchanges(program)
        forward_us = sum(self._step_us(step, backward=False) for step in program.forward)
        backward_us = self._backward_us(program.backward) + self._accumulated_us(program)
        forward_us = max(forward_us, self._host_us(program.forward, backward=False))
        backward_us = max(backward_us, self._host_us(program.backward, backward=True))
        is_layer = block.name.startswith("layer")
        if is_layer and strategy.recompute is Recompute.FULL:
            backward_us += forward_us
        elif is_layer and strategy.recompute is Recompute.SELECTIVE and not runtime.flash_attention:
            core = [step for step in program.forward if isinstance(step, LocalOp) and step.op.type is OpType.ATTENTION]
            backward_us += sum(self._step_us(step, backward=False) for step in core)
        return LayerCosts(forward_us=forward_us, backward_us=backward_us, gather_us=gather_us, reduce_us=reduce_us)

    def _backward_us(self, steps: tuple[LocalOp | Collective, ...]) -> float:
        """Of a backward pass. Tensor parallel collectives run beside matmuls that do not need them, where the runtime does so.

        A matmul's input that is gathered again is needed by the gradient of the weight only, and the gradient of the input can be
        exchanged while that of the weight is computed (Megatron-LM's linear layers with asynchronous communication).
        """
        if not self._workload.runtime.overlap_tensor:
            return sum(self._step_us(step, backward=True) for step in steps)
        total_us = gathered_us = weight_us = 0.0
        for step in steps:
            if isinstance(step, Collective):
                us = self._step_us(step, backward=True)
                if step.axis != "tp":
                    total_us += us
                elif not step.gradient:
                    gathered_us += us
                else:
                    total_us += _beside(weight_us, us)
                    weight_us = 0.0
                continue
            total_us += weight_us
            weight_us = 0.0
            if step.op.type is OpType.MATMUL and not self._workload.frozen:
                factor = self._workload.calibration.matmul
                total_us += _beside(factor * self._ops.input_gradient_us(step.op, step.sizes), gathered_us)
                weight_us = factor * self._ops.weight_gradient_us(step.op, step.sizes)
            else:
                total_us += gathered_us + self._step_us(step, backward=True)
            gathered_us = 0.0
        return total_us + weight_us + gathered_us

    def _accumulated_us(self, program: BlockProgram) -> float:
        """What it takes to add a micro-batch's gradients to those before."""
        if self._workload.frozen:
            return 0.0
        held = sum(weight.elements for weight in program.weights)
        return self._moved_us(held * self._workload.runtime.accumulate_bytes)

    def _moved_us(self, count_bytes: float) -> float:
        return self._workload.calibration.memory * self._ops.moved_us(count_bytes)

    def _host_us(self, steps: tuple[LocalOp | Collective, ...], *, backward: bool) -> float:
        """Of the host, to start a pass."""
        host, calibration = self._workload.runtime.host, self._workload.calibration
        kernels = sum(self._ops.launches(step.op, backward=backward) for step in steps if isinstance(step, LocalOp))
        collectives = sum(isinstance(step, Collective) for step in steps)
        each_us = host.backward_us if backward else host.forward_us
        total_us = calibration.host * (host.layer_us + kernels * each_us + collectives * host.collective_us)
        if self.groups.placements["pp"].nodes > 1:
            tensor = sum(isinstance(step, Collective) and step.axis == "tp" for step in steps)
            total_us += calibration.send_rank_us * tensor * self._workload.strategy.tp
        return total_us

    def _step_us(self, step: LocalOp | Collective, *, backward: bool) -> float:
        if isinstance(step, Collective):
            return step.repeats * self._exchanged_us(step.type, step.elements * self._workload.element_bytes, step.axis)
        calibration = self._workload.calibration
        factor = {OpType.MATMUL: calibration.matmul, OpType.ATTENTION: calibration.attention}.get(step.op.type, calibration.memory)
        if backward:
            return factor * self._ops.backward_us(step.op, step.sizes, frozen=self._workload.frozen)
        return factor * self._ops.forward_us(step.op, step.sizes)

    def _exchanged_us(self, kind: CollectiveKind, size_bytes: float, axis: str) -> float:
        calibration = self._workload.calibration
        factor = calibration.between if self.groups.placements[axis].nodes > 1 else calibration.inside
        return factor * self.groups.us(kind, size_bytes, axis)

    def _exchanges(self, program: BlockProgram) -> tuple[float, float]:
        """All-gather of parameters and reduction of gradients of a block, over the ranks that hold the same."""
        strategy, runtime = self._workload.strategy, self._workload.runtime
        gather_us = reduce_us = 0.0
        if self._workload.frozen and strategy.zero_stage < 3:
            return 0.0, 0.0
        for expert in (False, True):
            elements = sum(weight.elements for weight in program.weights if weight.expert == expert)
            axis = "expert replicas" if expert else "replicas"
            gradients = elements * runtime.gradient_bytes
            if not elements:
                continue
            if self._workload.frozen:
                gather_us += self._exchanged_us(CollectiveKind.ALL_GATHER, elements * self._workload.element_bytes, axis)
            elif strategy.zero_stage:
                gather_us += self._exchanged_us(CollectiveKind.ALL_GATHER, elements * self._workload.element_bytes, axis)
                reduce_us += self._exchanged_us(CollectiveKind.REDUCE_SCATTER, gradients, axis)
            else:
                reduce_us += self._exchanged_us(CollectiveKind.ALL_REDUCE, gradients, axis)
        return gather_us, reduce_us

    def update_us(self, blocks: tuple[Block, ...]) -> float:
        """The optimizer's work for some blocks on one rank."""
        strategy = self._workload.strategy
        if self._workload.frozen:
            return 0.0
        held, tensors = 0.0, 0
        for block in blocks:
            for weight in self.program(block).weights:
                tensors += 1
                ways = (strategy.expert_dp if weight.expert else strategy.dp * strategy.cp) if strategy.zero_stage else 1
                held += weight.elements / ways
        host_us = self._workload.calibration.host * tensors * self._workload.runtime.host.parameter_us
        return max(self._moved_us(held * ADAM_PASSES_BYTES), host_us)


def _beside(compute_us: float, collective_us: float) -> float:
    """Of a collective and of compute that neither waits for the other."""
    return max(collective_us, compute_us + SLOWED * collective_us)


def step_costs(workload: Workload) -> StepCosts:
    """What the parts of a step take."""
    strategy, pricer = workload.strategy, Pricer(workload)
    stages = stages_of(workload)
    stream = strategy.micro_batch * workload.sequence * workload.model.hidden / strategy.cp
    sent_bytes = stream * workload.element_bytes / (strategy.tp if strategy.sequence_parallel else 1)
    on_rank = [tuple(block for stage in stages[rank :: strategy.pp] for block in stage) for rank in range(strategy.pp)]
    return StepCosts(
        stages=tuple(tuple(pricer.layer(block) for block in stage) for stage in stages),
        send_us=workload.calibration.between * pricer.groups.send_us(sent_bytes),
        update_us=tuple(pricer.update_us(blocks) for blocks in on_rank),
        every_pass=strategy.zero_stage == 3,
        regather=strategy.reshard_after_forward,
        overlap=workload.runtime.overlap_gradients,
        overlap_gathers=workload.runtime.overlap_gathers,
        slowed=SLOWED,
        overlap_send=workload.runtime.overlap_sends,
    )
