"""`peak_memory`: what each rank of a strategy holds when it holds most, by category."""

from __future__ import annotations

from dataclasses import dataclass

from dpro_search.graph.model import Block, OpType
from dpro_search.space.mesh.compile import LocalOp
from dpro_search.space.mesh.costs import Known, Pricer, Workload, ranks_of, stages_of
from dpro_search.space.mesh.pipeline import pipeline_orders
from dpro_search.space.mesh.strategy import Recompute

SAVED_SCORES_BYTES = 5.0
"""For each score of an attention that is not fused: outputs of softmax and dropout (2 each), a mask (Korthikanti et al. 2022)."""


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Bytes on the rank that holds most. The sum is that of the categories, not what the driver shows."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float  # Of all micro-batches in flight.
    logits_bytes: float  # The logits, their copy for the loss, and the gradient.
    gathered_bytes: float  # Parameters and gradients of layers that are gathered for a while (ZeRO-3).

    @property
    def total_bytes(self) -> float:
        """All categories."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.logits_bytes
            + self.gathered_bytes
        )


def peak_memory(workload: Workload, known: Known | None = None) -> PeakMemory:
    """Of the pipeline rank that needs most."""
    strategy, pricer = workload.strategy, Pricer(workload, known)
    stages, on_ranks = stages_of(workload, known), ranks_of(workload, known)
    orders = pipeline_orders(strategy.schedule, strategy.pp, strategy.virtual_stages, strategy.micro_batches)
    found = []
    for rank, order in enumerate(orders):
        held = peak = 0.0
        for done in order:
            size = sum(_saved_bytes(workload, pricer, block) for block in stages[done.stage])
            held += {"F": size, "I": 0.0}.get(done.direction, -size)  # gradients of weights need all that the input's needs
            peak = max(peak, held)
        found.append(_of_rank(workload, pricer, on_ranks[rank], peak))
    return max(found, key=lambda memory: memory.total_bytes)


def _saved_bytes(workload: Workload, pricer: Pricer, block: Block) -> float:
    """What a block keeps of a micro-batch from its forward to its backward pass; logits count apart."""
    program, element = pricer.program(block), workload.element_bytes
    if block.name.startswith("layer") and workload.strategy.recompute is Recompute.FULL:
        return program.input_elements * element
    names = program.saved
    kept = sum(size for name, size in names.items() if name != "head") * element + program.saved_bytes
    if not workload.runtime.flash_attention and workload.strategy.recompute is Recompute.NONE:
        kept += _scores(workload, pricer, block) * SAVED_SCORES_BYTES
    return kept


def _scores(workload: Workload, pricer: Pricer, block: Block) -> float:
    """Elements of the attention's scores on a rank: batch x heads x sequence x sequence."""
    return sum(
        step.sizes["batch"] * step.sizes["heads"] * step.sizes["sequence"] * workload.sequence
        for step in pricer.program(block).forward
        if isinstance(step, LocalOp) and step.op.type is OpType.ATTENTION
    )


def _of_rank(workload: Workload, pricer: Pricer, blocks: tuple[Block, ...], activations_bytes: float) -> PeakMemory:
    strategy, runtime, element = workload.strategy, workload.runtime, workload.element_bytes
    weights = gradients = optimizer = largest = 0.0
    for block in blocks:
        mine = 0.0
        for weight in pricer.program(block).weights:
            ways = strategy.expert_zero_ways if weight.expert else strategy.zero_ways
            weights += weight.elements * element / (ways if strategy.zero_stage == 3 else 1)
            mine += weight.elements
            if workload.frozen:
                continue
            gradients += weight.elements * runtime.gradient_bytes / (ways if strategy.zero_stage >= 2 else 1)
            optimizer += weight.elements * runtime.optimizer_bytes / (ways if strategy.zero_stage >= 1 else 1)
        largest = max(largest, mine)
    if any(block.name.startswith("layer") for block in blocks) and strategy.recompute is Recompute.FULL:
        whole = [_recomputed_bytes(workload, pricer, block) for block in blocks if block.name.startswith("layer")]
        activations_bytes += max(whole)
    logits = sum(pricer.program(block).saved.get("head", 0.0) for block in blocks)
    gathered = largest * (2 * element + runtime.gradient_bytes) if strategy.zero_stage == 3 else 0.0
    return PeakMemory(
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=activations_bytes,
        logits_bytes=logits * (2 * element + runtime.loss_bytes),
        gathered_bytes=gathered,
    )


def _recomputed_bytes(workload: Workload, pricer: Pricer, block: Block) -> float:
    """What one layer holds while its backward pass runs on activations that were computed again."""
    program = pricer.program(block)
    kept = sum(program.saved.values()) * workload.element_bytes + program.saved_bytes
    if not workload.runtime.flash_attention:
        kept += _scores(workload, pricer, block) * SAVED_SCORES_BYTES
    return kept
