"""`Model`: a transformer, another network or a captured model, and what all have."""

from __future__ import annotations

from dpro_search.parallel.model.adapters import adapted
from dpro_search.parallel.model.architecture import Architecture
from dpro_search.parallel.model.block import Block, blocks_of_transformer
from dpro_search.parallel.model.captured import CapturedModel
from dpro_search.parallel.model.network import Network

Model = Architecture | Network | CapturedModel


def blocks_of(model: Model) -> tuple[Block, ...]:
    """The blocks of a model: of a transformer embedding, layers (equal ones as one block) and head."""
    if isinstance(model, CapturedModel):
        return model.whole_blocks
    if isinstance(model, Network):
        return model.blocks
    blocks = blocks_of_transformer(model)
    return blocks if model.adapters is None else tuple(adapted(block, model.adapters) for block in blocks)


def parameters_of(model: Model) -> int:
    """Parameters of a model; those of a tied head count once."""
    return round(sum(block.count * block.parameters() for block in blocks_of(model)))
