"""`stage_layers_by_cost`: pipeline stages that have as much of a model's work, rather than as many layers."""

from __future__ import annotations

from dpro_search.graph.model import Block, Model, blocks_of, elements


def stage_layers_by_cost(model: Model, stages: int) -> tuple[int, ...]:
    """Layers of each stage, where a stage ends with the layer that reaches its share of all multiply-adds with weights.

    The head counts, so that the last stage has fewer layers, or none (nanotron's `build_model`).
    """
    _, *layers, head = blocks_of(model)
    costs = [_multiply_adds(block) for block in layers for _ in range(block.count)]
    total = sum(costs) + _multiply_adds(head)
    found, spent, stage = [0] * stages, 0.0, 0
    for cost in costs:
        spent += cost
        found[stage] += 1
        if spent >= total * (stage + 1) / stages and stage < stages - 1:
            stage += 1
    return tuple(found)


def _multiply_adds(block: Block) -> float:
    """Of a token, with weights."""
    return sum(elements(op.reduction, block.sizes) * elements(op.columns, block.sizes) for op in block.ops if op.rows)
