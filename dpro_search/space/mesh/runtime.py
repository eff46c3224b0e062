"""`Runtime`: what a training framework does beside a strategy, as far as it decides time and memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Properties of a framework and of how it is used. Defaults: Megatron-Core's, with its distributed optimizer."""

    name: str = "megatron-core"
    flash_attention: bool = True  # Scores are never stored.
    overlap_gradients: bool = True
    overlap_sends: bool = True
    # Gradients that ZeRO does not split are summed in buckets of so many bytes (PyTorch's DistributedDataParallel: 25 MiB, the
    # first one 1 MiB); 0: one for each layer.
    bucket_bytes: float = 0.0
    first_bucket_bytes: float = 2.0**20
    clip_gradients: bool = True  # By their norm over all ranks, which every rank waits for before it updates.
    gradient_bytes: float = 4.0  # Of an element of a gradient while it is summed over micro-batches and ranks.
    optimizer_bytes: float = 12.0  # Of optimizer state for each parameter: Adam's moments and the parameter in fp32.
    # Least time of the host for a layer's forward pass; twice that for its backward pass. A bare layer of PyTorch takes 220 us to
    # dispatch (measured, torch 2.13, tensors of a few elements), its kernels 5 us each to launch, and frameworks wrap both.
    layer_host_us: float = 400.0
    loss_bytes: float = 4.0  # Of an element of the logits in the loss.
