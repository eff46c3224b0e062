"""`CapturedModel`: a model whose ops were captured from its code, as blocks that strategies can split."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from dpro_search.errors import InputError
from dpro_search.parallel.model.block import Block

TENSOR_DIM = "tensor"
"""Dims of captured ops whose name begins with this and a colon are split over tensor parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class CapturedModel:
    """Blocks in the order of the forward pass: what comes before the repeated modules, these, and what comes behind them.

    Attributes
    ----------
    hidden
        Elements that one block gives the next, for each token (without sequences: for each sample).
    heads
        Sizes that tensor parallel degrees must divide, with what each is of; empty: no layers are split like that.
    unsplit
        Why the model is not split along an axis ("tp", "pp", "cp", "ep", "sequence"), in words.
    parameter_bytes, gradient_bytes, state_bytes
        Of one parameter: what is held of it, of its gradient, and the optimizer's state.
    """

    name: str
    blocks: tuple[Block, ...]
    hidden: float
    heads: tuple[tuple[str, int], ...] = ()
    unsplit: tuple[tuple[str, str], ...] = ()
    tied: bool = False
    dropout: float = 0.0
    batch: int = 1  # That were captured.
    sequence: int | None = None
    grows: tuple[str, ...] = ("batch", "sequence")
    parameter_bytes: float = 4.0
    gradient_bytes: float = 4.0
    state_bytes: float = 8.0
    notes: tuple[str, ...] = ()
    tied_weight: str = field(default="", repr=False)  # The head's op that uses the embedding's matrix.

    def splits(self, axis: str) -> bool:
        """Whether the model can be split along an axis."""
        return axis not in dict(self.unsplit)

    @property
    def widths(self) -> int:
        """The size that tensor-parallel degrees divide; 1: nothing is split."""
        return math.gcd(*(size for _, size in self.heads)) if self.heads and self.splits("tp") else 1

    @property
    def layer_count(self) -> int:
        """Repeated modules."""
        return sum(block.count for block in self.blocks[1:-1])

    @property
    def whole_blocks(self) -> tuple[Block, ...]:
        """The blocks; of an untied model the head has a matrix of its own."""
        if self.tied or not self.tied_weight:
            return self.blocks
        head = self.blocks[-1]
        matrix = next((op.weight[:1] for op in self.blocks[0].ops if op.name == "tokens"), ())
        sizes = {dim: self.blocks[0].sizes[dim] for term in matrix for dim in term}
        ops = tuple(replace(op, weight=(*op.weight, *matrix)) if op.name == self.tied_weight else op for op in head.ops)
        return (*self.blocks[:-1], replace(head, ops=ops, sizes={**head.sizes, **sizes}))

    def check(self, degrees: dict[str, int], sequence: int, micro_batch: int) -> None:
        """Raise `InputError`, which begins with the setting's name, where the model cannot be split or sized like that."""
        why = dict(self.unsplit)
        for axis, ways in degrees.items():
            if ways > 1 and axis in why:
                raise InputError(f"{axis} {ways}: {self.name} is not split over {axis}: {why[axis]}")
        for what, size in self.heads:
            if size % degrees.get("tp", 1):
                raise InputError(f"tp {degrees['tp']} does not divide {what} of {self.name}, {size}")
        if self.sequence is not None and sequence != self.sequence and "sequence" not in self.grows:
            raise InputError(f"sequence {sequence}: {self.name} was captured with {self.sequence}, and its growth is not known")
        if micro_batch != self.batch and "batch" not in self.grows:
            raise InputError(f"micro_batch {micro_batch}: {self.name} was captured with {self.batch}, and its growth is not known")
