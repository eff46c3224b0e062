"""`rules_of`, `reported_bytes`: how the frameworks of published runs lay out memory, and what their figures count."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import fields, replace

from dpro_search.space.mesh import MemoryRules, PeakMemory
from experiments.truth.models import has_latent_experts, predicts_two_tokens
from experiments.truth.rows import Row

DEFERRED = 2  # Micro-batches, of --wgrad-deferral-limit in the model_config.yaml of the test that defers.
DETERMINISTIC = 32.0 * 2**20  # Of CUBLAS_WORKSPACE_CONFIG=:4096:8, which Megatron-LM's deterministic tests set.
FUSED_LOSS_BYTES = 10.0  # Of a logit: of --cross-entropy-loss-fusion, whose compiled steps return what they need in fp32.
SECOND_TOKEN_BYTES = 4.0


def rules_of(row: Row, usual: MemoryRules) -> MemoryRules:
    """How the framework of a row lays out memory, where a test of Megatron-LM differs from the `usual`."""
    golden = row.text("source") == "megatron-golden-values"
    if not golden:
        return usual
    engine, deterministic = uses_transformer_engine(row), "deterministic-mode" in row.text("overlap")
    return replace(
        usual,
        matmul_workspace_bytes=DETERMINISTIC if deterministic else None,
        transformer_engine=engine,
        shared_scores=not engine,
        flash_copy=True if row.whole("cp", 1) > 1 or "gb200" in row.text("gpu") and deterministic else None,
        grouped_workspaces=usual.grouped_workspaces if groups_experts(row) else 0,
        deferred_logits=DEFERRED if "defer_embedding_wgrad_compute" in row.text("model") else 0,
        logits_bytes=_logits_bytes(row, usual),
    )


def uses_transformer_engine(row: Row) -> bool:
    """Whether the layers of a test of Megatron-LM are Transformer Engine's.

    Those of GPT and T5 that have it say "te", those of BERT that do not "local_spec" (pretrain_bert.py); only it has 8 bits.
    """
    words = words_of(row)
    if "bert" in words:
        return "local" not in words
    if _computes_in_8_bits(row) or "11b" in words:
        return True
    return "te" in words or "mcore" not in words


def _computes_in_8_bits(row: Row) -> bool:
    return "fp8" in row.text("precision")


def _logits_bytes(row: Row, usual: MemoryRules) -> float:
    """Of a logit; those of a second token are kept in fp32 until the backward pass starts with them."""
    latent = has_latent_experts(row)
    fused = "cross_entropy_loss_fusion" in row.text("model") or latent and "no_mtp" not in row.text("model")
    return (FUSED_LOSS_BYTES if fused else usual.logits_bytes) + SECOND_TOKEN_BYTES * (latent and predicts_two_tokens(row))


def groups_experts(row: Row) -> bool:
    """Whether a test of Megatron-LM multiplies all experts of a rank in one call (--moe-grouped-gemm in its model_config.yaml).

    Those with "2parallel" experts that say nothing of it in their names multiply them one after the other.
    """
    kind = row.text("model")
    return "2parallel" not in kind or bool(re.search("groupedgemm|average_in_collective|top2router", kind))


def words_of(row: Row) -> frozenset[str]:
    """Of a model's name; without Transformer Engine where a test takes it out ("uninstall_te")."""
    return frozenset(re.split(r"[_/]", row.text("model").replace("uninstall_te", "")))


def stores_scores(row: Row) -> bool:
    """Whether a test of Megatron-LM computes attention unfused.

    Without Transformer Engine ("te" in a test's name) there is no other. Those with it say ``--attention-backend: unfused`` in
    their model_config.yaml, but for the ones that resume from a checkpoint, that fuse the loss ("cross_entropy_loss_fusion"), or
    that split the sequence (only fused attention can).
    Those of T5 all say it but for the largest, and those with latent experts; those in 8 bits do not.
    """
    words = words_of(row)
    if row.text("source") != "megatron-golden-values":
        return False
    if "t5" in words or has_latent_experts(row):
        return "11b" not in words
    if "mcore" not in words or row.whole("cp", 1) > 1 or _computes_in_8_bits(row):
        return False
    return not uses_transformer_engine(row) or not words & {"resume", "nondeterministic", "entropy"} or _fuses_none_that_is_deterministic(row)


def _fuses_none_that_is_deterministic(row: Row) -> bool:
    """Whether a deterministic test ran with a Transformer Engine that has no deterministic fused attention.

    The container for long-term support had such a one, as its values say; it has a newer one since values are recorded in every
    step and not in every fifth, and file names have no cluster.
    """
    old = re.search(r"lts_dgx[ah]100_|median of [12]\d logged", f"{row.text('source_path')} {row.text('notes')}")
    return "lts" in row.text("framework") and "deterministic-mode" in row.text("overlap") and bool(old)


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
