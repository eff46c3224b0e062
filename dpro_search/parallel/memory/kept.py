"""`Kept`: what the forward pass of a block leaves on a rank for its backward pass, and what the passes hold beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dpro_search.collect.trace import CollectiveKind
from dpro_search.parallel.costs.compile import BlockCollective, BlockProgram, LocalOp, kept_of_matmuls
from dpro_search.parallel.memory.rules import DROPOUT_SCORE_BYTES, MemoryRules
from dpro_search.parallel.model import Op, OpType, elements
from dpro_search.parallel.model.op import RANK, OpRole
from dpro_search.parallel.runtime import Selective
from dpro_search.parallel.strategy import Recompute

STATISTIC_BYTES = 4.0
"""Bytes per row of a norm or per query of fused attention: its scale, or the logarithm of its sum, in fp32."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes of one micro-batch on a rank.

    `activations_bytes` counts each tensor once that some op's backward pass needs (`Op.saves`), masks, and the copies that a
    framework's ops keep beside them. Logits count apart: they live from the loss to its backward pass only.
    """

    activations_bytes: float
    scores_bytes: float  # Of attention that is not fused.
    shared_bytes: float  # Of a buffer that all layers write their scores to.
    input_bytes: float
    selective_bytes: float  # Kept under selective recomputation, the input included.
    logits_bytes: float  # Of the logits, when most of them are held.
    transient_bytes: float  # Gradients of the largest op's inputs and output.
    forward_sent_bytes: float  # Buffers that collectives of the forward pass reduce.
    backward_sent_bytes: float
    gathered_bytes: float  # The largest tensor that tensor parallel ranks gather.
    largest_bytes: float  # The largest tensor.
    weight_shapes: frozenset[tuple[float, float]]  # Of the weights of matmuls.

    def held_bytes(self, recompute: Recompute) -> float:
        """Memory of a micro-batch from the block's forward to its backward pass. Logits count apart."""
        if recompute is Recompute.NONE:
            return self.activations_bytes + self.scores_bytes
        return self.selective_bytes if recompute is Recompute.SELECTIVE else self.input_bytes


def kept_of(
    program: BlockProgram,
    rules: MemoryRules,
    element_bytes: float,
    *,
    selective: Selective = Selective.SCORES,
    stores_scores: bool,
    dropout: bool,
    copies_output: bool = False,
    quantized: bool = False,
    matmul_input_bytes: float | None = None,
    ring: bool = False,
) -> Kept:
    """Memory that one micro-batch leaves in a block.

    Parameters
    ----------
    selective
        What selective recomputation is about.
    stores_scores, dropout
        Whether attention is not fused; whether its scores have dropout.
    copies_output
        Whether fused attention keeps its output twice.
    quantized
        Whether the weights below adapters are quantized.
    matmul_input_bytes
        Of an element that a matmul keeps of its input, where it keeps its own in fewer bits; None: it keeps what it was given.
    ring
        Whether attention's keys and values go round a ring of ranks, for which it copies them: the projection's output is not kept.
    """
    local = [step for step in program.forward if isinstance(step, LocalOp)]
    outputs = {name for step in local if step.op.type is OpType.LOSS for name in step.op.saves}
    needed, narrow = set[str](), dict[str, float]()
    for op in (step.op for step in local):
        if rules.adapter_mask_bytes and _is_adapter(op):
            narrow[op.saves[0]] = element_bytes + rules.adapter_mask_bytes
        elif matmul_input_bytes is not None and _is_quantized(op):
            narrow |= dict.fromkeys(op.saves, matmul_input_bytes)
        else:
            needed.update(_needs(op, rules))
    saved = sum(size for name, size in program.saved.items() if name in needed - outputs) * element_bytes
    saved += sum(size * narrow.get(name, 0.0) for name, size in program.saved.items())
    if quantized:
        fixed = {step.op.inputs[0]: step for step in local if step.op.fixed and step.op.type is OpType.MATMUL}
        saved += sum(elements(step.op.reads, step.sizes) for step in fixed.values()) * rules.quantized_input_bytes
    copies = sum(_copies_bytes(step, rules, element_bytes) for step in local if not (ring and step.op.role is OpRole.ROTATION))
    if copies_output and not stores_scores:
        copies += sum(elements(step.op.output, step.sizes) for step in local if step.op.type is OpType.ATTENTION) * element_bytes
    scores = [_scores(step) for step in local]
    each = rules.score_bytes + (DROPOUT_SCORE_BYTES if dropout else 0.0)
    logits = sum(size for name, size in program.saved.items() if name in outputs) * (not rules.tiled_loss)
    tiled = sum(_tiled_logits(step) for step in local if step.op.name in outputs) * rules.tiled_loss
    shared = any(isinstance(step, BlockCollective) and step.axis == "tp" for step in program.forward)
    logit_bytes = rules.logits_bytes if rules.split_logits_bytes is None or not shared else rules.split_logits_bytes
    sizes = [elements(step.op.output, step.sizes) * element_bytes for step in local if step.op.name not in outputs]
    activations = saved + program.saved_bytes + copies
    left = activations
    if selective is Selective.EVERY_SECOND_MATMUL:
        left = (program.input_elements + _left_elements(program, stores_scores=stores_scores)) * element_bytes
    return Kept(
        activations_bytes=activations,
        selective_bytes=left,
        scores_bytes=sum(scores) * each if stores_scores else 0.0,
        shared_bytes=max(scores, default=0.0) * element_bytes if rules.shared_scores else 0.0,
        input_bytes=program.input_elements * element_bytes,
        logits_bytes=logits * logit_bytes + tiled * element_bytes,
        transient_bytes=max((_moved(step.op, step) for step in local if step.op.type is not OpType.LOSS), default=0.0)
        * element_bytes,
        forward_sent_bytes=sum(_reduced(program.forward)) * element_bytes,
        backward_sent_bytes=sum(_reduced(program.backward)) * element_bytes,
        gathered_bytes=max(_gathered(program.forward), default=0.0) * element_bytes,
        largest_bytes=max((*sizes, logits * max(logit_bytes - element_bytes, 0.0))),
        weight_shapes=frozenset(
            (elements(step.op.reduction, step.sizes), elements(step.op.columns, step.sizes))
            for step in local
            if step.op.type is OpType.MATMUL and not step.op.fixed
        ),
    )


