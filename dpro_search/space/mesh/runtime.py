"""`Runtime`: what a training framework does beside a strategy, as far as it decides time and memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from dpro_search.space.mesh.memory_rules import MemoryRules


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Properties of a framework and of how it is used. Defaults: Megatron-Core's, with its distributed optimizer."""

    name: str = "megatron-core"
    flash_attention: bool = True  # Scores are never stored.
    overlap_gradients: bool = True
    overlap_sends: bool = True
    gradient_bytes: float = 4.0  # Of an element of a gradient while it is summed over micro-batches and ranks.
    optimizer_bytes: float = 12.0  # Of optimizer state for each parameter: Adam's moments and the parameter in fp32.
    # Least time of the host for a layer's forward pass; twice that for its backward pass. A bare layer of PyTorch takes 220 us to
    # dispatch (measured, torch 2.13, tensors of a few elements), its kernels 5 us each to launch, and frameworks wrap both.
    layer_host_us: float = 400.0
    loss_bytes: float = 4.0  # Of an element of the logits in the loss.
    # A pipeline stage ends where its share of the matmuls of all layers and of the head is reached; False: as many layers each.
    stages_by_cost: bool = False
    memory: MemoryRules = field(default_factory=MemoryRules)
