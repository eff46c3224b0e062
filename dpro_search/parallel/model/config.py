"""`Config`: a Hugging Face ``config.json``, and what families of models share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpro_search.errors import InputError
from dpro_search.parallel.model.architecture import Architecture, Attention, Experts, FeedForward, Layer

MOST_OF_A_SIZE = 2**31  # of a width, a vocabulary, a number of positions: no tensor of a model has a longer dimension


@dataclass(frozen=True)
class Config:
    """A ``config.json``, with errors that name it and the key.

    Attributes
    ----------
    defaults
        Sizes that the library takes where the file leaves them out.
    assumed
        Those of `defaults` that were read.
    """

    values: Mapping[str, Any]
    where: str
    defaults: Mapping[str, int] = field(default_factory=dict)
    assumed: dict[str, int] = field(default_factory=dict, compare=False)

    def whole(self, *names: str, default: int | None = None) -> int:
        """The first of some keys that is there, a whole number, else the library's default, else `default`.

        Raises
        ------
        InputError
            The key is missing and has no default, or its value is impossible.
        """
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(f"{self.where}: {name} must be a whole number, not {value!r}")
            if value > MOST_OF_A_SIZE:
                raise InputError(f"{self.where}: {name} must be at most {MOST_OF_A_SIZE}, not {value}")
            return value
        known = next((name for name in names if name in self.defaults), None)
        if known is not None:
            self.assumed[known] = self.defaults[known]
            return self.defaults[known]
        if default is None:
            raise InputError(f"{self.where}: {' or '.join(names)} is missing")
        return default

    def yes(self, name: str, *, default: bool) -> bool:
        """A key that is true or false."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise InputError(f"{self.where}: {name} must be true or false, not {value!r}")
        return default if value is None else value

    def share(self, name: str, *, default: float) -> float:
        """A number from 0 to 1."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise InputError(f"{self.where}: {name} must be a number from 0 to 1, not {value!r}")
        return float(value)

    def word(self, name: str, *, default: str) -> str:
        """A key that is a string."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{self.where}: {name} must be a string, not {value!r}")
        return default if value is None else value


def head_dim(config: Config, heads: int) -> int:
    """The size of an attention head; raises `InputError` where the hidden size does not divide by the heads."""
    hidden = config.whole("hidden_size", "n_embd", "n_embed", "d_model")
    given = config.whole("head_dim", default=0)
    if not heads:
        raise InputError(f"{config.where}: the number of attention heads must be at least 1, not 0")
    if not given and hidden % heads:
        raise InputError(f"{config.where}: hidden_size {hidden} does not divide by {heads} heads")
    return given or hidden // heads


def llama_attention(config: Config, **more: Any) -> Attention:
    heads = config.whole("num_attention_heads")
    kv_heads = config.whole("num_key_value_heads", default=heads)
    return Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim(config, heads), **more)


def llama_like(config: Config, name: str, layers: Sequence[Layer], **more: Any) -> Architecture:
    return Architecture(
        name=name,
        hidden=config.whole("hidden_size"),
        vocab=config.whole("vocab_size"),
        layers=joined(layers),
        **{"tied": config.yes("tie_word_embeddings", default=False), **more},
    )


def decoder(config: Config, name: str, attention: Attention, feed_forward: FeedForward | Experts, **more: Any) -> Architecture:
    """A decoder whose layers are all alike."""
    layer = Layer(count=config.whole("num_hidden_layers"), attention=attention, feed_forward=feed_forward)
    return llama_like(config, name, [layer], **more)


def latent_attention(config: Config, kv_rank: int) -> Attention:
    """DeepSeek's multi-head latent attention."""
    heads, rotary = config.whole("num_attention_heads"), config.whole("qk_rope_head_dim")
    return Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=config.whole("qk_nope_head_dim") + rotary,
        value_dim=config.whole("v_head_dim"),
        query_rank=config.whole("q_lora_rank", default=0) or None,
        kv_rank=kv_rank,
        rotary_dim=rotary,
    )


def qwen_experts(config: Config, shared: int) -> Experts:
    """Qwen's experts, beside a shared one of a width (0: none) with its gate."""
    return Experts(
        count=config.whole("num_experts"),
        top_k=config.whole("num_experts_per_tok"),
        hidden=config.whole("moe_intermediate_size"),
        shared_hidden=shared,
        shared_gate=bool(shared),
    )


def joined(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Layers without those that repeat nothing."""
    return tuple(layer for layer in layers if layer.count)


def gated(config: Config, *names: str, bias: bool = False) -> FeedForward:
    return FeedForward(hidden=config.whole(*(names or ("intermediate_size",))), gated=True, bias=bias)
