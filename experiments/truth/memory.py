"""`rules_of`, `reported_bytes`: how the frameworks of published runs lay out memory, and what their figures count."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import fields, replace

from dpro_search.parallel.frameworks import LOGITS_BYTES
from dpro_search.parallel.memory.peak import PeakMemory
from dpro_search.parallel.memory.rules import MemoryRules
from dpro_search.parallel.workload import Workload
from experiments.truth.megatron_tests import (
    adds_gradients_in_matmuls,
    cached_bytes,
    fuses_loss,
    groups_experts,
    is_deterministic,
    is_test,
    predicts_two_tokens,
    uses_transformer_engine,
)
from experiments.truth.rows import Row

DEFERRED = 2  # Micro-batches, of --wgrad-deferral-limit in the model_config.yaml of the test that defers.
DETERMINISTIC = 32.0 * 2**20  # Of CUBLAS_WORKSPACE_CONFIG=:4096:8, which Megatron-LM's deterministic tests set.
FUSED_LOSS_BYTES = 10.0  # Of a logit: of --cross-entropy-loss-fusion, whose compiled steps return what they need in fp32.
# Of a score of NVIDIA's RetinaNet for MLPerf, in 16 bits: forward each level's, with the classes behind the positions, and those of
# all levels side by side (ssd/implementations/pytorch/model/retinanet.py); with the loss also the partial gradients that the fused
# focal loss computes in the forward pass (focal_loss.py), those of all images side by side, and each level's contiguous copy.
DETECTED_BYTES, DETECTION_LOSS_BYTES = 6.0, 12.0
VALIDATION_BATCH = 32  # Images, in its configurations of rounds 5.0 and 5.1 (--eval-batch-size).
# Of a parameter that is kept in 8 bits: FP8_PARAM_GATHER of submissions on Blackwell (config_common_blackwell.sh). Hopper's
# matmuls need a transposed copy as well, which makes two.
PARAMETER_BYTES = 1.0
# Of a logit of torchtitan's compiled loss (components/loss.py, since 2025): in 16 bits, and its gradient.
COMPILED_LOSS, COMPILED_LOSS_BYTES = re.compile(r"_2025"), 4.0
SECOND_TOKEN_BYTES = 4.0  # Of a logit of a second token: what its loss keeps in fp32 while the first token's is computed.


def rules_of(row: Row, usual: MemoryRules) -> MemoryRules:
    """How the framework of a row lays out memory, where a test of Megatron-LM differs from the `usual`."""
    if not is_test(row):
        levers = row.text("notes").startswith("cumulative levers")
        if _is_detector(row):
            return replace(usual, logits_bytes=DETECTION_LOSS_BYTES)
        if row.text("source").startswith("mlperf") and "lora" in row.text("model"):
            return replace(usual, adapter_mask_bytes=1.0)  # lora_dropout: 0.1 (mlcommons/training, llama2_70b_lora).
        if row.text("source").startswith("mlperf") and "llama-3" in row.text("model") and re.search(r"[b]200", row.text("gpu")):
            return replace(usual, layer_weight_bytes=PARAMETER_BYTES)
        if (
            "torchtitan" in row.text("framework")
            and "compile" in row.text("overlap")
            and COMPILED_LOSS.search(row.text("source_path"))
        ):
            return replace(usual, logits_bytes=COMPILED_LOSS_BYTES)
        whole = levers and "chunked cross entropy" not in row.text("notes")
        return replace(usual, logits_bytes=LOGITS_BYTES["whole"]) if whole else usual
    engine, deterministic = uses_transformer_engine(row), is_deterministic(row)
    second = SECOND_TOKEN_BYTES if predicts_two_tokens(row) else 0.0
    # Only flash-attention goes round context parallel ranks, and is deterministic on Blackwell.
    flash = row.whole("cp", 1) > 1 or (deterministic and "gb200" in row.text("gpu"))
    return replace(
        usual,
        matmul_workspace_bytes=DETERMINISTIC if deterministic else None,
        transformer_engine=engine,
        shared_scores=not engine,
        flash_copy=True if flash else None,
        grouped_workspaces=usual.grouped_workspaces if groups_experts(row) else 0,
        dummy_gradients=adds_gradients_in_matmuls(row),
        deferred_logits=DEFERRED if "defer_embedding_wgrad_compute" in row.text("model") else 0,
        logits_bytes=(FUSED_LOSS_BYTES if fuses_loss(row) else usual.logits_bytes) + second,
    )


def _is_detector(row: Row) -> bool:
    return row.text("source").startswith("mlperf") and "retinanet" in row.text("model")


def phases_of(row: Row, workload: Workload) -> tuple[Workload, ...]:
    """The phases of a row's job whose peaks its figure may be: training, and what some jobs compute before it.

    NVIDIA's RetinaNet for MLPerf warms up validation on a batch of random images, in the modes of evaluation but with gradients
    enabled, so that activations are kept until the network's outputs are made (model_capture.py, `model_eval_warmup`).
    """
    if not _is_detector(row):
        return (workload,)
    plan, runtime = workload.strategy, workload.runtime
    forward = replace(runtime, memory=replace(runtime.memory, logits_bytes=DETECTED_BYTES))
    images = VALIDATION_BATCH * plan.micro_batches
    return (
        workload,
        replace(workload, runtime=forward, strategy=replace(plan, micro_batch=VALIDATION_BATCH, global_batch=images * plan.dp)),
    )


def reported_bytes(row: Row, memories: Sequence[PeakMemory], limit_bytes: float) -> float:
    """What a row's figure counts.

    nanotron's benchmark prints the first rank's reserved memory (`log_throughput`); Megatron-LM's tests the allocated memory of the
    last rank, which writes its logs; nvidia-smi shows all of a device, and others the allocated memory of any rank.
    """
    kind = row.text("memory_kind")
    if "1e9 bytes" in kind:
        return max(memory.allocated_bytes for memory in memories) * 2**30 / 1e9
    if "nanotron" in kind:
        return memories[0].reserved_within(limit_bytes)
    if "torch max allocated" in kind:
        return memories[-1].allocated_bytes + (cached_bytes(row) if is_test(row) else 0)
    if "nvidia-smi" in kind:
        return max(memory.reserved_within(limit_bytes) + memory.context_bytes for memory in memories)
    return max(memory.allocated_bytes for memory in memories)


def peak_bytes(memories: Sequence[PeakMemory]) -> float:
    """Of the rank that needs most."""
    return max(memory.total_bytes for memory in memories)


def partly_recomputed(
    none: Sequence[PeakMemory], full: Sequence[PeakMemory], limit_bytes: float, layers: int
) -> tuple[PeakMemory, ...]:
    """Ledgers with as few layers recomputed as fit: between those of no layer and of all, which are linear in the layers."""
    most, least = peak_bytes(none), peak_bytes(full)
    kept = math.floor((limit_bytes - least) / (most - least) * layers) if most > least else 0
    share = min(max(kept, 0), layers) / layers
    names = [field.name for field in fields(PeakMemory)]
    return tuple(
        PeakMemory(**{name: share * getattr(one, name) + (1 - share) * getattr(other, name) for name in names})
        for one, other in zip(none, full, strict=True)
    )
