"""`Ops`: n library ops as columns, each with what it computes, what it moves and how often it is launched.

One op is one leaf: a product of matrices (which may be absent), bytes streamed beside it, and kernels. Functions make the ops of a
kind; each takes numbers or arrays, which broadcast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.cluster.device import PRECISIONS
from dpro_search.errors import InputError

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Numbers = float | npt.ArrayLike

ELEMENT_BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.5, "int8": 1.0}
LEAST_OUTPUT_BYTES = 2.0
"""Size of an element that products of 8 and 4 bits write: engines keep activations in 16 bits between products."""

_BYTES = np.array([ELEMENT_BYTES[precision] for precision in PRECISIONS])

LATENT = 2.0
"""Number of latent attention where other attention has whether it is causal."""


class LibraryOpKind(StrEnum):
    """Kind of computation of an op."""

    GEMM = "gemm"  # one product, or a batch of them
    CONVOLUTION = "convolution"
    ATTENTION = "attention"  # fused: scores are never stored
    SOFTMAX = "softmax"
    NORM = "norm"
    ELEMENTWISE = "elementwise"  # also dropout and sums with a residual
    EMBEDDING = "embedding"
    LOSS = "loss"  # with the product that makes the logits
    OPTIMIZER = "optimizer"
    EXPERTS = "experts"  # products of a mixture of experts: a group of rows for each expert


class Stack(StrEnum):
    """Software that runs the op, which decides what is launched beside it and which library computes it."""

    PYTORCH = "pytorch"  # one op at a time, CUDA events around it
    MEGATRON = "megatron"  # one module at a time, host synchronised
    LIBRARY = "library"  # the library's own benchmark
    SERVING = "serving"  # an inference engine's op, in a CUDA graph


KINDS = tuple(LibraryOpKind)
STACKS = tuple(Stack)


@dataclass(frozen=True, kw_only=True)
class Ops:
    """n ops.

    Attributes
    ----------
    kind, precision, stack : arrays [n]
        Places in `KINDS`, `PRECISIONS` and `STACKS`.
    backward : array [n]
        1 of a backward pass, else 0.
    batch, m, n, k : arrays [n]
        Of products, `batch` times m x k by k x n; of a convolution those of its implicit product. Of other ops rows (m) and their
        length (n); k is 1.
    products : array [n]
        Products of that size, one after the other: 2 for both gradients of a batched product.
    flops : array [n]
        Of all products; a multiply-add counts twice.
    matrix_bytes, stream_bytes : arrays [n]
        Read and written by the products, and by everything else.
    kernels : array [n]
        Least number of kernels.
    special : array [n]
        Transcendental functions or divisions for each element streamed. Of a product 1: its operands have a scale for each block of
        elements; of attention query heads for each head of keys.
    window : array [n]
        Length of a convolution's filter along one side; 0 of other ops. Negative: with stride.
    transposes : array [n]
        Of a product: 0 neither operand, 1 the right one, 2 the left one, 3 both. Of attention: 1 causal, `LATENT`.
    """

    kind: Floats
    precision: Floats
    stack: Floats
    backward: Floats
    batch: Floats
    m: Floats
    n: Floats
    k: Floats
    products: Floats
    flops: Floats
    matrix_bytes: Floats
    stream_bytes: Floats
    kernels: Floats
    special: Floats
    window: Floats
    transposes: Floats

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, chosen: npt.NDArray[Any] | slice) -> Ops:
        return Ops(**{field.name: getattr(self, field.name)[chosen] for field in dataclasses.fields(self)})

    @property
    def moved_bytes(self) -> Floats:
        """Bytes that are read and written in all, [n]."""
        return self.matrix_bytes + self.stream_bytes

    @property
    def distinction(self) -> Floats:
        """Number that sets apart ops of a kind that other kernels compute, [n]; negative of decoding steps and latent attention."""
        return np.where(self._of_engines, -1.0 - (self.special > 1), self.special)

    @property
    def of_training(self) -> npt.NDArray[np.bool_]:
        """Whether training runs such ops, [n]: 16 bits and wider, no experts, no decoding steps, no latent attention."""
        wide = _BYTES[self.precision.astype(int)] >= LEAST_OUTPUT_BYTES
        return np.asarray(wide & (self.kind != KINDS.index(LibraryOpKind.EXPERTS)) & ~self._of_engines)

    @property
    def _of_engines(self) -> npt.NDArray[np.bool_]:
        decoding = (self.m == 1) & (self.n > 1)
        return np.asarray((self.kind == KINDS.index(LibraryOpKind.ATTENTION)) & (decoding | (self.transposes == LATENT)))

    @property
    def matrix(self) -> Floats:
        """The columns side by side, [n, columns]."""
        return np.stack([getattr(self, field.name) for field in dataclasses.fields(self)], axis=1)


def joined(parts: Sequence[Ops]) -> Ops:
    """Ops one after the other."""
    return Ops(**{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in dataclasses.fields(Ops)})


def gemm(
    m: Numbers,
    n: Numbers,
    k: Numbers,
    *,
    precision: str,
    batch: Numbers = 1.0,
    stack: Stack = Stack.PYTORCH,
    backward: bool = False,
    products: float = 1.0,
    transposes: Numbers = 0.0,
    stream_bytes: Numbers = 0.0,
    kernels: Numbers = 1.0,
    kind: LibraryOpKind = LibraryOpKind.GEMM,
    block_scaled: bool = False,
) -> Ops:
    """Products of m x k with k x n matrices; `stream_bytes` of a bias, say, or of a loss, which is its `kind` then.

    `block_scaled`: operands of 8 or 4 bits have a scale for each block of elements (128 x 128, 1 x 128, 16, 32).
    """
    m, n, k, batch = _columns(m, n, k, batch)
    element = _element_bytes(precision)
    return _ops(
        kind,
        precision,
        stack,
        backward=backward,
        batch=batch,
        m=m,
        n=n,
        k=k,
        products=products,
        flops=2 * products * batch * m * n * k,
        matrix_bytes=products * batch * (element * (m * k + k * n) + max(element, LEAST_OUTPUT_BYTES) * m * n),
        special=float(block_scaled),
        transposes=transposes,
        stream_bytes=stream_bytes,
        kernels=kernels,
    )


def convolution(
    images: Numbers,
    inputs: Numbers,
    outputs: Numbers,
    side: Numbers,
    window: Numbers,
    *,
    stride: Numbers = 1.0,
    padding: Numbers = 0.0,
    precision: str,
    stack: Stack = Stack.PYTORCH,
    backward: bool = False,
    products: float = 1.0,
) -> Ops:
    """Square convolutions of `images` images with `inputs` channels and `side` pixels along a side."""
    images, inputs, outputs, side, window, stride, padding = _columns(images, inputs, outputs, side, window, stride, padding)
    made = np.floor((side + 2 * padding - window) / stride) + 1
    if (made < 1).any():
        raise InputError("a convolution's filter is larger than its image; check its side, window and padding")
    m, n, k = images * made**2, outputs, inputs * window**2
    moved = images * inputs * side**2 + k * n + m * n
    return _ops(
        LibraryOpKind.CONVOLUTION,
        precision,
        stack,
        backward=backward,
        m=m,
        n=n,
        k=k,
        products=products,
        flops=2 * products * m * n * k,
        matrix_bytes=products * _element_bytes(precision) * moved,
        window=np.where(stride > 1, -window, window),
    )


def attention(
    batch: Numbers,
    heads: Numbers,
    kv_heads: Numbers,
    queries: Numbers,
    keys: Numbers,
    head_dim: Numbers,
    *,
    causal: bool,
    precision: str,
    stack: Stack = Stack.PYTORCH,
    backward: bool = False,
) -> Ops:
    """Fused attention. Backward: five products instead of two (Dao 2023, section 3.2). Causal: about half of the products.

    With one query for each head it is the attention of a decoding step: memory bounds it, for keys and values are read once for all
    query heads that share them (grouped-query attention, Ainslie et al. 2023).
    """
    batch, heads, kv_heads, queries, keys, head_dim = _columns(batch, heads, kv_heads, queries, keys, head_dim)
    pairs = queries * (keys - queries / 2) if causal else queries * keys
    products = 5.0 if backward else 2.0
    moved = batch * head_dim * (2 * heads * queries + 2 * kv_heads * keys) * (2.5 if backward else 1.0)
    return _ops(
        LibraryOpKind.ATTENTION,
        precision,
        stack,
        backward=backward,
        batch=batch * heads,
        m=queries,
        n=keys,
        k=head_dim,
        products=products,
        flops=2 * products * batch * heads * pairs * head_dim,
        matrix_bytes=_element_bytes(precision) * moved,
        special=heads / kv_heads,
        transposes=1.0 if causal else 0.0,
    )


def latent_attention(
    batch: Numbers,
    heads: Numbers,
    queries: Numbers,
    keys: Numbers,
    *,
    latent: Numbers = 512.0,
    rotary: Numbers = 64.0,
    head_dim: Numbers = 128.0,
    precision: str,
    stack: Stack = Stack.SERVING,
) -> Ops:
    """Multi-head latent attention (DeepSeek-V2 2024, section 2.1), causal.

    Several queries: each head has keys of `head_dim` + `rotary` and values of `head_dim`. One query, a decoding step: all heads
    share one latent vector of `latent` + `rotary` for each key, whose first part is the value, too (weights are absorbed).
    """
    batch, heads, queries, keys, latent, rotary, head_dim = _columns(batch, heads, queries, keys, latent, rotary, head_dim)
    decoding = queries == 1
    key_dim = np.where(decoding, latent, head_dim) + rotary
    value_dim = np.where(decoding, latent, head_dim)
    pairs = queries * (keys - queries / 2)
    stored = keys * np.where(decoding, key_dim, heads * (key_dim + value_dim))
    return _ops(
        LibraryOpKind.ATTENTION,
        precision,
        stack,
        backward=False,
        batch=batch * heads,
        m=queries,
        n=keys,
        k=key_dim,
        products=2.0,
        flops=2 * batch * heads * pairs * (key_dim + value_dim),
        matrix_bytes=_element_bytes(precision) * batch * (heads * queries * (key_dim + value_dim) + stored),
        special=np.where(decoding, heads, 1.0),
        transposes=LATENT,
    )


def experts(
    tokens: Numbers,
    hidden: Numbers,
    inner: Numbers,
    experts: Numbers,
    top_k: Numbers,
    *,
    all_experts: Numbers = 0.0,
    precision: str,
    stack: Stack = Stack.SERVING,
    gated: bool = True,
    block_scaled: bool = False,
) -> Ops:
    """Feed-forward products of a mixture of experts on one device, without the router: two grouped products.

    They count as one product and one kernel, for some engines fuse all of it.

    Parameters
    ----------
    tokens, top_k
        Tokens, each of which goes to `top_k` of `all_experts` (0: of `experts`), all experts alike.
    hidden, inner
        Sizes of a token and of an expert's inner layer, as far as they are on this device.
    experts
        Experts on this device.
    gated
        The first product makes two inner layers, one of which gates the other (SwiGLU).
    """
    tokens, hidden, inner, experts, top_k, all_experts = _columns(tokens, hidden, inner, experts, top_k, all_experts)
    everywhere = np.where(all_experts > 0, all_experts, experts)
    rows = np.maximum(tokens * top_k * experts / everywhere, 1.0)
    # Experts that at least one token goes to: weights of the others are not read.
    used = np.minimum(np.maximum(experts * (1 - (1 - np.minimum(top_k / everywhere, 1.0)) ** tokens), 1.0), rows)
    element, output = _element_bytes(precision), max(_element_bytes(precision), LEAST_OUTPUT_BYTES)
    matrices = 3.0 if gated else 2.0
    activations = rows * ((element + output) * hidden + (matrices * output + element) * inner)
    return _ops(
        LibraryOpKind.EXPERTS,
        precision,
        stack,
        backward=False,
        batch=used,
        m=np.maximum(rows / used, 1.0),
        n=inner,
        k=hidden,
        flops=2 * matrices * rows * hidden * inner,
        matrix_bytes=element * used * matrices * hidden * inner + activations,
        special=float(block_scaled),
    )


def streamed(
    kind: LibraryOpKind,
    rows: Numbers,
    length: Numbers,
    *,
    moved: Numbers,
    precision: str,
    stack: Stack = Stack.PYTORCH,
    backward: bool = False,
    kernels: Numbers = 1.0,
    special: Numbers = 0.0,
) -> Ops:
    """Ops bound by memory that move `moved` bytes: softmax, norms, activations, embeddings, optimizers."""
    return _ops(kind, precision, stack, backward=backward, m=rows, n=length, stream_bytes=moved, kernels=kernels, special=special)


def _element_bytes(precision: str) -> float:
    if precision not in ELEMENT_BYTES:
        raise InputError(f"precision '{precision}': use {', '.join(PRECISIONS)}")
    return ELEMENT_BYTES[precision]


def _columns(*values: Numbers) -> tuple[Floats, ...]:
    return tuple(np.atleast_1d(np.asarray(value, dtype=np.float64)) for value in np.broadcast_arrays(*values))


_ONES = ("batch", "m", "n", "k", "products", "kernels")


def _ops(kind: LibraryOpKind, precision: str, stack: Stack, *, backward: bool, **given: Any) -> Ops:
    _element_bytes(precision)
    codes = {
        "kind": KINDS.index(kind),
        "precision": PRECISIONS.index(precision),
        "stack": STACKS.index(stack),
        "backward": float(backward),
    }
    names = [field.name for field in dataclasses.fields(Ops)]
    values = {**{name: 1.0 if name in _ONES else 0.0 for name in names}, **codes, **given}
    ops = Ops(**dict(zip(names, _columns(*(values[name] for name in names)), strict=True)))
    wrong = ~np.isfinite(ops.matrix).all(axis=1) | (np.stack([getattr(ops, name) for name in _ONES]) <= 0).any(axis=0)
    if wrong.any():
        place = int(np.flatnonzero(wrong)[0])
        sizes = ", ".join(f"{name} {getattr(ops, name)[place]:g}" for name in _ONES)
        raise InputError(f"op {place} ({kind}): sizes must be above 0 and finite, not {sizes}")
    return ops
