"""`Pricer`: time of a rank's work and exchanges in the blocks of a model, under a strategy on a cluster."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from dpro_search.collect.trace import CollectiveKind
from dpro_search.errors import InputError
from dpro_search.parallel.costs.block_times import nearest
from dpro_search.parallel.costs.compile import EXPERTS, BlockCollective, BlockProgram, LocalOp, compile_block, kept_of_matmuls
from dpro_search.parallel.costs.exchange import backward_tensors, gradient_buckets, parameter_collectives
from dpro_search.parallel.costs.groups import UNSCALED, Groups
from dpro_search.parallel.costs.recorded import BlockCut, ModelledWork, PassWork, RankWork
from dpro_search.parallel.gpu_ops import NARROW, OpCosts, slowest
from dpro_search.parallel.layout import layout_of
from dpro_search.parallel.memory.kept import Kept, kept_of
from dpro_search.parallel.model import Block, Op, OpType, elements
from dpro_search.parallel.runtime import Selective
from dpro_search.parallel.steps.step_costs import LayerCosts
from dpro_search.parallel.strategy import Recompute, Strategy, key_without
from dpro_search.parallel.workload import SharedResults, Workload, copies_embedding, recomputed

NO_HOST_LINK = "how fast a device reaches its host's memory is not known: give the cluster's file pcie.rate or host_link_rate"
COPY_SHARE = 0.88
"""Share of the rate of a link to the host that copies of pinned memory reach: 55.6 of 63 GB/s on H100 (nvbandwidth's README)."""

CONTENTION = 0.2
"""By how much compute is slower beside collectives: Duan et al. ("Proteus", TPDS 2024) fit 0.1 to 0.3 to machines and models."""
SLOWED = CONTENTION / (1 + CONTENTION)
"""Fraction of an overlapping collective's duration by which compute is slowed down."""

_SPLIT = (OpType.MATMUL, OpType.GATHER)  # ops whose weights tensor parallel ranks share
_IRRELEVANT_TO_PROGRAMS = frozenset(
    (
        *("dp", "pp", "virtual_stages", "stage_layers", "schedule", "global_batch", "zero_stage", "dp_replicate"),
        *("reshard", "prefetch_layers", "recompute", "recompute_layers", "gradient_dtype"),
        *("offload_optimizer", "offload_activations", "cuda_graphs", "overlap_experts"),
    )
)
"""Settings of a strategy that change nothing about a rank's work in a block, beside what `copies_embedding` says of them."""
_IRRELEVANT_TO_PASSES = _IRRELEVANT_TO_PROGRAMS - {"gradient_dtype", "offload_activations", "cuda_graphs", "overlap_experts"}
"""Settings that change nothing about the time of a block's passes, beside what else is in `passes_key`."""


def passes_key(workload: Workload, recompute: Recompute) -> Hashable:
    """A value that is equal for the strategies of a job under which the passes of its blocks take the same time.

    Groups of ranks follow from the degrees and the number of devices. ZeRO and its replicas count only where recorded ranks wait
    for the slowest of those that share parameters (see `Pricer`).
    """
    plan = workload.strategy
    sharded = plan.zero_stage == 3
    waiting_ranks = plan.zero_ways if sharded and workload.times is not None else 1
    key = key_without(plan, _IRRELEVANT_TO_PASSES)
    return key, recompute, plan.devices, copies_embedding(workload), sharded, waiting_ranks


class OpTime(NamedTuple):
    """Time of an op on a rank, for one micro-batch."""

    op: Op
    forward_us: float
    backward_us: float


class Pricer:
    """Costs of the blocks of a workload; equal blocks are priced once, with `known` once for all strategies that agree on them.

    Attributes
    ----------
    split
        Key of the programs of blocks: equal for strategies under which a rank does the same work.

    Parameters
    ----------
    waits_for
        Devices whose slowest one all wait for; None: the strategy's.
    """

    def __init__(self, workload: Workload, known: SharedResults | None = None, *, waits_for: int | None = None) -> None:
        self._workload, self._known = workload, known or SharedResults()
        self._layout = layout_of(workload.strategy, regather_inputs=workload.runtime.regather_inputs)
        self.groups = Groups(
            workload.strategy,
            workload.cluster,
            workload.scales,
            self._known.ways,
            shared=workload.interference,
            recorded=workload.times,
        )
        self.slowed = SLOWED if workload.interference else 0.0
        device = workload.scales.device(workload.cluster.groups[0].host.device)
        self._ops = OpCosts(device, workload.precision, workload.element_bytes, workload.runtime.kernels, continuous=True)
        self._layers: dict[tuple[str, bool], LayerCosts] = {}
        self._stages: dict[tuple[str, ...], tuple[LayerCosts, ...]] = {}
        self._devices = workload.strategy.devices if waits_for is None else waits_for
        factor, scales = slowest(self._devices), workload.scales
        self._matmul, self._attention = factor * scales.matmul, factor * scales.attention
        self.split = key_without(workload.strategy, _IRRELEVANT_TO_PROGRAMS), copies_embedding(workload)

    def program(self, block: Block) -> BlockProgram:
        """The work of a rank in a block."""
        key = block.name, self.split
        program = self._known.programs.get(key)
        if program is None:
            workload = self._workload
            program = compile_block(block, self._layout, workload.strategy.micro_batch, workload.sequence)
            self._known.programs[key] = program
        return program

    def kept(self, block: Block) -> Kept:
        """The activations that a rank keeps of the forward pass of a block."""
        key = block.name, self.split
        if key not in self._known.kept:
            workload, rules = self._workload, self._workload.runtime.memory
            self._known.kept[key] = kept_of(
                self.program(block),
                rules,
                workload.element_bytes,
                selective=workload.runtime.selective,
                stores_scores=not workload.runtime.flash_attention,
                copies_output=rules.copies_output(workload.cluster.groups[0].host.device),
                dropout=workload.model.dropout > 0,
                quantized=workload.frozen_bytes > 0,
                matmul_input_bytes=self._matmul_input_bytes(block),
                ring=rules.transformer_engine and workload.strategy.cp > 1,
            )
        return self._known.kept[key]

    def _matmul_input_bytes(self, block: Block) -> float | None:
        """Bytes of an element that a layer's matmuls keep of their inputs; None: as these are (Transformer Engine: linear.py)."""
        if self._workload.frozen or not self._workload.runtime.memory.transformer_engine or not block.name.startswith("layer"):
            return None
        narrow = NARROW.get(self._workload.precision)
        return None if narrow is None else narrow.element_bytes

    def layer(self, block: Block, *, again: bool = True) -> LayerCosts:
        """Costs of a block. `again`: whether the strategy recomputes the activations of this block."""
        key = block.name, again
        if key not in self._layers:
            self._layers[key] = self._priced(block, self._workload.strategy.recompute if again else Recompute.NONE)
        return self._layers[key]

    def is_bound_by_host(self, block: Block) -> bool:
        """Whether the host takes longer to start a block's forward pass than the device to compute it."""
        steps = self.program(block).forward
        return self._host_us(steps, backward=False) >= sum(self._step_us(step, backward=False) for step in steps)

    def paces(self, block: Block, *, backward: bool) -> tuple[float, float]:
        """Time of a pass of a block on the device, and of the host to start it."""
        program = self.program(block)
        steps = program.backward if backward else program.forward
        device_us = self._backward_us(steps) if backward else sum(self._step_us(step, backward=False) for step in steps)
        return device_us, self._host_us(steps, backward=backward)

    def _priced(self, block: Block, recompute: Recompute) -> LayerCosts:
        gather_us, reduce_us = self._exchanges(self.program(block))
        return replace(self.passes(block, recompute), gather_us=gather_us, reduce_us=reduce_us + self._handed_over_us(block))

    def passes(self, block: Block, recompute: Recompute | None = None) -> LayerCosts:
        """Costs of a block without the exchanges between replicas. `recompute`: replaces the strategy's value."""
        recompute = self._workload.strategy.recompute if recompute is None else recompute
        key = block.name, passes_key(self._workload, recompute), self._devices
        passes = self._known.passes.get(key)
        if passes is None:
            passes = self._known.passes[key] = self._passes(block, self.program(block), recompute)
        return passes

    def _passes(self, block: Block, program: BlockProgram, recompute: Recompute) -> LayerCosts:
        """Forward and backward pass of a block. What it takes of the strategy must be in `passes_key`."""
        workload = self._workload
        recorded, forward, backward = self._recorded_own(block), 1.0, 1.0
        waits = [self._waits_us(steps, backward=steps is program.backward) for steps in (program.forward, program.backward)]
        if recorded is not None:
            slowest_work = recorded.of_slowest(self._waiting_ranks)
            forward_us, backward_us = slowest_work.forward_us + waits[0], slowest_work.backward_us + waits[1]
        else:
            forward_us = sum(self._step_us(step, backward=False) for step in program.forward)
            backward_us = self._backward_us(program.backward) + self._accumulated_us(program)
            if workload.strategy.overlap_experts:
                forward_us = self._overlapped_us(forward_us, program.forward, backward=False)
                backward_us = self._overlapped_us(backward_us, program.backward, backward=True)
            forward_us = max(forward_us, self._host_us(program.forward, backward=False))
            backward_us = max(backward_us, self._host_us(program.backward, backward=True))
            forward, backward = self._factors(block)
            forward_us, backward_us = forward * forward_us, backward * backward_us
        is_layer = block.name.startswith("layer")
        if is_layer and recompute is Recompute.FULL:
            backward_us += forward_us
            waits[1] += waits[0]
        elif is_layer and recompute is Recompute.SELECTIVE and workload.runtime.has_selective:
            backward_us += forward * self._selective_us(program)
        if is_layer and workload.strategy.offload_activations:
            copy_us = self.copied_us(self.kept(block).held_bytes(recompute))
            together = max if workload.runtime.overlap_offload else operator.add
            forward_us, backward_us = together(forward_us, copy_us), together(backward_us, copy_us)
        costs = LayerCosts(forward_us=forward_us, backward_us=backward_us)
        if workload.cores:
            costs = replace(costs, waits_forward_us=waits[0], waits_backward_us=waits[1])
        weights_us = backward * self._weights_us(program)
        if recorded is not None:  # their share of the pass is as modelled
            modelled_us = self._modelled(block, self._cut).backward.us
            weights_us *= recorded.backward_us / modelled_us if modelled_us > 0 else 0.0
        return replace(costs, weights_us=weights_us)

    def _selective_us(self, program: BlockProgram) -> float:
        """Work and exchanges that selective recomputation repeats in the backward pass of a layer."""
        runtime = self._workload.runtime
        if runtime.selective is Selective.SCORES:
            core = [step for step in program.forward if isinstance(step, LocalOp) and step.op.type is OpType.ATTENTION]
            return sum(self._step_us(step, backward=False) for step in core)
        shares, total_us = kept_of_matmuls(program), 0.0
        for step in program.forward:
            if isinstance(step, BlockCollective):
                kept = float(step.type is CollectiveKind.REDUCE_SCATTER)
            elif step.op.type is OpType.ATTENTION:
                kept = float(runtime.flash_attention)
            else:
                kept = sum(shares.get(step.op.name, ()))
            total_us += (1 - kept) * self._step_us(step, backward=False)
        return total_us

    def _factors(self, block: Block) -> tuple[float, float]:
        """Ratios of measured to predicted time of a block's passes, from the most similar measured block; 1 if none exists."""
        workload = self._workload
        block_times = nearest(workload.measured, block, workload.sequence, workload.strategy)
        if block_times is None:
            return 1.0, 1.0
        key = block.name, block_times, self._devices
        if key not in self._known.factors:
            measured_setting = replace(
                workload, strategy=block_times.strategy, sequence=block_times.sequence, measured=(), scales=UNSCALED
            )
            alone = Pricer(measured_setting, waits_for=self._devices).passes(block)
            self._known.factors[key] = block_times.forward_us / alone.forward_us, block_times.backward_us / alone.backward_us
        return self._known.factors[key]

    def op_times(self, block: Block) -> tuple[OpTime, ...]:
        """Modelled times of a block's ops on a rank, without communication."""
        program = self.program(block)
        forward_us, backward_us = (
            {
                step.op.name: self._step_us(step._replace(beside=()), backward=steps is program.backward)
                for step in steps
                if isinstance(step, LocalOp)
            }
            for steps in (program.forward, program.backward)
        )
        ops = [step.op for step in program.forward if isinstance(step, LocalOp)]
        return tuple(OpTime(op, forward_us[op.name], backward_us.get(op.name, 0.0)) for op in ops)

    def rank_work(self, block: Block) -> RankWork:
        """The time of a rank's own work in a block."""
        recorded, program, costs = self._recorded_own(block), self.program(block), self.passes(block)
        if recorded is None:
            forward_us, backward_us = (
                self._waits_us(steps, backward=steps is program.backward) for steps in (program.forward, program.backward)
            )
            return RankWork(costs.forward_us - forward_us, costs.backward_us - backward_us)
        again_us = (
            recorded.forward_us if self._workload.strategy.recompute is Recompute.FULL and block.name.startswith("layer") else 0.0
        )
        return replace(recorded, backward_us=recorded.backward_us + again_us)

    @property
    def _waiting_ranks(self) -> int:
        """Ranks that wait for each other in every pass of a block."""
        return self.groups.placements["tp"].ranks * (self.groups.placements["shard"].ranks if self._sharded else 1)

    @property
    def _sharded(self) -> bool:
        return self._workload.strategy.zero_stage == 3

    @property
    def _cut(self) -> BlockCut:
        plan = self._workload.strategy
        return BlockCut(plan.tp, plan.sequence_parallel, plan.micro_batch, self._workload.sequence, self._sharded)

    def _recorded_own(self, block: Block) -> RankWork | None:
        """A rank's own work in a block as it was recorded; None: cost models say it."""
        workload = self._workload
        if workload.times is None or workload.strategy.cp > 1 or workload.strategy.ep * workload.strategy.etp > 1:
            return None
        recorded = workload.times.block(block.name, self._cut, lambda cut: self._modelled(block, cut))
        if recorded is None:
            return None
        factor = workload.scales.compute
        return RankWork(recorded.forward_us * factor, recorded.backward_us * factor, recorded.reduce_us * factor, recorded.spread)

    def _modelled(self, block: Block, cut: BlockCut) -> ModelledWork:
        """Modelled time of a rank's own work, with the copies of gathered parameters and exchanged gradients."""
        split = Strategy(
            tp=cut.tp, sequence_parallel=cut.sequence_parallel, micro_batch=cut.micro_batch, global_batch=cut.micro_batch
        )
        layout = layout_of(split, regather_inputs=self._workload.runtime.regather_inputs)
        program = compile_block(block, layout, cut.micro_batch, cut.sequence)
        passes = [
            sum(self._step_us(step, backward=backward) for step in steps if isinstance(step, LocalOp))
            for backward, steps in ((False, program.forward), (True, program.backward))
        ]
        held = sum(weight.elements for weight in program.weights if not weight.sparse) * self._workload.element_bytes
        copied_us = self.moved_us(2 * held) if cut.sharded else 0.0
        reduce_us, forward_us, backward_us = self.moved_us(2 * held), passes[0] + copied_us, passes[1] + copied_us
        if self._workload.cluster.groups[0].host.device.kind == "gpu":
            added_us = self._split_us(program, cut, side_by_side=True)
            return ModelledWork(
                PassWork(forward_us, self._host_us(program.forward, backward=False) + added_us[0]),
                PassWork(backward_us + self._accumulated_us(program), self._host_us(program.backward, backward=True) + added_us[1]),
                reduce_us,
            )
        added_us = self._split_us(program, cut, side_by_side=False)
        return ModelledWork(PassWork(forward_us + added_us[0]), PassWork(backward_us + added_us[1]), reduce_us)

    def _split_us(self, program: BlockProgram, cut: BlockCut, *, side_by_side: bool) -> tuple[float, float]:
        """Work that the framework adds to both passes where tensor-parallel ranks share weights.

        `side_by_side`: to each of the weights of an op, as queries, keys and values are layers of their own in a script.
        """
        if cut.tp == 1 or self._workload.times is None:
            return 0.0, 0.0
        times, named = self._workload.times.times, {weight.op for weight in program.weights}
        ops = [step.op for step in program.forward if isinstance(step, LocalOp)]
        shared = sum(max(len(op.columns), 1) if side_by_side else 1 for op in ops if op.type in _SPLIT and op.name in named)
        return shared * times.split_forward_us, shared * times.split_backward_us

    def _waits_us(self, steps: tuple[LocalOp | BlockCollective, ...], *, backward: bool) -> float:
        """Time of the collectives of a pass that no computation overlaps."""
        return sum(self._step_us(step, backward=backward) for step in steps if isinstance(step, BlockCollective))

    def _overlapped_us(self, pass_us: float, steps: tuple[LocalOp | BlockCollective, ...], *, backward: bool) -> float:
        """Time of a pass whose tokens go to experts and back beside the computation of another micro-batch."""
        tokens = [step for step in steps if isinstance(step, BlockCollective) and step.axis == EXPERTS]
        exchanged_us = sum(self._step_us(step, backward=backward) for step in tokens)
        return self._beside(pass_us - exchanged_us, exchanged_us)

    def _weights_us(self, program: BlockProgram) -> float:
        """Time of the gradients of weights in a backward pass."""
        ops = [
            step
            for step in program.backward
            if isinstance(step, LocalOp) and step.op.type in (OpType.MATMUL, OpType.CONVOLUTION) and not step.op.fixed
        ]
        return self._matmul * sum(self._ops.weight_gradient_us(step.op, step.sizes) for step in ops)

    def _backward_us(self, steps: tuple[LocalOp | BlockCollective, ...]) -> float:
        """Time of a backward pass. Tensor-parallel collectives overlap with independent matmuls, if the runtime does that.

        A matmul's input that is gathered again is needed by the gradient of the weight only, and the gradient of the input can be
        exchanged while that of the weight is computed (Megatron-LM's linear layers with asynchronous communication).
        """
        if not self._workload.runtime.overlap_tensor:
            return sum(self._step_us(step, backward=True) for step in steps)
        total_us = gathered_us = weight_us = 0.0
        for step in steps:
            if isinstance(step, BlockCollective):
                us = self._step_us(step, backward=True)
                if step.axis != "tp":
                    total_us += us
                elif not step.gradient:
                    gathered_us += us
                else:
                    total_us += self._beside(weight_us, us)
                    weight_us = 0.0
                continue
            total_us += weight_us
            weight_us = 0.0
            if step.op.type is OpType.MATMUL and not step.op.fixed:
                factor = self._matmul
                total_us += self._beside(factor * self._ops.input_gradient_us(step.op, step.sizes), gathered_us)
                weight_us = factor * self._ops.weight_gradient_us(step.op, step.sizes)
            else:
                total_us += gathered_us + self._step_us(step, backward=True)
            gathered_us = 0.0
        return total_us + weight_us + gathered_us

    def _beside(self, compute_us: float, collective_us: float) -> float:
        """Time of a collective and of independent compute that run at the same time."""
        return max(collective_us, compute_us + self.slowed * collective_us)

    def _accumulated_us(self, program: BlockProgram) -> float:
        """Time to add a micro-batch's gradients to the gradients of earlier micro-batches."""
        held = sum(weight.elements for weight in program.weights if weight.trained)
        return self.moved_us(held * self._workload.accumulate_bytes) if held else 0.0

    def moved_us(self, count_bytes: float) -> float:
        """Time to read and write so many bytes of the device's memory."""
        return self._workload.scales.memory * self._ops.moved_us(count_bytes)

    def copied_us(self, count_bytes: float) -> float:
        """Time to copy bytes between the device's memory and the host's.

        Raises
        ------
        InputError
            The cluster does not say how fast the link between them is.
        """
        rate = self._workload.cluster.groups[0].host.copy_bytes_per_s
        if rate is None:
            raise InputError(NO_HOST_LINK)
        return count_bytes / (rate * COPY_SHARE) * 1e6

    def _host_us(self, steps: tuple[LocalOp | BlockCollective, ...], *, backward: bool) -> float:
        """Time of the host to start a pass."""
        host, scales = self._workload.host, self._workload.scales
        total_us = scales.host * (host.layer_us + sum(self._started_us(step, backward=backward) for step in steps))
        exchanges = (step for step in steps if isinstance(step, BlockCollective) and step.type is not CollectiveKind.SEND)
        return total_us + sum(step.repeats * self._check_us(step.axis) for step in exchanges)

    def _started_us(self, step: LocalOp | BlockCollective, *, backward: bool) -> float:
        """Time of the host to start an op or a collective.

        Experts wait for the number of their tokens, so that no CUDA graph has them (Megatron-Core's --cuda-graph-scope).
        """
        tokens = step.axis == EXPERTS if isinstance(step, BlockCollective) else "capacity" in step.op.dims
        host = self._workload.runtime.host if tokens else self._workload.host
        if isinstance(step, BlockCollective):
            return host.collective_us
        return self._ops.launches(step.op, backward=backward) * (host.backward_us if backward else host.forward_us)

    def _check_us(self, axis: str) -> float:
        """Time of the host to check that all ranks call the same collective."""
        ranks = self.groups.placements[axis].ranks
        return self._workload.scales.checks * self._workload.runtime.host.check_rank_us * ranks if ranks > 1 else 0.0

    def _element_bytes(self, step: BlockCollective) -> float:
        """Bytes of an exchanged element; sums stay in 16 bits.

        Inputs of products in fewer bits, and gradients of their outputs, are quantized before tensor parallel ranks gather them
        (Transformer Engine's linear layers).
        """
        narrow = NARROW.get(self._workload.precision)
        if narrow is None or step.axis != "tp" or step.type is not CollectiveKind.ALL_GATHER:
            return self._workload.element_bytes
        return narrow.element_bytes

    def _step_us(self, step: LocalOp | BlockCollective, *, backward: bool) -> float:
        if isinstance(step, BlockCollective):
            copies = step.copies if self._workload.runtime.tokens_once_a_host else 0
            size_bytes = step.elements * self._element_bytes(step)
            return step.repeats * self.exchanged_us(step.type, size_bytes, step.axis, copies)
        compute = {OpType.MATMUL: self._matmul, OpType.CONVOLUTION: self._matmul, OpType.ATTENTION: self._attention}
        factor = compute.get(step.op.type, self._workload.scales.memory)
        if backward:
            op_us = factor * self._ops.backward_us(step.op, step.sizes)
        else:
            op_us = factor * self._ops.forward_us(step.op, step.sizes)
        op_us += self._unpacked_us(step)
        return self._ring_us(op_us, step.beside) if step.beside else op_us

    def _unpacked_us(self, step: LocalOp) -> float:
        """Time to make 16-bit weights of quantized ones, which each pass of a product does anew.

        Sources: torchao (dtypes/nf4tensor.py, `LinearNF4`), bitsandbytes (autograd/_functions.py, `MatMul4Bit`). Weights in 8 bits
        are multiplied as they are where products are in 8 bits.
        """
        workload, op = self._workload, step.op
        whole = not workload.frozen_bytes or workload.frozen_bytes == workload.product_bytes
        if whole or not op.fixed or op.type is not OpType.MATMUL or "vocab" in op.dims:
            return 0.0
        return self.moved_us(elements(op.weight, step.sizes) * (workload.frozen_bytes + workload.element_bytes))

    def _ring_us(self, op_us: float, beside: Sequence[BlockCollective]) -> float:
        """Time of an op in as many parts as a ring has ranks. The input of the next part is transferred during each part."""
        element_bytes = self._workload.element_bytes
        sends = [(self.exchanged_us(each.type, each.elements * element_bytes, each.axis), each.repeats) for each in beside]
        parts = self.groups.placements[beside[0].axis].ranks
        hops = (sum(send_us for send_us, repeats in sends if hop < repeats) for hop in range(parts))
        return sum(
            self._beside(op_us / parts, hop_us) if hop < parts - 1 else op_us / parts + hop_us for hop, hop_us in enumerate(hops)
        )

    def exchanged_us(self, kind: CollectiveKind, size_bytes: float, axis: str, copies: int = 0) -> float:
        """Time of a collective over the ranks of an axis of the strategy; a rank that waits for it waits for its check, too."""
        scales = self._workload.scales
        factor = scales.between if self.groups.placements[axis].nodes > 1 else scales.inside
        check_us = self._check_us(axis) if self._workload.runtime.blocking else 0.0
        return check_us + factor * self.groups.us(kind, size_bytes, axis, copies)

    def _exchanges(self, program: BlockProgram) -> tuple[float, float]:
        """All-gather of parameters and reduction of gradients of a block, over the ranks that hold the same."""
        gather_us = reduce_us = 0.0
        share = self._workload.frozen_bytes / self._workload.element_bytes or 1.0
        strategy = self._workload.strategy
        for collective in parameter_collectives(program, strategy, fixed_share=share):
            if collective.gradient:
                reduce_us += self.exchanged_us(
                    collective.type, collective.elements * self._workload.gradient_bytes, collective.axis
                )
            else:
                gather_us += self.exchanged_us(collective.type, collective.elements * self._workload.element_bytes, collective.axis)
        if strategy.offload_optimizer and self._workload.runtime.host_parameters and self._sharded:
            held, trained = self.shard_elements(program, share), self.shard_elements(program, 0.0)
            gather_us += self.copied_us(held * self._workload.element_bytes)
            reduce_us += self.copied_us(trained * self._workload.gradient_bytes)
        return gather_us, reduce_us

    def shard_elements(self, program: BlockProgram, fixed_share: float) -> float:
        """Parameters of which a rank has the optimizer's part; those that are not trained count a share."""
        strategy, total = self._workload.strategy, 0.0
        for weight in program.weights:
            ways = (strategy.expert_zero_ways if weight.expert else strategy.zero_ways) if strategy.zero_stage else 1
            total += weight.elements / ways * (1.0 if weight.trained else fixed_share if weight.fixed else 0.0)
        return total

    def _handed_over_us(self, block: Block) -> float:
        """Recorded time of a rank's own work when it exchanges a block's gradients; 0 if it was not recorded."""
        recorded = self._recorded_own(block)
        return 0.0 if recorded is None else recorded.reduce_us

    def stage(self, blocks: Sequence[Block]) -> tuple[LayerCosts, ...]:
        """Costs of the blocks of a stage. If gradients are summed in buckets, a bucket counts with the block that fills it."""
        names = tuple([block.name for block in blocks])
        if names not in self._stages:  # the stages between the first and the last one are mostly equal
            self._stages[names] = self._priced_stage(blocks)
        return self._stages[names]

    def _priced_stage(self, blocks: Sequence[Block]) -> tuple[LayerCosts, ...]:
        flags = recomputed(self._workload.strategy, blocks)
        layers = tuple(self.layer(block, again=again) for block, again in zip(blocks, flags, strict=True))
        strategy, runtime = self._workload.strategy, self._workload.runtime
        if strategy.zero_stage and not runtime.overlap_split_gradients:
            check_us = self._check_us("shard")
            last = replace(layers[-1], reduce_us=layers[-1].reduce_us + check_us, gather_us=layers[-1].gather_us + check_us)
            return (*layers[:-1], last)
        if strategy.zero_stage or not runtime.bucket_bytes:
            return layers
        backward = [
            [size * self._workload.gradient_bytes for size in backward_tensors(self.program(block))] for block in reversed(blocks)
        ]
        buckets = gradient_buckets(backward, runtime.bucket_bytes, runtime.first_bucket_bytes)
        check_us = self._check_us("replicas")
        sums = [sum(check_us + self.exchanged_us(CollectiveKind.ALL_REDUCE, size, "replicas") for size in full) for full in buckets]
        return tuple(replace(layer, reduce_us=sum_us) for layer, sum_us in zip(layers, reversed(sums), strict=True))
