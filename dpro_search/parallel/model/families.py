"""Further families of Hugging Face configurations, and any decoder whose configuration has the usual keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dpro_search.parallel.model.architecture import Architecture, Attention, Experts, FeedForward, Layer
from dpro_search.parallel.model.config import (
    Config,
    decoder,
    gated,
    head_dim,
    joined,
    latent_attention,
    llama_attention,
    llama_like,
    qwen_experts,
)

LINEAR_CHUNK = 64
"""Tokens that linear attention computes at a time (fla's `chunk_gated_delta_rule`): it costs what so narrow a window does."""


def _nemotron(config: Config, name: str) -> Architecture:
    """Squared ReLU between two matrices; layer norms with bias."""
    return decoder(config, name, llama_attention(config), FeedForward(hidden=config.whole("intermediate_size")), norm_bias=True)


def _qwen3_next(config: Config, name: str) -> Architecture:
    """One layer in four has attention; the others linear attention (gated delta networks), as a narrow window here."""
    count, turn = config.whole("num_hidden_layers"), config.whole("full_attention_interval", default=4)
    shared = config.whole("shared_expert_intermediate_size", default=0)
    experts = qwen_experts(config, shared)
    linear = Attention(
        heads=config.whole("linear_num_value_heads"),
        kv_heads=config.whole("linear_num_key_heads"),
        head_dim=config.whole("linear_key_head_dim"),
        value_dim=config.whole("linear_value_head_dim"),
        window=LINEAR_CHUNK,
    )
    full = count // turn
    layers = [
        Layer(count=count - full, attention=linear, feed_forward=experts),
        Layer(count=full, attention=llama_attention(config, qk_norm=True), feed_forward=experts),
    ]
    return llama_like(config, name, joined(layers))


def _gpt_neox(config: Config, name: str) -> Architecture:
    """Pythia: biases everywhere; attention and feed-forward beside each other, each with its norm."""
    return decoder(
        config,
        name,
        llama_attention(config, bias=config.yes("attention_bias", default=True)),
        FeedForward(hidden=config.whole("intermediate_size"), bias=True),
        norm_bias=True,
    )


def _gptj(config: Config, name: str) -> Architecture:
    """Attention without bias and feed-forward with, on one norm; a head with bias."""
    hidden, heads = config.whole("n_embd"), config.whole("n_head")
    attention = Attention(heads=heads, kv_heads=heads, head_dim=head_dim(config, heads))
    feed_forward = FeedForward(hidden=config.whole("n_inner", default=4 * hidden), bias=True)
    return Architecture(
        name=name,
        hidden=hidden,
        vocab=config.whole("vocab_size"),
        layers=(Layer(count=config.whole("n_layer"), attention=attention, feed_forward=feed_forward),),
        norm_bias=True,
        parallel_residual=True,
        head_bias=True,
    )


def _falcon(config: Config, name: str) -> Architecture:
    """One key-value head (multi-query), no biases, attention and feed-forward on one norm, or on two (40B)."""
    heads, hidden = config.whole("num_attention_heads"), config.whole("hidden_size")
    shared = 1 if config.yes("multi_query", default=True) else heads
    if config.yes("new_decoder_architecture", default=False):
        shared = config.whole("num_kv_heads", default=heads)
    attention = Attention(heads=heads, kv_heads=shared, head_dim=head_dim(config, heads), bias=config.yes("bias", default=False))
    feed_forward = FeedForward(hidden=config.whole("ffn_hidden_size", default=4 * hidden), bias=config.yes("bias", default=False))
    beside = config.yes("parallel_attn", default=True) and not config.yes("new_decoder_architecture", default=False)
    return decoder(config, name, attention, feed_forward, norm_bias=True, parallel_residual=beside, tied=True)


def _phi(config: Config, name: str) -> Architecture:
    """Biases everywhere, on one norm; a head with bias."""
    return decoder(
        config,
        name,
        llama_attention(config, bias=True),
        FeedForward(hidden=config.whole("intermediate_size"), bias=True),
        norm_bias=True,
        parallel_residual=True,
        head_bias=True,
    )


def _starcoder2(config: Config, name: str) -> Architecture:
    bias = config.yes("use_bias", default=True)
    return decoder(
        config,
        name,
        llama_attention(config, bias=bias, window=config.whole("sliding_window", default=0) or None),
        FeedForward(hidden=config.whole("intermediate_size"), bias=bias),
        norm_bias=True,
        tied=config.yes("tie_word_embeddings", default=True),
    )


def _olmo(config: Config, name: str) -> Architecture:
    """Norms without parameters."""
    return decoder(config, name, llama_attention(config), gated(config), norm_weight=False)


def any_decoder(config: Config, name: str) -> Architecture:
    """A decoder of a family that is not known, by the usual keys: grouped attention, latent attention, experts, gated feed-forward.

    A family that does something else under these keys gets what they say; sizes, and so most of the cost, are right.
    """
    count = config.whole("num_hidden_layers")
    more: dict[str, Any] = {"bias": config.yes("attention_bias", default=config.yes("use_bias", default=False))}
    rank = config.whole("kv_lora_rank", default=0)
    if rank:
        attention = latent_attention(config, rank)
    else:
        attention = llama_attention(config, window=config.whole("sliding_window", default=0) or None, **more)
    many = config.whole("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", default=0)
    if not many:
        return decoder(config, name, attention, gated(config))
    width = config.whole("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
    shared = config.whole(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        default=width * config.whole("n_shared_experts", "num_shared_experts", default=0),
    )
    experts = Experts(
        count=many,
        top_k=config.whole("num_experts_per_tok", "experts_per_token", "moe_top_k", "moe_topk", default=1),
        hidden=width,
        shared_hidden=shared,
    )
    dense = min(config.whole("first_k_dense_replace", default=0), count)
    layers = [Layer(count=count - dense, attention=attention, feed_forward=experts)]
    if dense:
        layers.insert(0, Layer(count=dense, attention=attention, feed_forward=gated(config)))
    return llama_like(config, name, joined(layers))


MORE: Mapping[str, Callable[[Config, str], Architecture]] = {
    "nemotron": _nemotron,
    "qwen3_next": _qwen3_next,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "falcon": _falcon,
    "phi": _phi,
    "phi3": lambda config, name: decoder(config, name, llama_attention(config), gated(config)),
    "starcoder2": _starcoder2,
    "olmo": _olmo,
}
