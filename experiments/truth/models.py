"""`model_of`: the architecture that a row names or describes."""

from __future__ import annotations

import re
from dataclasses import replace

from dpro_search.errors import InputError
from dpro_search.parallel.model import (
    Adapters,
    Architecture,
    Attention,
    Experts,
    FeedForward,
    Layer,
    Model,
    Positions,
    model,
    published,
)
from experiments.truth.megatron_tests import (
    dense_layers,
    drops_out,
    has_latent_experts,
    is_qwen,
    is_test,
    predicts_two_tokens,
    splits_parameters,
)
from experiments.truth.rows import Row

MODELS = (  # name in a row -> bundled architecture
    (r"llama ?-?3(\.1)?[ _]405b", "llama3-405b"),
    (r"llama ?-?3(\.1)?[ _-]70b", "llama3-70b"),
    (r"llama ?-?3(\.1)?[ _-]8b", "llama3-8b"),
    (r"deepseek ?-?v3", "deepseek-v3"),
    (r"kimi[_ -]k2", "kimi-k2"),
    (r"qwen3[_ -]30b", "qwen3-30b-a3b"),
    (r"qwen3[_ -]235b", "qwen3-235b-a22b"),
    (r"gpt[_ -]oss[_ -]120b", "gpt-oss-120b"),
    (r"gpt[_ -]oss[_ -]20b", "gpt-oss-20b"),
    (r"mixtral[_ -]8x7b", "mixtral-8x7b"),
    (r"mixtral[_ -]8x22b", "mixtral-8x22b"),
    (r"nemotron-8b", "nemotron-8b"),
    (r"nemotron-22b", "nemotron-22b"),
    (r"nemotron-15b", "nemotron-15b"),
    (r"nemotron[ -]340b", "nemotron-340b"),
    (r"grok-?1", "grok-1"),
    (r"gpt[ -]126m", "gpt3-126m"),
    (r"gpt[ -]5b", "gpt3-5b"),
    (r"qwen3[_ -]next", "qwen3-next-80b-a3b"),
    (r"biobert|electra|bert-?base", "bert-base"),
    (r"bert", "bert-large"),
)
NETWORKS = (  # name in a row -> network, if the batch of a device is at least so many
    (r"se-?resnext.?101", "se-resnext101-32x4d"),
    (r"resnext.?101", "resnext101-32x4d"),
    (r"resnext.?50", "resnext50-32x4d"),
    (r"resnet.?101", "resnet101"),
    (r"resnet.?152", "resnet152"),
    (r"resnet.?50|rn50", "resnet50"),
    (r"retinanet", "retinanet-mlperf"),
    (r"mask.?r-?cnn", "mask-rcnn"),
    (r"^ssd", "ssd300"),
    (r"vgg.?16", "vgg16"),
    (r"vgg.?19", "vgg19"),
    (r"alexnet", "alexnet"),
    (r"inception", "inception-v3"),
    (r"efficientnet", "efficientnet-b0"),
    (r"unet_?industrial", "unet-industrial"),
    (r"nnunet", "nnunet"),
    (r"unet_?medical", "unet-medical"),
    (r"unet_?3d|3d u-?net", "unet3d"),
    (r"v-?net", "vnet"),
    (r"dcn", "dlrm-dcnv2"),
    (r"dlrm", "dlrm"),
    (r"\bncf\b", "ncf"),
)
NNUNET_2D_BATCH = 16  # Batches of nnU-Net's examples: 32 and more of slices, at most 4 of volumes.
DROPOUT = 0.1  # Default of Megatron-LM, and of GPT-2, OPT and BERT in Hugging Face's library.
T5_LAYERS, T5_WIDE, T5_WIDE_LAYERS, T5_HEAD = 12, 4096, 24, 64
# Multi-head latent attention of Megatron-LM's test (model_config.yaml): of a head's 24 dims 8 are rotated.
LATENT = Attention(heads=1, kv_heads=1, head_dim=16 + 8, value_dim=16, query_rank=192, kv_rank=64, rotary_dim=8)
# Multi-head latent attention and experts of its tests that stand for DeepSeek-V3 (model_config.yaml).
LATENT_EXPERTS = Attention(heads=1, kv_heads=1, head_dim=128 + 64, value_dim=128, query_rank=1536, kv_rank=512, rotary_dim=64)
EXPERT_WIDTH = 1024  # Of its tests "gpt3_moe" (--moe-ffn-hidden-size), and of those with latent attention.
SHARED_WIDTH = 512  # Of the former where experts have tensor parallel ranks (--moe-shared-expert-intermediate-size).
T5_VOCABULARY = 28996 + 100  # BERT's with case, and the ids that mark spans
# Vocabularies of tokenizers, for rows that do not give them: config.json of GPT-2, BERT, Llama 2, BLOOM and Llama 3.
GPT2_VOCABULARY, BERT_VOCABULARY, LLAMA_VOCABULARY = 50257, 30522, 32000
OTHER_VOCABULARIES = (250880, 128256)


