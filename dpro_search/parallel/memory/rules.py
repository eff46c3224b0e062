"""`MemoryRules`: what a framework keeps on a device beside what the model and the strategy decide."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dpro_search.cluster import Device

MIB = 2**20
DROPOUT_SCORE_BYTES = 3.0
"""Bytes per score of an attention with dropout: a mask and its product (Korthikanti et al. 2022, section 4)."""


@dataclass(frozen=True, kw_only=True)
class MemoryRules:
    """How a framework lays out a rank's memory. Defaults: Megatron-Core 0.12 with Transformer Engine.

    Bytes "of a parameter" are for each parameter that the rank holds, bytes of a tensor for each of its elements.
    """

    # Bytes of a layer's parameter that is trained; None: as those of other blocks.
    layer_weight_bytes: float | None = None
    # Whether gradients are dropped after each update, so that in a step of one micro-batch none is there when activations are most.
    drops_gradients: bool = False
    # Gradients in the model's precision that live from their op's backward pass to the end of the pass, where they are added to the
    # buffer that the optimizer reads; 0: matmuls write to that buffer, or its hook frees each gradient at once.
    pass_gradient_bytes: float = 0.0
    # Gradients in the model's precision that stay beside those that are summed.
    kept_gradient_bytes: float = 0.0
    # Buckets of torch.nn.parallel.DistributedDataParallel beside the gradients (`gradient_as_bucket_view` off), without ZeRO.
    bucket_bytes: float = 0.0
    # Elements of flat buffers to reduce gradients and to gather parameters, at most as many as a rank has (DeepSpeed's
    # reduce_bucket_size and allgather_bucket_size, 500 million each); 0: none.
    flat_elements: float = 0.0
    # Of a parameter of a rank's part, in the step of an optimizer that ZeRO splits: gradients side by side, and in fp32. No cached
    # block is as large as these.
    part_bytes: float = 0.0
    # Temporaries of a parameter while an optimizer that ZeRO splits gathers the parameters.
    step_bytes: float = 0.0

    # Elements kept beside the tensors that the backward pass needs: copies of queries, keys and values around the rotation (a view
    # of one part keeps the projection's whole output), the activated half of a gated activation.
    rotation_copies: tuple[float, float, float] = (1.0, 1.0, 0.0)
    gate_copies: float = 0.0
    # Tokens' weights multiply the activations of experts, so that what experts give is not kept (Megatron-Core since 0.12:
    # experts.py). Only gated activations have a kernel that computes both in one (fusions/fused_bias_swiglu.py).
    weighted_activations: bool = True
    # Of an element of the input of a norm without bias, which frameworks compose of other ops: copies in fp32, what is normalised
    # but not yet scaled. Those with bias are one op of PyTorch.
    norm_bytes: float = 0.0
    # Whether heads of queries that share keys and values have copies of them for attention.
    copies_shared_heads: bool = False
    # Bytes of an element of an adapter's input behind dropout, for its mask; 0: adapters have no dropout.
    adapter_mask_bytes: float = 0.0
    # Of an element of the input of a matmul whose weight is quantized below adapters, which it keeps; 0: it keeps none.
    quantized_input_bytes: float = 0.0
    score_bytes: float = 2.0  # Of an element of the scores, where they are stored: the softmax.
    # Whether fused attention leaves a copy of its output: flash-attention's has the batch first, and the projection behind it reads
    # one with the sequence first. None: as Transformer Engine chooses, which has cuDNN's from Hopper on
    # (dot_product_attention/utils.py); without it, no.
    flash_copy: bool | None = None
    # Whether a pipeline stage keeps what it sent on until the backward pass of the micro-batch.
    keeps_outputs: bool = False
    # Micro-batches whose gradients of the logits wait for the head's weight to get its gradients from them (Megatron-LM's
    # --defer-embedding-wgrad-compute with its --wgrad-deferral-limit); 0: none waits.
    deferred_logits: int = 0
    logits_bytes: float = 6.0  # Of an element of the logits, when most of them are held: in 16 bits, in fp32, gradients.
    split_logits_bytes: float | None = None  # Where tensor parallel ranks share the vocabulary; None: as many.

    # Whether the head's product and the loss are of some tokens at a time, so that logits are never whole (`tiled_logits_bytes`).
    tiled_loss: bool = False

    # cuBLAS's workspace, once for each thread that calls it: the forward pass's and autograd's. None: what PyTorch gives a device;
    # CUBLAS_WORKSPACE_CONFIG=:4096:8 makes it 32 MiB on all.
    matmul_workspace_bytes: float | None = None
    matmul_threads: int = 2
    transformer_engine: bool = True  # It has a workspace of its own.
    # It multiplies the experts of a rank on so many streams, each with a workspace (module/base.py,
    # `get_multi_stream_cublas_workspace`).
    grouped_workspaces: int = 4
    # Its matmuls, which add gradients of weights to those before, give autograd a tensor of the weight's shape in their place, one
    # for each shape (module/base.py, `get_dummy_wgrad`).
    dummy_gradients: bool = True
    # One buffer of the scores in 16 bits that all layers write theirs to, before the softmax (Megatron-Core's own attention:
    # dot_product_attention.py, `get_global_memory_buffer`).
    shared_scores: bool = False

    # Buffers that all layers gather inputs of tensor parallel products, and gradients of their outputs, to.
    gather_buffers: int = 0

    # Collectives hold their buffers until the device has run them (`record_stream`): the host is ahead by as many launches as CUDA
    # queues (1,024), which are so many layers.
    layers_ahead: float = 0.0

    def copies_output(self, device: Device) -> bool:
        """Whether fused attention leaves a copy of its output on a device."""
        if self.flash_copy is not None:
            return self.flash_copy
        return self.transformer_engine and _HOPPER_ON.search(device.name.upper()) is None

    def workspace_bytes(self, device: Device, *, experts: bool = False) -> float:
        """Workspace of matmul libraries: 32 MiB from Hopper on, before that 8.125 MiB (PyTorch) and 4 MiB (Transformer Engine).

        Sources: aten/src/ATen/cuda/CublasHandlePool.cpp, transformer_engine/pytorch/module/base.py.
        """
        recent = _HOPPER_ON.search(device.name.upper()) is not None
        thread_bytes = self.matmul_workspace_bytes
        if thread_bytes is None:
            thread_bytes = 32.0 * MIB if recent else 8.125 * MIB
        engines = (1 + self.grouped_workspaces * experts) * self.transformer_engine
        return self.matmul_threads * thread_bytes + (32.0 * MIB if recent else 4.0 * MIB) * engines


_HOPPER_ON = re.compile(r"\bG?[HB][1-9]00\b")