def _tiled_logits(head: LocalOp) -> float:
    """Elements of a loss that is computed with the head's product for some tokens at a time: of as many logits as inputs.

    The gradient of the logits takes their place; those of the input and of the weight are whole (Liger-Kernel,
    ops/fused_linear_cross_entropy.py; torchtune's LinearCrossEntropyLoss and ALST's TiledFusedLogitsLoss, by as many tokens as they
    are told, are alike).
    """
    op, sizes = head.op, head.sizes
    tokens, inputs, columns = (elements(shape, sizes) for shape in (op.rows, op.reduction, op.columns))
    chunk = min(2.0 ** math.ceil(math.log2(max(tokens / math.ceil(columns / inputs), 1.0))), tokens)
    return chunk * columns + tokens * inputs + (0.0 if op.fixed else inputs * columns)


def _left_elements(program: BlockProgram, *, stores_scores: bool) -> float:
    """Elements that are kept where every second matmul is computed again, beside the block's input."""
    shares, total = kept_of_matmuls(program), 0.0
    for step in program.forward:
        if isinstance(step, BlockCollective):
            total += program.input_elements if step.type is CollectiveKind.REDUCE_SCATTER else 0.0
        elif step.op.type is OpType.MATMUL:
            total += sum(shares[step.op.name]) * elements(step.op.output, step.sizes)
        elif step.op.type is OpType.ATTENTION and not stores_scores:
            total += elements(step.op.output, step.sizes)
    return total


def _needs(op: Op, rules: MemoryRules) -> tuple[str, ...]:
    """Tensors that the backward pass of an op needs."""
    return op.inputs[1:] if op.type is OpType.COMBINE and rules.weighted_activations else op.saves


def _is_adapter(op: Op) -> bool:
    """Whether a matmul is an adapter's first one, or one whose adapters are not known."""
    return op.type is OpType.MATMUL and (op.columns == ((RANK,),) or (op.fixed and bool(op.saves)))


def _is_quantized(op: Op) -> bool:
    """Whether a matmul quantizes its inputs; routers and products of two activations do not."""
    return op.type is OpType.MATMUL and bool(op.weight) and "choices" not in op.dims


def _copies_bytes(step: LocalOp, rules: MemoryRules, element_bytes: float) -> float:
    """Memory that an op keeps in addition to the tensors that its backward pass needs."""
    op, sizes = step.op, step.sizes
    if op.role is OpRole.NORM and "hidden" in op.dims:
        rows = elements(op.output, sizes) / max(sizes.get("hidden", 1.0), 1.0)
        return elements(op.output, sizes) * rules.norm_bytes * (len(op.weight) < 2) + rows * STATISTIC_BYTES
    if op.role is OpRole.ROTATION and rules.copies_shared_heads and sizes["kv_heads"] < sizes["heads"]:
        return (3 * elements(op.output[:1], sizes) - elements(op.output, sizes)) * element_bytes
    if op.role is OpRole.ROTATION:
        parts = (elements((term,), sizes) for term in op.output)
        return sum(part * copies for part, copies in zip(parts, rules.rotation_copies, strict=True)) * element_bytes
    if op.role is OpRole.GATED_ACTIVATION:
        return elements(op.output, sizes) * rules.gate_copies * element_bytes
    if op.role is OpRole.ACTIVATION and "experts" in op.dims and rules.weighted_activations:
        return elements(op.output, sizes) * element_bytes  # What is activated, and what it is times the weights.
    if op.type is OpType.ATTENTION:
        return sizes["batch"] * sizes["sequence"] * sizes["heads"] * STATISTIC_BYTES + _of_source(step) * element_bytes
    return 0.0


def _of_source(step: LocalOp) -> float:
    """Elements of the keys and values of an encoder's tokens that are more than the decoder's (its op has as many as queries)."""
    sizes = step.sizes
    if not step.op.name.startswith("cross_"):
        return 0.0
    more = max(sizes["source"] - sizes["sequence"], 0.0)
    return sizes["batch"] * more * sizes["kv_heads"] * (sizes["head_dim"] + sizes["value_dim"])


def _scores(step: LocalOp) -> float:
    """Elements of an attention's scores: batch x heads x queries x keys."""
    if step.op.type is not OpType.ATTENTION:
        return 0.0
    sizes = step.sizes
    keys = sizes["source" if step.op.name.startswith("cross_") else "keys"]
    return sizes["batch"] * sizes["heads"] * sizes["sequence"] * keys


def _moved(op: Op, step: LocalOp) -> float:
    """Elements of the gradients of an op's output and inputs."""
    return elements(op.output, step.sizes) + elements(op.reads or op.output, step.sizes)


def _reduced(steps: tuple[LocalOp | BlockCollective, ...]) -> Iterator[float]:
    for step in steps:
        if isinstance(step, BlockCollective) and step.type in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE):
            yield step.elements


def _gathered(steps: tuple[LocalOp | BlockCollective, ...]) -> Iterator[float]:
    for step in steps:
        if isinstance(step, BlockCollective) and step.type is CollectiveKind.ALL_GATHER and step.axis == "tp":
            yield step.elements
