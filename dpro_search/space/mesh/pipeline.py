"""`pipeline_orders`: in which order each rank of a pipeline runs the forward and backward passes of its stages.

With p ranks and v stages on each, stage s is on rank s mod p. Orders are those of Megatron-LM and of torch.distributed.pipelining
(a test compares them with the latter's).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from dpro_search.errors import InputError
from dpro_search.space.mesh.strategy import Schedule


class Pass(NamedTuple):
    """One pass of a micro-batch through a stage."""

    direction: Literal["F", "B"]
    stage: int
    micro_batch: int


def pipeline_orders(schedule: Schedule, ranks: int, stages_per_rank: int, micro_batches: int) -> tuple[tuple[Pass, ...], ...]:
    """Passes of each rank in order.

    Raises
    ------
    InputError
        The schedule cannot have so many stages on a rank, or needs another number of micro-batches.
    """
    if schedule is Schedule.INTERLEAVED or (schedule is Schedule.ONE_F_ONE_B and stages_per_rank > 1):
        if micro_batches % ranks:
            raise InputError(f"interleaved stages need micro-batches that divide by {ranks} ranks, not {micro_batches}")
        return tuple(_interleaved(rank, ranks, stages_per_rank, micro_batches) for rank in range(ranks))
    if stages_per_rank > 1:
        raise InputError(f"{schedule} has one stage on each rank, not {stages_per_rank}")
    order: Callable[[int, int, int], tuple[Pass, ...]] = {Schedule.GPIPE: _gpipe, Schedule.ONE_F_ONE_B: _one_f_one_b}[schedule]
    return tuple(order(rank, ranks, micro_batches) for rank in range(ranks))


def _gpipe(rank: int, ranks: int, micro_batches: int) -> tuple[Pass, ...]:
    """All forward passes, then all backward passes (Huang et al. 2019)."""
    forward = tuple(Pass("F", rank, number) for number in range(micro_batches))
    return (*forward, *(Pass("B", rank, number) for number in range(micro_batches)))


def _one_f_one_b(rank: int, ranks: int, micro_batches: int) -> tuple[Pass, ...]:
    """As many forward passes as ranks behind this one, then one and one in turn (Narayanan et al. 2019)."""
    forward = [Pass("F", rank, number) for number in range(micro_batches)]
    backward = [Pass("B", rank, number) for number in range(micro_batches)]
    return _in_turn(forward, backward, ranks - rank - 1)


def _interleaved(rank: int, ranks: int, stages: int, micro_batches: int) -> tuple[Pass, ...]:
    """Groups of as many micro-batches as ranks go through all stages of a rank in turn (Narayanan et al. 2021, section 2.2)."""

    def numbered(number: int) -> tuple[int, int]:
        group, place = divmod(number, ranks * stages)
        return place // ranks, group * ranks + place % ranks

    found = [numbered(number) for number in range(micro_batches * stages)]
    forward = [Pass("F", chunk * ranks + rank, micro_batch) for chunk, micro_batch in found]
    backward = [Pass("B", (stages - 1 - chunk) * ranks + rank, micro_batch) for chunk, micro_batch in found]
    return _in_turn(forward, backward, 2 * (ranks - rank - 1) + (stages - 1) * ranks)


def _in_turn(forward: list[Pass], backward: list[Pass], ahead: int) -> tuple[Pass, ...]:
    """Some forward passes ahead, then one forward and one backward pass in turn, then what is left."""
    ahead = min(ahead, len(forward))
    found = forward[:ahead]
    for one, other in zip(forward[ahead:], backward, strict=False):
        found += [one, other]
    return (*found, *backward[len(forward) - ahead :])
