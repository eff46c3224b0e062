"""`from_config`: the `Architecture` of a Hugging Face ``config.json``.

Each family is a function of its `Config`. Its keys and defaults are those of the configuration classes of `transformers` 4.57;
sizes that a file leaves out are in ``config_defaults.toml``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from dpro_search.errors import InputError
from dpro_search.parallel.model.architecture import Architecture, Attention, Experts, FeedForward, Layer, Positions
from dpro_search.parallel.model.config import (
    Config,
    decoder,
    gated,
    head_dim,
    latent_attention,
    llama_attention,
    llama_like,
    qwen_experts,
)
from dpro_search.parallel.model.families import MORE, any_decoder


def from_config(values: Mapping[str, Any], where: str = "config.json", name: str = "") -> Architecture:
    """The architecture that a ``config.json`` describes.

    Parameters
    ----------
    values
        Its content.
    where
        Its path, for errors.
    name
        Of the architecture; "": ``_name_or_path``, or the model's type.

    Raises
    ------
    InputError
        The type of the model is not known, a key is missing or impossible.
    """
    nested = values.get("text_config")
    if isinstance(nested, Mapping) and "hidden_size" not in values:  # of a model of text and images
        values = {**nested, "tie_word_embeddings": values.get("tie_word_embeddings", nested.get("tie_word_embeddings"))}
    kind = values.get("model_type")
    defaults = _defaults().get(kind, {}) if isinstance(kind, str) else {}
    sizes = {key: value for key, value in defaults.items() if key != "class" and key not in values}
    config = Config({key: value for key, value in values.items() if value is not None}, where, sizes)
    architecture = _architecture(config, where, name)
    said = (f"{where}: {key} is not given; {value} is the default of {defaults['class']}" for key, value in config.assumed.items())
    return replace(architecture, assumed=tuple(said))


@lru_cache(maxsize=1)
def _defaults() -> dict[str, dict[str, Any]]:
    return tomllib.loads((files("dpro_search.parallel.model") / "config_defaults.toml").read_text())


def _architecture(config: Config, where: str, name: str) -> Architecture:
    kind = config.word("model_type", default="")
    if kind not in FAMILIES and {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"} <= config.values.keys():
        return any_decoder(config, name or config.word("_name_or_path", default="") or kind)
    if kind not in FAMILIES:
        raise InputError(f"{where}: model_type '{kind}' is not known (known: {', '.join(sorted(FAMILIES))})")
    return FAMILIES[kind](config, name or config.word("_name_or_path", default="") or kind)


def _llama(config: Config, name: str) -> Architecture:
    bias = config.yes("attention_bias", default=False)
    window = config.whole("sliding_window", default=0) if config.word("model_type", default="") == "mistral" else 0
    return decoder(
        config,
        name,
        llama_attention(config, bias=bias, window=window or None),
        gated(config, bias=config.yes("mlp_bias", default=False)),
    )


def _qwen2(config: Config, name: str) -> Architecture:
    return decoder(config, name, llama_attention(config, bias=True, output_bias=False), gated(config))


def _qwen3(config: Config, name: str) -> Architecture:
    attention = llama_attention(config, bias=config.yes("attention_bias", default=False), qk_norm=True)
    return decoder(config, name, attention, gated(config))


def _qwen_moe(config: Config, name: str) -> Architecture:
    third = config.word("model_type", default="").startswith("qwen3")
    bias = config.yes("attention_bias", default=False) if third else True
    attention = llama_attention(config, bias=bias, output_bias=bias if third else False, qk_norm=third)
    shared = 0 if third else config.whole("shared_expert_intermediate_size", default=0)
    experts = qwen_experts(config, shared)
    return decoder(config, name, attention, experts)


def _mixtral(config: Config, name: str) -> Architecture:
    experts = Experts(
        count=config.whole("num_local_experts"), top_k=config.whole("num_experts_per_tok"), hidden=config.whole("intermediate_size")
    )
    attention = llama_attention(config, window=config.whole("sliding_window", default=0) or None)
    return decoder(config, name, attention, experts)


def _gemma(config: Config, name: str) -> Architecture:
    """Gemma 1; Gemma 2 and 3 have four norms a layer, and layers that see a window in turn with some that see everything."""
    kind = config.word("model_type", default="")
    count, attention = config.whole("num_hidden_layers"), llama_attention(config, qk_norm=kind.startswith("gemma3"))
    if kind == "gemma":
        return llama_like(config, name, [Layer(count=count, attention=attention, feed_forward=gated(config))], tied=True)
    turn = config.whole("sliding_window_pattern", default=6 if kind.startswith("gemma3") else 2)
    full = count // turn
    window = config.whole("sliding_window", default=4096)
    narrow = llama_attention(config, qk_norm=kind.startswith("gemma3"), window=window)
    layers = [
        Layer(count=count - full, attention=narrow, feed_forward=gated(config), norms=4),
        Layer(count=full, attention=attention, feed_forward=gated(config), norms=4),
    ]
    return llama_like(config, name, layers, tied=True)


def _deepseek(config: Config, name: str) -> Architecture:
    attention = latent_attention(config, config.whole("kv_lora_rank"))
    count, dense = config.whole("num_hidden_layers"), config.whole("first_k_dense_replace", default=0)
    width = config.whole("moe_intermediate_size")
    experts = Experts(
        count=config.whole("n_routed_experts"),
        top_k=config.whole("num_experts_per_tok"),
        hidden=width,
        shared_hidden=width * config.whole("n_shared_experts", default=0),
        router_bias=config.word("topk_method", default="") == "noaux_tc" or config.word("model_type", default="") == "deepseek_v3",
    )
    layers = [
        Layer(count=dense, attention=attention, feed_forward=gated(config)),
        Layer(count=count - dense, attention=attention, feed_forward=experts),
    ]
    return llama_like(config, name, layers)


def _gpt_oss(config: Config, name: str) -> Architecture:
    count = config.whole("num_hidden_layers")
    experts = Experts(
        count=config.whole("num_local_experts"),
        top_k=config.whole("num_experts_per_tok", "experts_per_token"),
        hidden=config.whole("intermediate_size"),
        bias=True,
        router_bias=True,
    )
    window = config.whole("sliding_window", default=128)
    narrow, full = (llama_attention(config, bias=True, sinks=True, window=size) for size in (window, None))
    layers = [
        Layer(count=count - count // 2, attention=narrow, feed_forward=experts),
        Layer(count=count // 2, attention=full, feed_forward=experts),
    ]
    return llama_like(config, name, layers)


def _gpt2(config: Config, name: str) -> Architecture:
    hidden, heads = config.whole("n_embd", default=768), config.whole("n_head", default=12)
    attention = Attention(heads=heads, kv_heads=heads, head_dim=head_dim(config, heads), bias=True)
    feed_forward = FeedForward(hidden=config.whole("n_inner", default=4 * hidden), bias=True)
    return Architecture(
        name=name,
        hidden=hidden,
        vocab=config.whole("vocab_size", default=50257),
        layers=(Layer(count=config.whole("n_layer", default=12), attention=attention, feed_forward=feed_forward),),
        positions=Positions.LEARNED,
        max_positions=config.whole("n_positions", "n_ctx", default=1024),
        tied=config.yes("tie_word_embeddings", default=True),
        norm_bias=True,
        dropout=config.share("resid_pdrop", default=0.1),
    )


def _opt(config: Config, name: str) -> Architecture:
    heads = config.whole("num_attention_heads")
    attention = Attention(heads=heads, kv_heads=heads, head_dim=head_dim(config, heads), bias=True)
    layer = Layer(
        count=config.whole("num_hidden_layers"),
        attention=attention,
        feed_forward=FeedForward(hidden=config.whole("ffn_dim"), bias=True),
    )
    return Architecture(
        name=name,
        hidden=config.whole("hidden_size"),
        vocab=config.whole("vocab_size"),
        layers=(layer,),
        positions=Positions.LEARNED,
        max_positions=config.whole("max_position_embeddings") + 2,  # two rows are never used
        tied=True,
        norm_bias=True,
        dropout=config.share("dropout", default=0.1),
    )


def _bloom(config: Config, name: str) -> Architecture:
    hidden, heads = config.whole("hidden_size", "n_embed"), config.whole("n_head", "num_attention_heads")
    attention = Attention(heads=heads, kv_heads=heads, head_dim=head_dim(config, heads), bias=True)
    return Architecture(
        name=name,
        hidden=hidden,
        vocab=config.whole("vocab_size"),
        layers=(
            Layer(
                count=config.whole("n_layer", "num_hidden_layers"),
                attention=attention,
                feed_forward=FeedForward(hidden=4 * hidden, bias=True),
            ),
        ),
        positions=Positions.ALIBI,
        tied=True,
        norm_bias=True,
        embedding_norm=True,
    )


def _mpt(config: Config, name: str) -> Architecture:
    hidden, heads = config.whole("d_model"), config.whole("n_heads")
    bias = not config.yes("no_bias", default=True)
    attention = Attention(heads=heads, kv_heads=heads, head_dim=head_dim(config, heads), bias=bias)
    feed_forward = FeedForward(hidden=hidden * config.whole("expansion_ratio", default=4), bias=bias)
    return Architecture(
        name=name,
        hidden=hidden,
        vocab=config.whole("vocab_size", default=50368),
        layers=(Layer(count=config.whole("n_layers"), attention=attention, feed_forward=feed_forward),),
        positions=Positions.ALIBI,
        tied=True,
        norm_bias=bias,
    )


def _bert(config: Config, name: str) -> Architecture:
    hidden, heads = config.whole("hidden_size", default=768), config.whole("num_attention_heads", default=12)
    attention = Attention(heads=heads, kv_heads=heads, head_dim=head_dim(config, heads), bias=True, causal=False)
    feed_forward = FeedForward(hidden=config.whole("intermediate_size", default=4 * hidden), bias=True)
    return Architecture(
        name=name,
        hidden=hidden,
        vocab=config.whole("vocab_size", default=30522),
        layers=(Layer(count=config.whole("num_hidden_layers", default=12), attention=attention, feed_forward=feed_forward),),
        positions=Positions.LEARNED,
        max_positions=config.whole("max_position_embeddings", default=512),
        token_types=config.whole("type_vocab_size", default=2),
        tied=True,
        norm_bias=True,
        embedding_norm=True,
        final_norm=False,
        pooler=True,
        head_transform=True,
        head_bias=True,
        dropout=config.share("hidden_dropout_prob", default=0.1),
    )


def _t5(config: Config, name: str) -> Architecture:
    """Encoder and decoder one after the other, on as many tokens each."""
    heads, dim = config.whole("num_heads"), config.whole("d_kv")
    has_gate = config.word("feed_forward_proj", default="relu").startswith("gated")
    feed_forward = FeedForward(hidden=config.whole("d_ff"), gated=has_gate)
    count = config.whole("num_layers")
    seen, causal = (Attention(heads=heads, kv_heads=heads, head_dim=dim, causal=causal) for causal in (False, True))
    decoder = Layer(
        count=config.whole("num_decoder_layers", default=count), attention=causal, feed_forward=feed_forward, cross_attention=seen
    )
    return Architecture(
        name=name,
        hidden=config.whole("d_model"),
        vocab=config.whole("vocab_size"),
        layers=(Layer(count=count, attention=seen, feed_forward=feed_forward), decoder),
        positions=Positions.RELATIVE,
        max_positions=config.whole("relative_attention_num_buckets", default=32),
        tied=config.yes("tie_word_embeddings", default=True),
        dropout=config.share("dropout_rate", default=0.1),
    )


def _vit(config: Config, name: str) -> Architecture:
    hidden, heads = config.whole("hidden_size", default=768), config.whole("num_attention_heads", default=12)
    patch, image = config.whole("patch_size", default=16), config.whole("image_size", default=224)
    attention = Attention(heads=heads, kv_heads=heads, head_dim=head_dim(config, heads), bias=True, causal=False)
    feed_forward = FeedForward(hidden=config.whole("intermediate_size", default=4 * hidden), bias=True)
    labels = config.values.get("id2label")
    return Architecture(
        name=name,
        hidden=hidden,
        vocab=0,
        layers=(Layer(count=config.whole("num_hidden_layers", default=12), attention=attention, feed_forward=feed_forward),),
        positions=Positions.LEARNED,
        max_positions=(image // patch) ** 2 + 1,
        patch_inputs=config.whole("num_channels", default=3) * patch**2,
        classes=len(labels) if isinstance(labels, Mapping) else config.whole("num_labels", default=1000),
        norm_bias=True,
        head_bias=True,
    )


FAMILIES: Mapping[str, Callable[[Config, str], Architecture]] = {
    "gpt2": _gpt2,
    "opt": _opt,
    "bloom": _bloom,
    "mpt": _mpt,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "gemma": _gemma,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "mixtral": _mixtral,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "gpt_oss": _gpt_oss,
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    **MORE,
}
