"""`OpSpec`: a library op in one line of text, as device files, tables and the program that times ops on a device have it.

OpSpec.parse("gemm bf16 m=4096 n=4096 k=1024").ops(Stack.SERVING)
OpSpec.parse("layer_norm fp32 backward rows=8192 length=1024")
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dpro_search.costmodel.devices.ops import (
    ELEMENT_BYTES,
    LibraryOpKind,
    Ops,
    Stack,
    attention,
    convolution,
    experts,
    gemm,
    joined,
    latent_attention,
    streamed,
)
from dpro_search.errors import InputError


class Streamed(NamedTuple):
    """Traffic of a memory-bound op: tensors of its output's size that each pass reads and writes (0: the pass is no op)."""

    kind: LibraryOpKind
    tensors: float
    special: float  # Transcendental functions or divisions for each element.
    backward_tensors: float = 0.0
    backward_kernels: int = 1
    timed: bool = True  # Whether the package's own program can time it; kernels of inference engines come with tables only.


STREAMED: Mapping[str, Streamed] = {
    "add": Streamed(LibraryOpKind.ELEMENTWISE, 3, 0),
    "add_scalar": Streamed(LibraryOpKind.ELEMENTWISE, 2, 0),
    "mul": Streamed(LibraryOpKind.ELEMENTWISE, 3, 0),
    "mul_scalar": Streamed(LibraryOpKind.ELEMENTWISE, 2, 0),
    "div": Streamed(LibraryOpKind.ELEMENTWISE, 3, 1),
    "div_scalar": Streamed(LibraryOpKind.ELEMENTWISE, 2, 1),
    "pow": Streamed(LibraryOpKind.ELEMENTWISE, 3, 2),
    "pow_scalar": Streamed(LibraryOpKind.ELEMENTWISE, 2, 2),
    "copy": Streamed(LibraryOpKind.ELEMENTWISE, 2, 0),
    "relu": Streamed(LibraryOpKind.ELEMENTWISE, 2, 0, 3),
    "tanh": Streamed(LibraryOpKind.ELEMENTWISE, 2, 1, 3),
    "gelu": Streamed(LibraryOpKind.ELEMENTWISE, 2, 1, 3),
    "softmax": Streamed(LibraryOpKind.SOFTMAX, 2, 1, 3),
    "layer_norm": Streamed(LibraryOpKind.NORM, 2, 0, 4, 2),
    "embedding": Streamed(LibraryOpKind.EMBEDDING, 2, 0, 2),
    "rms_norm": Streamed(LibraryOpKind.NORM, 2, 0, timed=False),
    "add_rms_norm": Streamed(LibraryOpKind.NORM, 4, 0, timed=False),  # the sum with a residual is written, too
    "silu_mul": Streamed(LibraryOpKind.ELEMENTWISE, 3, 1, timed=False),
    "rope": Streamed(LibraryOpKind.ELEMENTWISE, 2, 2, timed=False),
    "quantize": Streamed(LibraryOpKind.ELEMENTWISE, 3, 0, timed=False),  # from 16 to 8 bits: fp8 or int8
}

# Sizes of an op by name: those that must be given, and those that have a value if they are not.
SIZES: Mapping[str, tuple[tuple[str, ...], Mapping[str, int]]] = {
    "gemm": (("m", "n", "k"), {"batch": 1, "transposes": 0, "block_scaled": 0}),
    "convolution": (("images", "inputs", "outputs", "side", "window"), {"stride": 1, "padding": 0}),
    "attention": (("batch", "heads", "queries", "head_dim"), {"kv_heads": 0, "keys": 0, "causal": 1}),
    "latent_attention": (("batch", "heads", "queries"), {"keys": 0, "latent": 512, "rotary": 64, "head_dim": 128}),
    "experts": (("tokens", "hidden", "inner", "experts", "top_k"), {"all_experts": 0, "gated": 1, "block_scaled": 0}),
    **{name: (("rows", "length"), {}) for name in STREAMED},
}
_MOST = 2**40  # of a size: products of three stay finite
_WORD = re.compile(r"([a-z_]+)=(\d{1,13})")