def is_network(row: Row) -> bool:
    """Whether the model is no transformer."""
    return not row.number("hidden") and any(re.search(pattern, row.text("model")) for pattern, _ in NETWORKS)


def sequence_of(row: Row) -> int:
    """Tokens of a sequence; of fine-tuned BERTs those of the task's usual configuration."""
    default = 384 if "squad" in row.text("notes") else 128 if "ner" in row.text("notes").split() else 0
    return row.whole("seq_len", default)


def model_of(row: Row) -> Model:
    """The model of a row; raises `InputError` where it is not known."""
    trained = _trained(row)
    if isinstance(trained, Architecture) and ("lora" in row.text("model") or "task lora" in row.text("notes")):
        frozen_bytes = NF4_BYTES if "nf4" in row.text("precision") else 0.0
        return replace(trained, adapters=replace(_adapters(row), frozen_bytes=frozen_bytes))
    return trained


# What LoRA is beside: LitGPT's words; "all" of Paxml's LORA_TARGET_LAYERS.
LORA_TARGETS = {
    "query": ("q_proj",),
    "key": ("k_proj",),
    "value": ("v_proj",),
    "projection": ("o_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "head": ("lm_head",),
}
NF4_BYTES = 0.5 + 1 / 64  # 4 bits, and a scale in 8 bits for each 64 (Dettmers et al. 2023, "QLoRA", section 3).
LORA_EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MLPERF_TARGETS = ("linear_qkv", "linear_proj")  # mlcommons/training, llama2_70b_lora/README.md: qkv_proj, o_proj; the same for all.


def _adapters(row: Row) -> Adapters:
    """Rank and matrices of a row's LoRA; neither where the row does not say both."""
    named = re.search(r"lora on ([a-z,]+)", row.text("notes"))
    rank = re.search(r"lora r(\d+)", row.text("model"))
    if row.text("source").startswith("mlperf") and rank:
        return Adapters(rank=int(rank[1]), targets=MLPERF_TARGETS)
    if named is None or not row.number("lora_rank"):
        return Adapters()
    words = named[1].split(",")
    targets = LORA_EVERYWHERE if words == ["all"] else tuple(target for word in words for target in LORA_TARGETS[word])
    return Adapters(rank=row.whole("lora_rank", 0), targets=targets)


def _trained(row: Row) -> Model:
    """The model of a row, of which all weights are trained."""
    if is_network(row):
        name = next(name for pattern, name in NETWORKS if re.search(pattern, row.text("model")))
        if name == "dlrm-dcnv2" and "dlrm.md" in row.text("source_path"):  # a page of NVIDIA's example that has both
            name = "dlrm"
        if name == "nnunet":
            name = "nnunet-2d" if row.whole("micro_batch", 1) >= NNUNET_2D_BATCH else "nnunet-3d"
        if name.startswith("dlrm") and "model size small" in row.text("notes"):
            name += "-small"
        return model(name)
    if has_latent_experts(row):
        return _latent_experts(row)
    if is_described(row):
        return described(row)
    if row.text("model").startswith("t5/") and row.number("hidden"):
        return _t5(row)
    name = next((name for pattern, name in MODELS if re.search(pattern, row.text("model"))), None)
    if name is None:
        raise InputError(f"model {row.values['model']}: neither its dims are given nor is it a model that is bundled")
    return published(name)


def is_described(row: Row) -> bool:
    """Whether a row gives the dims of a transformer's layers, and is none that a test of Megatron-LM names."""
    return bool(row.number("layers") and row.number("hidden") and not has_latent_experts(row))


def vocabularies_of(row: Row) -> tuple[int, ...]:
    """The vocabulary of a row whose dims are given, or those that it may have where it gives none, the likeliest first."""
    usual = _usual_vocabulary(row)
    if row.number("vocab"):
        return (row.whole("vocab", usual),)
    return (usual,) if is_test(row) else (usual, *(other for other in OTHER_VOCABULARIES if other != usual))


def _usual_vocabulary(row: Row) -> int:
    kind = row.text("model")
    return BERT_VOCABULARY if "bert" in kind else GPT2_VOCABULARY if _is_old(kind) else LLAMA_VOCABULARY


def _is_old(kind: str) -> bool:
    """Whether a model is of the kind of GPT-2: biases, and a feed-forward of one matrix in."""
    return bool(re.search(r"gpt|opt|bert", kind))


def _is_gated(row: Row) -> bool:
    """Whether a feed-forward has two matrices in: by its name, or by a width that is not four times the hidden size."""
    kind, width = row.text("model"), row.whole("ffn_hidden", 0)
    named = bool(re.search(r"llama|mi[sx]tral|qwen|nemotron-h|swiglu", kind)) or is_qwen(row)
    return named or (not is_test(row) and not _is_old(kind) and width not in (0, 4 * row.whole("hidden", 0)))


def described(row: Row) -> Architecture:
    """A transformer whose dims a row gives; words of its name say what its dims do not."""
    hidden, heads, kind = row.whole("hidden", 0), row.whole("heads", 1), row.text("model")
    bert, tested, old, gated = "bert" in kind, is_test(row), _is_old(kind), _is_gated(row)
    bias = old and not re.search(r"disable_bias|swiglu", kind)
    attention = Attention(heads=heads, kv_heads=row.whole("kv_heads", heads), head_dim=hidden // heads, bias=bias, causal=not bert)
    if tested and kind.endswith(("_mla", "_mla_1node")):
        attention = replace(LATENT, heads=heads, kv_heads=heads)
    width = row.whole("ffn_hidden", 4 * hidden)
    if tested and "swiglu" in kind:
        width = gated_width(hidden)
    count = row.whole("experts", 0)
    feed_forward: FeedForward | Experts = FeedForward(hidden=width, gated=gated, bias=bias)
    if count:
        expert = EXPERT_WIDTH if tested and "gpt3_moe" in kind else width
        shared = SHARED_WIDTH if expert == EXPERT_WIDTH and "etp" in kind else 0
        feed_forward = Experts(
            count=count, top_k=row.whole("top_k", 1), hidden=expert, shared_hidden=shared, gated=gated, bias=bias and not tested
        )
    tied = row.number("tied_embeddings")
    dropout = drops_out(row) if tested else bool(re.search("megatron-deepspeed|transformers", row.text("framework")))
    rotary = not old or bool(re.search(r"rope|rotary", kind))
    return Architecture(
        name=row.values["model"],
        hidden=hidden,
        vocab=_vocabulary(row, _usual_vocabulary(row)),
        layers=(Layer(count=row.whole("layers", 1), attention=attention, feed_forward=feed_forward),),
        positions=Positions.ALIBI if "mpt" in kind else Positions.ROTARY if rotary else Positions.LEARNED,
        max_positions=row.whole("seq_len", 0),
        tied=(old and not is_qwen(row) and not re.search("untie|memory_speed", kind)) if tied is None else bool(tied),
        norm_bias=old,
        token_types=2 if bert else 0,
        pooler=bert and tested and "release" not in kind,  # Release tests set --bert-no-binary-head.
        head_transform=bert and tested,
        head_bias=bert and tested,
        dropout=DROPOUT if old and dropout else 0.0,
    )


def gated_width(hidden: int) -> int:
    """Of a gated feed-forward of a test of Megatron-LM: two thirds of four times the hidden size, in multiples of 64.

    Source: megatron/training/arguments.py, where --ffn-hidden-size is not given.
    """
    return int(4 * hidden * 2 / 3 / 64) * 64


def _latent_experts(row: Row) -> Architecture:
    """Of Megatron-LM's tests, with the dims of their model_config.yaml; those that split parameters have smaller ranks."""
    hidden, layers, heads = row.whole("hidden", 0), row.whole("layers", 1) + predicts_two_tokens(row), row.whole("heads", 1)
    attention = replace(LATENT_EXPERTS, heads=heads, kv_heads=heads)
    if splits_parameters(row):
        attention = replace(attention, query_rank=256, kv_rank=128)
    dense = dense_layers(row)
    experts = Experts(
        count=row.whole("experts", 1),
        top_k=row.whole("top_k", 1),
        hidden=EXPERT_WIDTH,
        shared_hidden=EXPERT_WIDTH,
    )
    feed_forward = FeedForward(hidden=row.whole("ffn_hidden", 4 * hidden), gated=True)
    return Architecture(
        name=row.values["model"],
        hidden=hidden,
        vocab=_vocabulary(row, GPT2_VOCABULARY),
        layers=(
            Layer(count=dense, attention=attention, feed_forward=feed_forward),
            Layer(count=layers - dense, attention=attention, feed_forward=experts),
        ),
    )


def _t5(row: Row) -> Architecture:
    """Megatron-LM's T5 of its tests: as many layers of each kind, 128 tokens of a target for 512 of a source, learned positions."""
    hidden, heads = row.whole("hidden", 0), row.whole("heads", 1)
    width, count = row.whole("ffn_hidden", 4 * hidden), T5_LAYERS if hidden < T5_WIDE else T5_WIDE_LAYERS
    seen, causal = (Attention(heads=heads, kv_heads=heads, head_dim=T5_HEAD, bias=True, causal=causal) for causal in (False, True))
    feed_forward = FeedForward(hidden=width, bias=True)
    return Architecture(
        name=row.values["model"],
        hidden=hidden,
        vocab=_vocabulary(row, T5_VOCABULARY),
        layers=(
            Layer(count=count, attention=seen, feed_forward=feed_forward),
            Layer(count=count, attention=causal, feed_forward=feed_forward, cross_attention=seen),
        ),
        positions=Positions.LEARNED,
        max_positions=row.whole("seq_len", 0),
        tied=True,
        norm_bias=True,
        head_bias=True,
        dropout=DROPOUT,
        target_share=0.25,
    )


def _vocabulary(row: Row, default: int) -> int:
    """Rows of the embedding: Megatron pads a vocabulary to a multiple of 128 for each tensor parallel rank."""
    found = row.whole("vocab", default)
    multiple = 128 * row.whole("tp", 1) if "megatron" in row.text("framework") else 1
    return -(-found // multiple) * multiple
