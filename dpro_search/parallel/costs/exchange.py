"""Exchanges in a step between ranks that hold the same parameters: parameters, gradients, and the rest at its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dpro_search.collect.trace import CollectiveKind
from dpro_search.parallel.costs.compile import BlockCollective, BlockProgram
from dpro_search.parallel.strategy import Strategy

PARAMETERS = "parameters"  # what the collectives here are about, in place of the name of an op


def parameter_collectives(program: BlockProgram, strategy: Strategy, *, fixed_share: float = 1.0) -> Iterator[BlockCollective]:
    """Collectives of a block's parameters: the all-gather of what ZeRO splits, and the sum of its gradients.

    Ranks with copies of what is split (HSDP) sum the parts that they are left with. Parameters that are not trained have no
    gradients, and are gathered only where ZeRO splits parameters. Sizes are those of whole tensors on a tensor parallel rank.

    Parameters
    ----------
    fixed_share
        Bytes of a parameter that is not trained, over those of others.
    """
    for expert in (False, True):
        weights = [weight for weight in program.weights if weight.expert == expert]
        elements = sum(weight.elements for weight in weights if weight.trained)
        gathered = elements + fixed_share * sum(weight.elements for weight in weights if weight.fixed)
        if strategy.zero_stage < 3:
            gathered = elements
        prefix = "expert " if expert else ""
        if gathered and strategy.zero_stage:
            yield BlockCollective(CollectiveKind.ALL_GATHER, f"{prefix}shard", gathered, PARAMETERS, False)
        if not elements:
            continue
        if not strategy.zero_stage:
            yield BlockCollective(CollectiveKind.ALL_REDUCE, f"{prefix}replicas", elements, PARAMETERS, True)
            continue
        yield BlockCollective(CollectiveKind.REDUCE_SCATTER, f"{prefix}shard", elements, PARAMETERS, True)
        if strategy.dp_replicate > 1:
            ways = strategy.expert_zero_ways if expert else strategy.zero_ways
            yield BlockCollective(CollectiveKind.ALL_REDUCE, f"{prefix}shard replicas", elements / ways, PARAMETERS, True)


def shared_elements(program: BlockProgram) -> float:
    """Elements of gradients of which tensor parallel ranks have parts, for they split sequences: norms of sequence parallel."""
    return sum(weight.elements for weight in program.weights if weight.trained and "tp" in weight.shared)


def gradient_buckets(tensors: Sequence[Sequence[float]], cap_bytes: float, first_bytes: float) -> list[list[float]]:
    """Sizes of the buckets that are full, or are the last one, after each layer.

    A bucket takes gradients in the order in which they are ready until it has its size at least (PyTorch's
    DistributedDataParallel; `compute_bucket_assignment_by_size`).

    Parameters
    ----------
    tensors
        Bytes of the gradients of each layer, in the order of the backward pass.
    cap_bytes, first_bytes
        Of all buckets, and of the first one.
    """
    buckets: list[list[float]] = [[] for _ in tensors]
    size, limit = 0.0, first_bytes
    for full, layer in zip(buckets, tensors, strict=True):
        for tensor_bytes in layer:
            size += tensor_bytes
            if size >= limit:
                full.append(size)
                size, limit = 0.0, cap_bytes
    if size:
        buckets[-1].append(size)
    return buckets


def backward_tensors(program: BlockProgram) -> tuple[float, ...]:
    """Elements of a block's gradients in the order in which its backward pass makes them."""
    return tuple(size for weight in reversed(program.weights) if weight.trained for size in reversed(weight.tensors))
