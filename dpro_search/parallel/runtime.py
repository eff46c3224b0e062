"""`Runtime`: what a training framework does beside a strategy, as far as it decides time and memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from dpro_search.parallel.gpu_ops import Kernels
from dpro_search.parallel.memory.rules import MemoryRules

CHECKED_RANK_US = 240.0
"""`HostTimes.check_rank_us` of PyTorch with ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` (ProcessGroupWrapper.cpp).

Four messages of Gloo over TCP for each rank, one after the other: in a monitored barrier rank 0 hears from each rank in turn and
answers it, then two all-gathers, of what describes the call and of its size, go once round a ring. 60 us a message (estimated).
"""


class Selective(StrEnum):
    """Which activations `Recompute.SELECTIVE` means in a framework."""

    SCORES = "scores"  # Megatron-LM's: the scores of attention are computed again; nothing is where attention is fused.
    # torchtitan's "op" (activation_checkpoint.py, 2024): each layer keeps its input, the outputs of every second matmul from the
    # first one on, of fused attention and of reduce-scatters; all others are computed again.
    EVERY_SECOND_MATMUL = "every second matmul"


@dataclass(frozen=True, kw_only=True)
class HostTimes:
    """Time of the host to start work on the device. The device waits for the host if its own work is shorter.

    Defaults: Megatron-LM's layers in Python. On tensors too small to matter (OPT-350M, tensor parallel 8, micro-batch 1) the 14
    kernels of a layer's forward pass take 1.1 to 1.4 ms on hosts of V100, RTX 3090 and A100, with modules, random states and checks
    around them; the 22 of the backward pass take about 1 ms (op profiles of Sailor, ETH Zurich 2025, less 50 us for each start of
    autograd).
    """

    forward_us: float = 85.0  # Each kernel of a forward pass.
    backward_us: float = 45.0  # Each kernel of a backward pass.
    collective_us: float = 60.0  # Each collective: the process group's Python and C++, and NCCL's enqueue (estimated).
    layer_us: float = 0.0  # Of a layer and pass, whatever it launches: hooks.
    parameter_us: float = 20.0  # Each parameter tensor in an update, where many share a kernel (estimated).
    # Of each collective but messages, for each of its ranks: a check that all call the same one, before it is called.
    check_rank_us: float = 0.0


GRAPH_TIMES = HostTimes(forward_us=2.0, backward_us=2.0, collective_us=5.0, parameter_us=2.0)
"""Times of layers that are captured as CUDA graphs, as in submissions to MLPerf training: a kernel starts in 1 to 2 us."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Properties of a framework and of how it is used. Defaults: Megatron-Core's, with its distributed optimizer."""

    name: str = "megatron-core"
    kernels: Kernels = field(default_factory=Kernels)
    selective: Selective = Selective.SCORES
    host: HostTimes = field(default_factory=HostTimes)
    overlap_gradients: bool = True  # Gradients are reduced beside the last backward pass.
    # Those that ZeRO-1 or 2 splits, too; False: in one collective after it.
    overlap_split_gradients: bool = True
    overlap_gathers: bool = True  # Parameters that ZeRO splits are gathered beside the first forward pass.
    overlap_sends: bool = True
    # A rank computes nothing while it exchanges parameters or gradients; where a stage takes one pass after the other as it comes
    # (gpipe, 1f1b), nor while it receives, and a message begins when both sides have come to it (Gloo).
    blocking: bool = False
    # Gradients that ZeRO does not split are summed in buckets of so many bytes (PyTorch's DistributedDataParallel: 25 MiB, the
    # first one 1 MiB); 0: one for each layer.
    bucket_bytes: float = 0.0
    first_bucket_bytes: float = 2.0**20
    # A pipeline stage that ZeRO-3 splits sums whole gradients over its micro-batches and reduces them behind the last one, and
    # keeps whole parameters until then where a pass does not free them (torch.distributed.pipelining, stage.py,
    # `backward_maybe_with_nosync`; `fully_shard` sums in the type that it reduces in: `to_accumulated_grad_if_needed`).
    stages_reduce_once: bool = False
    clip_gradients: bool = True  # By their norm over all ranks, which every rank waits for before it updates.
    # Collectives of tensor parallel inputs and of their gradients run beside the matmuls that need neither.
    overlap_tensor: bool = True
    # Of sequence parallel and gathering context parallel: see `Layout.regather_inputs`.
    regather_inputs: bool = True
    # Tokens cross to a host once, however many of its experts they go to, and are passed on there: DeepEP and HybridEP, which
    # NVIDIA's recipes of Megatron-Core choose for experts on several hosts (moe_flex_dispatcher_backend of Megatron-Bridge).
    tokens_once_a_host: bool = True
    gradient_bytes: float = 4.0  # Bytes of an element of a gradient while it is summed over micro-batches and ranks.
    # Moved for each parameter when a micro-batch's gradient is added to those before: the matmul itself reads and writes fp32.
    accumulate_bytes: float = 6.0
    optimizer_bytes: float = 12.0  # Of optimizer state for each parameter: Adam's moments and the parameter in fp32.
    main_bytes: float = 4.0  # The part of `optimizer_bytes` that is the optimizer's own copy of the parameter; 0: it has none.
    loss_bytes: float = 4.0  # Of an element of the logits in the loss.
    # Where the host updates parameters: whether split gradients leave the device (DeepSpeed's stage_1_and_2.py, FSDP2's
    # CPUOffloadPolicy), and whether split parameters live there, and are copied for each all-gather (FSDP2). False: copies go there
    # and back at the end of a step (Megatron-Core, cpu_offloading/hybrid_optimizer.py).
    host_gradients: bool = False
    host_parameters: bool = False
    # Activations are copied to the host and back beside computation (Megatron-Core's fine-grained offloading, torchtune's
    # OffloadActivations); False: by the stream that computes (torch.autograd.graph.save_on_cpu).
    overlap_offload: bool = True
    # A pipeline stage ends where its share of the matmuls of all layers and of the head is reached; False: as many layers each.
    stages_by_cost: bool = False
    memory: MemoryRules = field(default_factory=MemoryRules)

    @property
    def flash_attention(self) -> bool:
        """Whether the scores of attention are never stored."""
        return not self.kernels.stores_scores

    @property
    def has_selective(self) -> bool:
        """Whether selective recomputation computes anything again."""
        return self.selective is not Selective.SCORES or not self.flash_attention
