"""Frameworks that a description can name: how each runs a step (`Runtime`), and its usual ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dpro_search.space.mesh import Runtime

EAGER_US = 800.0  # Of the host, to start a layer's forward pass in a framework without fused kernels or CUDA graphs (estimated).


class Framework(NamedTuple):
    """A framework for training on many devices."""

    runtime: Runtime
    zero_stage: int  # Where a job sets none.
    zero_stages: tuple[int, ...] = (0, 1)  # That a search may set.


FRAMEWORKS: Mapping[str, Framework] = {
    "megatron-core": Framework(Runtime(), 1),
    "fsdp": Framework(Runtime(name="PyTorch FSDP", layer_host_us=EAGER_US, gradient_bytes=2.0), 3, (3,)),
    "megatron-deepspeed": Framework(
        Runtime(
            name="Megatron-DeepSpeed", layer_host_us=EAGER_US, overlap_gradients=False, flash_attention=False, overlap_sends=False
        ),
        1,
    ),
    "nanotron": Framework(Runtime(name="nanotron", layer_host_us=EAGER_US, overlap_sends=False), 1),
    "pytorch": Framework(Runtime(name="PyTorch, eager", layer_host_us=EAGER_US, flash_attention=False), 0),
}
