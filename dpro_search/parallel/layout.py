"""`TensorLayout`: which dims of an op are split over which axes of a mesh, and how one layout of a tensor becomes another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dpro_search.collect.trace import CollectiveKind
from dpro_search.parallel.model import TENSOR_DIM, Op, Shape
from dpro_search.parallel.strategy import Strategy

Splits = tuple[tuple[str, str], ...]
"""Pairs (axis, dim), sorted: the dim is split over the axis."""


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """Which dims are split over which axes; every op has those of its dims.

    An op none of whose dims is split over tensor parallel ranks computes the same on all of them, or, with `stream_axis`, a share
    of the sequence each.
    """

    axes: Mapping[str, int]  # Ranks along each axis.
    splits: Mapping[str, tuple[str, ...]]  # Axes over which a dim is split.
    # The axis over which sequences are split where no other dim is (sequence parallel, Korthikanti et al. 2022); None: none.
    stream_axis: str | None = None
    # Whether inputs of matmuls that were gathered for the forward pass are gathered again for the gradients of weights
    # (Megatron-LM, Korthikanti et al. 2022, section 4.2.2), or kept whole (PyTorch's `parallelize_module`).
    regather_inputs: bool = True
    ring: bool = False  # Keys and values go round the ranks of a context parallel group; False: they are gathered.
    # Whether every rank of a context parallel group has as much of a causal attention: a part of the sequence's start and one of
    # its end; False: the last rank, with the end of the sequence, has most.
    balanced: bool = True
    expert_load: float = 1.0  # Tokens of the experts' rank that has most, over the mean of all.

    def of(self, op: Op) -> Splits:
        """The splits of an op's dims."""
        splits = {(axis, dim) for dim in op.dims for axis in self.splits.get(kind_of(dim), ()) if self.axes[axis] > 1}
        if (
            self.stream_axis is not None
            and self.axes[self.stream_axis] > 1
            and "sequence" in op.dims
            and not any(axis == self.stream_axis for axis, _ in splits)
        ):
            splits.add((self.stream_axis, "sequence"))
        return tuple(sorted(splits))

    def local(self, sizes: Mapping[str, float], splits: Splits) -> dict[str, float]:
        """Sizes of dims on one rank; a dim with fewer parts than ranks is repeated (heads of keys and values).

        An expert's tokens come from all ranks that share the experts, each of which has a part of the sequence.
        """
        local_sizes = dict(sizes)
        for axis, dim in splits:
            local_sizes[dim] = max(float(math.ceil(local_sizes[dim] / self.axes[axis])), 1.0)
        if "capacity" in local_sizes:
            local_sizes["capacity"] *= (
                self.axes.get("ep", 1) * self.axes.get("etp", 1) / math.prod(self.axes[axis] for axis in self.token_axes)
            )
        return local_sizes

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes over which the tokens of the residual stream are split."""
        stream = () if self.stream_axis is None else (self.stream_axis,)
        return (*self.splits.get("sequence", ()), *stream)


def kind_of(dim: str) -> str:
    """The kind of a dim, which decides over which axes it is split: the part of "width:3" before the colon, or else its name."""
    return dim.partition(":")[0]


def restricted(splits: Splits, shape: Shape) -> Splits:
    """Those of a tensor's dims."""
    dims = {dim for term in shape for dim in term}
    return tuple(pair for pair in splits if pair[1] in dims)


def axes_of(splits: Splits, dims: frozenset[str]) -> frozenset[str]:
    """The axes that split some dims."""
    return frozenset(axis for axis, dim in splits if dim in dims)


def conversions(have: Splits, partial: frozenset[str], need: Splits) -> Iterator[tuple[CollectiveKind, str]]:
    """Collectives, each over one axis, that make of a tensor's layout the one that is needed.

    Partial sums become whole by an all-reduce, or by a reduce-scatter where the result is split over the same axis; what is split
    and needed whole is gathered; what is needed split along another dim is exchanged by an all-to-all. To split what every rank
    has costs nothing.

    Parameters
    ----------
    have, partial
        How the tensor is split, and the axes over which it is a sum of parts.
    need
        How it is to be split, without partial sums.
    """
    held, needed = _by_axis(have), _by_axis(need)
    for axis in sorted(partial | held.keys()):
        if axis in partial:
            yield (CollectiveKind.REDUCE_SCATTER if axis in needed else CollectiveKind.ALL_REDUCE), axis
        elif axis not in needed:
            yield CollectiveKind.ALL_GATHER, axis
        elif needed[axis] != held[axis]:
            yield CollectiveKind.ALL_TO_ALL, axis


def _by_axis(splits: Splits) -> dict[str, frozenset[str]]:
    return {axis: frozenset(dim for other, dim in splits if other == axis) for axis, _ in splits}


def layout_of(strategy: Strategy, *, regather_inputs: bool = True) -> TensorLayout:
    """Megatron-LM's layout: heads, widths, the vocabulary over tp, sequences over cp, experts over ep, their widths over etp.

    `regather_inputs` is as in `TensorLayout`; frameworks differ in it.
    """
    tensor = ("tp",)
    return TensorLayout(
        axes={"tp": strategy.tp, "cp": strategy.cp, "ep": strategy.ep, "etp": strategy.etp},
        splits={
            "heads": tensor,
            "kv_heads": tensor,
            "ffn": tensor,
            "shared_ffn": tensor,
            "vocab": tensor,
            TENSOR_DIM: tensor,
            "sequence": ("cp",),
            "experts": ("ep",),
            "expert_ffn": ("etp",),
        },
        stream_axis="tp" if strategy.sequence_parallel else None,
        regather_inputs=regather_inputs,
        ring=strategy.cp_ring,
        balanced=strategy.cp_balanced,
        expert_load=strategy.expert_load,
    )
