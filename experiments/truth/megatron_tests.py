"""What Megatron-LM's functional tests set in their model_config.yaml, as far as rows and the names of tests tell it."""

from __future__ import annotations

import re

from experiments.truth.rows import Row

SOURCE = "megatron-golden-values"
DENSE_LAYERS = 3


def is_test(row: Row) -> bool:
    """Whether a row is one of Megatron-LM's functional tests."""
    return row.text("source") == SOURCE


def words_of(row: Row) -> frozenset[str]:
    """Of a test's name; without Transformer Engine where a test takes it out ("uninstall_te")."""
    return frozenset(re.split(r"[_/]", row.text("model").replace("uninstall_te", "")))


def is_deterministic(row: Row) -> bool:
    """Whether a test sets --deterministic-mode, and with it CUBLAS_WORKSPACE_CONFIG and NVTE_ALLOW_NONDETERMINISTIC_ALGO=0."""
    return "deterministic-mode" in row.text("overlap")


def computes_in_8_bits(row: Row) -> bool:
    """Whether a test sets --fp8-format."""
    return "fp8" in row.text("precision")


def uses_transformer_engine(row: Row) -> bool:
    """Whether the layers of a test are Transformer Engine's (--transformer-impl, --spec).

    Those of GPT and T5 that have it say "te", those of BERT that have it not "local_spec"; only it computes in 8 bits.
    """
    words = words_of(row)
    if "bert" in words:
        return "local" not in words
    return bool(words & {"te", "11b"}) or "mcore" not in words or computes_in_8_bits(row)


def stores_scores(row: Row) -> bool:
    """Whether a test computes attention unfused.

    Without Transformer Engine there is no other. Those with it set ``--attention-backend: unfused``, but for the ones that resume
    from a checkpoint, that fuse the loss ("cross_entropy_loss_fusion"), that split the sequence (only fused attention can) or that
    compute in 8 bits. Those of BERT all set it, those of T5 but the largest, and those with latent experts.
    """
    words = words_of(row)
    if not is_test(row):
        return False
    if words & {"t5", "bert"} or has_latent_experts(row):
        return "11b" not in words
    if "mcore" not in words or row.whole("cp", 1) > 1 or computes_in_8_bits(row):
        return False
    without = not uses_transformer_engine(row) or has_old_flash_attention(row)
    return without or not words & {"resume", "nondeterministic", "entropy"}


def has_old_flash_attention(row: Row) -> bool:
    """Whether a deterministic test ran with a flash-attention that has no deterministic backward pass.

    Transformer Engine then takes unfused attention (attention.py, `_flash_attn_2_4_1_plus`). The containers for long-term support
    were built on PyTorch's of January 2024 (.gitlab/stages/01.tests.yml), which has version 2.0.4; today on one of September 2025
    (docker/.ngc_version.lts). Records of before are named after a cluster, which is not used any more, or of tests that
    have no recipe for their platform any more, so that nothing wrote them anew.
    """
    old = "dracooci" in row.text("source_path") or "no recipe for this platform" in row.text("notes")
    return old and "lts" in row.text("framework") and is_deterministic(row)


def cached_bytes(row: Row) -> float:
    """Keys and values that a test of reinforcement learning keeps for what it generates, also while it trains.

    ``--inference-dynamic-batching-buffer-size-gb``: 20 in the tests with 8 billion parameters, 40 by default
    (megatron/training/arguments.py).
    """
    if "grpo" not in words_of(row):
        return 0.0
    return (20 if is_qwen(row) else 40) * 2.0**30


def is_qwen(row: Row) -> bool:
    """Whether a test trains Qwen3 8B, with feed-forwards that are gated and tables that are not tied (``--load``, ``--swiglu``)."""
    return {"grpo", "8b"} <= words_of(row)


def drops_out(row: Row) -> bool:
    """Whether a test has dropout; those that split sequences and are not deterministic set --hidden-dropout 0."""
    return row.whole("cp", 1) == 1 or is_deterministic(row)


def groups_experts(row: Row) -> bool:
    """Whether a test multiplies all experts of a rank in one call (--moe-grouped-gemm).

    Those with "2parallel" experts that say nothing of it in their names multiply them one after the other.
    """
    return "2parallel" not in row.text("model") or bool(
        re.search("groupedgemm|average_in_collective|top2router", row.text("model"))
    )


def adds_gradients_in_matmuls(row: Row) -> bool:
    """Whether matmuls add gradients of weights to those before; most tests set --no-gradient-accumulation-fusion."""
    return bool(words_of(row) & {"t5", "release"}) or (has_latent_experts(row) and not splits_parameters(row))


def splits_parameters(row: Row) -> bool:
    """Whether a test splits parameters over replicas (--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params)."""
    return "optim_grads_params" in row.text("zero_stage")


def fuses_loss(row: Row) -> bool:
    """Whether a test sets --cross-entropy-loss-fusion."""
    latent = has_latent_experts(row) and not re.search("no_mtp|proxy", row.text("model"))
    return latent or "cross_entropy_loss_fusion" in row.text("model")


def has_latent_experts(row: Row) -> bool:
    """Whether a test stands for DeepSeek-V3, with latent attention and experts: those on several hosts have DeepSeek's own dims."""
    return is_test(row) and row.text("notes").endswith("mla") and row.text("model").startswith("moe/")


def dense_layers(row: Row) -> int:
    """Of such a test, before the layers with experts (--moe-layer-freq): three unless it gives a number of virtual stages."""
    return 1 if row.number("vpp") or row.whole("layers", 1) <= DENSE_LAYERS else DENSE_LAYERS


def predicts_two_tokens(row: Row) -> bool:
    """Whether such a test has a layer to predict a second token (--mtp-num-layers)."""
    return has_latent_experts(row) and not re.search("no_mtp|cudagraph|proxy", row.text("model"))
