"""`Op`: one operation of a model with named dims, so that a strategy can say which of them are split over which devices.

A tensor's shape is a sum of products of dims: ``(("batch", "sequence", "hidden"),)`` is a matrix of activations, the columns of a
fused query-key-value projection are ``(("heads", "head_dim"), ("kv_heads", "head_dim"), ("kv_heads", "head_dim"))``. What an op
costs follows from the local sizes of its dims alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

Shape = tuple[tuple[str, ...], ...]
"""A sum of products of dims; the empty shape has no elements."""
RANK = "rank"  # the narrow dim of an adapter (LoRA)


class OpType(StrEnum):
    """How an op computes, which decides what it costs."""

    MATMUL = "matmul"  # on matrix units: rows x reduction x columns, a weight or (batched) two activations
    ATTENTION = "attention"  # fused: scores are never stored
    CONVOLUTION = "convolution"
    POINTWISE = "pointwise"  # bound by memory: norms, activations, residuals, dropout, rotations
    GATHER = "gather"  # rows of a table
    DISPATCH = "dispatch"  # sends tokens to the experts that they visit
    COMBINE = "combine"  # adds what returns from the experts
    LOSS = "loss"  # softmax and cross-entropy over the vocabulary


class OpRole(StrEnum):
    """The work of a memory-bound op. Frameworks differ in the kernels that they compute it with."""

    NORM = "norm"
    INSTANCE_NORM = "instance norm"  # of each image alone, or of volumes: no batch norm of images
    ROTATION = "rotation"  # of queries and keys, by position
    ACTIVATION = "activation"
    GATED_ACTIVATION = "gated activation"  # the activation of one half, times the other (SwiGLU)
    RESIDUAL = "residual"  # the sum of a branch and the stream that it left
    EXPERT_BIAS = "expert bias"  # the sum of what experts give and each one's bias, times the weight of the token
    ADAPTER = "adapter"  # what an adapter gives, times its alpha over its rank, added to what the matrix beside it gives
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operation of one micro-batch.

    The backward pass of a matmul is two: for the gradients of the input and of the weight. That of a fused attention has 2.5 times
    the FLOPs: five products instead of two (Dao 2023, section 3.2). All others read and write about what they do forward.
    """

    name: str
    type: OpType
    role: OpRole = OpRole.OTHER  # The role of a memory-bound op.
    inputs: tuple[str, ...] = ()  # Tensors that it reads, by the name of the op that makes them ("" is the block's input).
    output: Shape  # What it writes; also what the next op reads.
    reads: Shape = ()  # What it reads beside weights.
    rows: Shape = ()  # Of a matmul: the product of rows, reduction and columns is its multiply-adds; the output has rows x columns.
    reduction: Shape = ()
    columns: Shape = ()
    weight: Shape = ()  # Its parameters.
    # Of its multiply-adds, how many are left in Winograd's algorithm, which units without matrices of fixed size can use.
    winograd_share: float = 1.0
    # Whether neither its parameters nor what comes before it is trained, as the first stages of a detector: no backward pass.
    frozen: bool = False
    fixed: bool = False  # Whether its parameters are not trained, though gradients pass through it (LoRA).
    sparse: bool = False  # Whether gradients are of the rows only that were read, which the optimizer updates in place.
    # Tensors that the backward pass needs, by the name of the op that makes them ("" is the block's input). Each is kept once.
    saves: tuple[str, ...] = ()
    saves_bytes: Shape = ()  # What else it needs, one byte an element: masks of dropout.
    flops: Shape = ()  # Of an op that is no matmul, a forward pass.
    flops_factor: float = 1.0  # Per element of `flops`.
    # Dims whose split leaves partial sums in the output, beside the reduction of a matmul.
    summed: tuple[str, ...] = ()
    # Of a memory-bound op that was captured: bytes read and written forward and backward, and kernels started; None: by its role.
    moved_bytes: tuple[Shape, Shape] | None = None
    kernels: tuple[int, int] = (1, 1)

    @property
    def dims(self) -> frozenset[str]:
        """All dims of the op."""
        shapes = (
            self.output,
            self.reads,
            self.rows,
            self.reduction,
            self.columns,
            self.weight,
            self.flops,
            *(self.moved_bytes or ()),
        )
        return frozenset(dim for shape in shapes for term in shape for dim in term)

    @property
    def partial_dims(self) -> frozenset[str]:
        """Dims whose split leaves partial sums in the output."""
        return frozenset(self.summed) | dims_of(self.reduction)

    @property
    def partial_gradient_dims(self) -> frozenset[str]:
        """Dims whose split leaves partial sums in the gradients of the inputs: the columns of a matmul."""
        return dims_of(self.columns) - dims_of(self.rows)

    def forward_flops(self, sizes: Mapping[str, float]) -> float:
        """FLOPs of the forward pass; a multiply-add counts twice."""
        if self.rows:
            return 2.0 * elements(self.rows, sizes) * elements(self.reduction, sizes) * elements(self.columns, sizes)
        return self.flops_factor * elements(self.flops, sizes)


def elements(shape: Shape, sizes: Mapping[str, float]) -> float:
    """Elements of a tensor whose dims have the given sizes."""
    return sum(math.prod(sizes[dim] for dim in term) for term in shape)


def dims_of(shape: Shape) -> frozenset[str]:
    """The dims of a shape."""
    return frozenset(dim for term in shape for dim in term)
