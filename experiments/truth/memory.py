"""`rules_of`, `reported_bytes`: how the frameworks of published runs lay out memory, and what their figures count."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dpro_search.space.mesh import MemoryRules, PeakMemory
from experiments.truth.rows import Row

# CUDA queues 1,024 kernels and events before the host waits; nanotron's forward pass of a layer enqueues about 60: 40 kernels, and
# four collectives with events and copies (its llama.py).
LAUNCHES_QUEUED, NANOTRON_LAUNCHES = 1024, 60
LAUNCH_US = 25.0  # Of the host, for an op of an eager framework's module: PyTorch's dispatch and launch (10 us), and Python.

# nanotron, February 2025: models/llama.py (queries stay in the storage of all three, keys and values are copied; SiLU and product
# apart; loss in fp32 on an fp32 copy), optim/gradient_accumulator.py (16-bit gradients until the pass ends, DDP's buckets without
# ZeRO), distributed.py (`all_gather_coalesced`: flat copies of the parameters, and those of torch.distributed's list all-gather).
NANOTRON = MemoryRules(
    pass_gradient_bytes=2.0,
    bucket_bytes=2.0,
    step_bytes=4.0,
    rotation_copies=(0.0, 1.0, 1.0),
    gate_copies=1.0,
    logits_bytes=8.0,
    transformer_engine=False,
    layers_ahead=LAUNCHES_QUEUED / NANOTRON_LAUNCHES,
    layer_host_us=NANOTRON_LAUNCHES * LAUNCH_US,
)
# Composer's FSDP: gradients in 16 bits, flat parameters; flash-attention's loss writes gradients over the logits.
FSDP = MemoryRules(logits_bytes=4.0, transformer_engine=False)
DEEPSPEED = MemoryRules(transformer_engine=False)
# Hugging Face's eager modules: norms in fp32, logits in fp32 with a shifted copy, log-softmax.
EAGER = MemoryRules(norm_bytes=6.0, gate_copies=1.0, rotation_copies=(0.0, 0.0, 0.0), logits_bytes=14.0, transformer_engine=False)
RULES = (
    (r"nanotron", NANOTRON),
    (r"fsdp", FSDP),
    (r"deepspeed", DEEPSPEED),
    (r"hf transformers", EAGER),
)
DETERMINISTIC = 32.0 * 2**20  # Of CUBLAS_WORKSPACE_CONFIG=:4096:8, which Megatron-LM's functional tests set.


def rules_of(row: Row) -> MemoryRules:
    """How the framework of a row lays out memory."""
    found = next((rules for pattern, rules in RULES if re.search(pattern, row.text("framework"))), None)
    if found is not None:
        return found
    golden = row.text("source") == "megatron-golden-values"
    return MemoryRules(
        matmul_workspace_bytes=DETERMINISTIC if golden else None,
        transformer_engine=not golden or "te" in words_of(row) or "mcore" not in words_of(row),
        logits_bytes=10.0 if "cross_entropy_loss_fusion" in row.text("model") else MemoryRules.logits_bytes,
    )


def words_of(row: Row) -> frozenset[str]:
    """Of a model's name."""
    return frozenset(re.split(r"[_/]", row.text("model")))


def stores_scores(row: Row) -> bool:
    """Whether a test of Megatron-LM computes attention unfused.

    Without Transformer Engine ("te" in a test's name) there is no other. Those with it say ``--attention-backend: unfused`` in
    their model_config.yaml, but for the ones that resume from a checkpoint, or that split the sequence (only fused attention can).
    """
    words = words_of(row)
    if row.text("source") != "megatron-golden-values" or "mcore" not in words or row.whole("cp", 1) > 1:
        return False
    return not words & {"te", "mla"} or not words & {"resume", "nondeterministic", "mla"}


def reported_bytes(row: Row, memories: Sequence[PeakMemory], limit_bytes: float) -> float:
    """What a row's figure counts.

    nanotron's benchmark prints the first rank's reserved memory (`log_throughput`); Megatron-LM's tests the allocated memory of the
    last rank, which writes its logs; nvidia-smi shows all of a device, and others the allocated memory of any rank.
    """
    kind = row.text("memory_kind")
    if "nanotron" in kind:
        return memories[0].reserved_within(limit_bytes)
    if "torch max allocated" in kind:
        return memories[-1].allocated_bytes
    if "nvidia-smi" in kind:
        return max(memory.reserved_within(limit_bytes) + memory.context_bytes for memory in memories)
    return max(memory.allocated_bytes for memory in memories)