@dataclass(frozen=True, kw_only=True, order=True)
class OpSpec:
    """An op by its name, precision, pass and sizes.

    Attributes
    ----------
    name
        One of `SIZES`.
    sizes
        Pairs, in the order of `SIZES`, without those that have their usual value. Of a backward pass those of the forward pass.

    Raises
    ------
    InputError
        There is no such op or size, one is missing, or the op has no backward pass.
    """

    name: str
    precision: str
    backward: bool = False
    sizes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.name not in SIZES:
            raise InputError(f"no op is called '{self.name}'; known are {', '.join(SIZES)}")
        if self.precision not in ELEMENT_BYTES:
            raise InputError(f"precision '{self.precision}': use {', '.join(ELEMENT_BYTES)}")
        needed, usual = SIZES[self.name]
        given = dict(self.sizes)
        if missing := [key for key in needed if key not in given]:
            raise InputError(f"{self.name}: {', '.join(missing)} missing")
        for key, value in given.items():
            if key not in needed and key not in usual:
                raise InputError(f"{self.name} has no size '{key}'; it has {', '.join((*needed, *usual))}")
            if not (1 if key in needed else 0) <= value <= _MOST:
                raise InputError(f"{self.name}: {key}={value} is impossible")
        no_backward = ("latent_attention", "experts", *(name for name, op in STREAMED.items() if not op.backward_tensors))
        if self.backward and self.name in no_backward:
            raise InputError(f"{self.name} has no backward pass of its own")
        kept = tuple((key, given[key]) for key in (*needed, *usual) if key in given and given[key] != usual.get(key))
        object.__setattr__(self, "sizes", kept)

    @staticmethod
    def of(name: str, precision: str, *, backward: bool = False, **sizes: int) -> OpSpec:
        """An op of keywords."""
        return OpSpec(name=name, precision=precision, backward=backward, sizes=tuple(sizes.items()))

    @staticmethod
    def parse(text: str) -> OpSpec:
        """The op of a line of text."""
        name, *rest = text.split()[:16] or [""]
        precision, *rest = rest or [""]
        backward = rest[:1] == ["backward"]
        pairs = [_WORD.fullmatch(word) for word in rest[backward:]]
        if not all(pairs):
            raise InputError(f"'{text[:80]}' is no op; write it like 'gemm bf16 m=4096 n=4096 k=1024'")
        return OpSpec(
            name=name, precision=precision, backward=backward, sizes=tuple((pair[1], int(pair[2])) for pair in pairs if pair)
        )

    def __str__(self) -> str:
        words = [
            self.name,
            self.precision,
            *(["backward"] if self.backward else []),
            *(f"{key}={value}" for key, value in self.sizes),
        ]
        return " ".join(words)

    def size(self, key: str) -> int:
        """A size, or its usual value."""
        return dict(self.sizes).get(key, SIZES[self.name][1].get(key, 0))

    @property
    def all_sizes(self) -> dict[str, int]:
        """All sizes, those with their usual values too."""
        needed, usual = SIZES[self.name]
        sizes = {key: self.size(key) for key in (*needed, *usual)}
        if self.name == "attention":
            sizes["kv_heads"] = sizes["kv_heads"] or sizes["heads"]
        if self.name in ("attention", "latent_attention"):
            sizes["keys"] = sizes["keys"] or sizes["queries"]
        return sizes

    def ops(self, stack: Stack) -> Ops:
        """Work and bytes of the op, as an array of one [1]."""
        size, common = self.all_sizes, {"precision": self.precision, "stack": stack, "backward": self.backward}
        element = ELEMENT_BYTES[self.precision]
        if self.name == "gemm":
            m, n, k, batch = (float(size[key]) for key in ("m", "n", "k", "batch"))
            if self.backward:  # the gradients of both operands
                return gemm(m, k, n, batch=batch, products=2, kernels=2, **common)  # type: ignore[arg-type]
            return gemm(
                m, n, k, batch=batch, transposes=float(size["transposes"]), block_scaled=bool(size["block_scaled"]), **common  # type: ignore[arg-type]
            )  # fmt: skip
        if self.name == "convolution":
            shape = (float(size[key]) for key in ("images", "inputs", "outputs", "side", "window"))
            products = 2.0 if self.backward else 1.0
            return convolution(*shape, stride=size["stride"], padding=size["padding"], products=products, **common)  # type: ignore[arg-type]
        if self.name == "attention":
            shape = (float(size[key]) for key in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim"))
            return attention(*shape, causal=bool(size["causal"]), **common)  # type: ignore[arg-type]
        if self.name == "latent_attention":
            return latent_attention(**size, precision=self.precision, stack=stack)
        if self.name == "experts":
            flags = {key: bool(size.pop(key)) for key in ("gated", "block_scaled")}
            return experts(**size, **flags, precision=self.precision, stack=stack)  # type: ignore[arg-type]
        op = STREAMED[self.name]
        rows, length = float(size["rows"]), float(size["length"])
        tensors = op.backward_tensors if self.backward else op.tensors
        kernels = op.backward_kernels if self.backward else 1
        return streamed(
            op.kind, rows, length, moved=tensors * element * rows * length, special=op.special, kernels=kernels, **common  # type: ignore[arg-type]
        )  # fmt: skip

    @property
    def held_bytes(self) -> float:
        """Approximate size of its tensors: memory that a device needs to run it."""
        ops = self.ops(Stack.PYTORCH)
        return float(ops.matrix_bytes[0] + ops.stream_bytes[0])


def ops_of(specs: Sequence[OpSpec], stack: Stack) -> Ops:
    """Arrays of n ops, at least one."""
    return joined([spec.ops(stack) for spec in specs])
