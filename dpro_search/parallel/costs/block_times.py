"""`BlockTimes`: what somebody measured of a block's passes, in place of what cost models say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpro_search.parallel.model import Block
from dpro_search.parallel.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """A pass of one micro-batch through one block, on one rank.

    With what its tensor, context and expert parallel ranks exchange and with the sums of gradients over micro-batches; without what
    replicas exchange, without recomputation.
    """

    block: str  # A block's name; "layer" stands for all kinds of layers.
    forward_us: float
    backward_us: float
    sequence: int
    micro_batch: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def strategy(self) -> Strategy:
        """On as few ranks as it was measured on."""
        dp = max(self.ep // (self.tp * self.cp), 1)
        return Strategy(
            dp=dp,
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            sequence_parallel=self.tp > 1,
            micro_batch=self.micro_batch,
            global_batch=dp * self.micro_batch,
        )


def nearest(times: Sequence[BlockTimes], block: Block, sequence: int, strategy: Strategy) -> BlockTimes | None:
    """The measurement of a block whose work on a rank is most similar; None if the block was not measured."""

    def distance(measured: BlockTimes) -> float:
        ratios = (
            measured.sequence * measured.micro_batch / (sequence * strategy.micro_batch),
            measured.sequence / sequence,
            measured.tp / strategy.tp,
            measured.cp / strategy.cp,
            measured.ep / strategy.ep,
        )
        return sum(abs(math.log(ratio)) for ratio in ratios)

    same_block = [measured for measured in times if measured.block == block.name]
    same_block = same_block or [measured for measured in times if measured.block == "layer" and block.name.startswith("layer")]
    return min(same_block, key=distance, default=None)
