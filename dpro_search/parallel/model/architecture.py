"""`Architecture`: the numbers of a transformer that a published configuration gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from dpro_search.errors import InputError


class Positions(StrEnum):
    """How a model knows the order of tokens."""

    LEARNED = "learned"  # a table, as in GPT-2 and BERT
    ROTARY = "rotary"
    ALIBI = "alibi"
    RELATIVE = "relative"  # T5's buckets


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Query heads, each of `head_dim`, that share `kv_heads` heads of keys and values."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None  # Of a head's values and outputs; None: `head_dim`.
    bias: bool = False  # Of the projection of queries, keys and values.
    output_bias: bool | None = None  # None: as `bias`.
    causal: bool = True
    window: int | None = None  # Tokens that a query sees; None: all before it (causal) or all.
    qk_norm: bool = False
    # Low-rank queries and keys-and-values (multi-head latent attention of DeepSeek-V2, arXiv 2405.04434); `rotary_dim` of each
    # head's `head_dim` is rotated and comes from one shared key. None: plain projections.
    query_rank: int | None = None
    kv_rank: int | None = None
    rotary_dim: int = 0
    sinks: bool = False  # A learned logit a head (GPT-OSS).

    def __post_init__(self) -> None:
        _positive(self, "heads", "kv_heads", "head_dim")
        if self.heads % self.kv_heads:
            raise InputError(f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}")

    @property
    def latent(self) -> bool:
        """Whether keys and values come from a latent vector."""
        return self.kv_rank is not None


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """Two matrices, or three where `gated`."""

    hidden: int
    gated: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        _positive(self, "hidden")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Feed-forward networks of which each token visits `top_k`, beside `shared_hidden` wide ones that every token visits."""

    count: int
    top_k: int
    hidden: int  # Of one expert.
    gated: bool = True
    bias: bool = False
    shared_hidden: int = 0
    shared_gate: bool = False  # A gate of one column for the shared experts (Qwen2-MoE).
    router_bias: bool = False

    def __post_init__(self) -> None:
        _positive(self, "count", "top_k", "hidden")
        if self.count > MOST_EXPERTS:
            raise InputError(f"a layer has at most {MOST_EXPERTS} experts, not {self.count}")
        if self.top_k > self.count:
            raise InputError(f"top_k = {self.top_k} must be at most the number of experts, {self.count}")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One kind of layer and how many of it follow each other."""

    count: int
    attention: Attention
    feed_forward: FeedForward | Experts
    norms: int = 2  # Sandwich norms (Gemma 2) have 4.
    cross_attention: Attention | None = None  # Of a decoder that reads an encoder.


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank matrices that are trained in place of a model's weights (Hu et al. 2021, "LoRA"); see `model.adapters`."""

    rank: int = 0  # 0: not known, so that neither parameters nor products of the adapters count.
    targets: tuple[str, ...] = ()  # Names of matrices, as in `TARGETS`.
    # Bytes of an element of the layers' weights, which nothing updates, where these are quantized; 0: as of other weights.
    frozen_bytes: float = 0.0


MOST_LAYERS = 10_000  # each is a block that stages are cut from
MOST_EXPERTS = 8192  # of a layer: four times those of Switch-C (arXiv 2101.03961), the most of any published model


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A transformer: embedding, layers, a head over the vocabulary.

    Raises
    ------
    InputError
        A number is impossible.
    """

    name: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    positions: Positions = Positions.ROTARY
    max_positions: int = 0  # Rows of the table of learned positions; buckets of relative ones.
    token_types: int = 0  # Rows of BERT's table of segments.
    tied: bool = False  # The head uses the embedding's matrix.
    norm_bias: bool = False  # Layer norm; RMS norm has none.
    norm_weight: bool = True  # OLMo's norms have no parameters.
    embedding_norm: bool = False  # A norm behind the embedding (BERT, BLOOM).
    final_norm: bool = True
    parallel_residual: bool = False  # Attention and feed-forward read the same norm (Falcon, GPT-J).
    pooler: bool = False  # BERT's, with its prediction of the next sentence.
    head_transform: bool = False  # BERT's dense layer with a norm in front of the head.
    head_bias: bool = False
    dropout: float = 0.0
    target_share: float = 1.0  # Tokens of a decoder that reads an encoder, as a share of the encoder's.
    classes: int = 0  # Of an image classifier in place of a head over the vocabulary (ViT).
    patch_inputs: int = 0  # Numbers in an image patch, which a linear layer embeds (ViT); 0: tokens.
    adapters: Adapters | None = None  # What alone is trained; None: all weights are.
    assumed: tuple[str, ...] = field(default=(), compare=False)  # Sentences on sizes that its configuration leaves out.

    def __post_init__(self) -> None:
        _positive(self, "hidden")
        if not self.layers:
            raise InputError(f"{self.name}: a model needs layers")
        if self.layer_count > MOST_LAYERS:
            raise InputError(f"{self.name}: a model has at most {MOST_LAYERS} layers, not {self.layer_count}")
        if self.vocab < 0 or (not self.vocab and not self.patch_inputs):
            raise InputError(f"{self.name}: vocab must be above 0, not {self.vocab}")

    @property
    def layer_count(self) -> int:
        """Layers of all kinds."""
        return sum(layer.count for layer in self.layers)


def _positive(value: object, *names: str) -> None:
    for name in names:
        if not getattr(value, name) > 0:
            raise InputError(f"{name} must be above 0, not {getattr(value, name)}")
