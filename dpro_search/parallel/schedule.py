"""`Schedule`: names of the orders of a pipeline (`pipeline_orders` makes them), and which numbers each of them exists for."""

from __future__ import annotations

from enum import StrEnum

from dpro_search.errors import InputError


class Schedule(StrEnum):
    """In which order a pipeline's stages run micro-batches."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"  # ZB-H1; with virtual stages torch's InterleavedZeroBubble
    ZERO_BUBBLE_V = "zero-bubble-v"
    DUAL_PIPE_V = "dual-pipe-v"
    DUAL_PIPE = "dual-pipe"  # of DeepSeek-V3, with two copies of each stage


V_SHAPED = (Schedule.ZERO_BUBBLE_V, Schedule.DUAL_PIPE_V)
"""Schedules whose first and last stage are on the same rank: the second half of the stages goes back through the ranks."""


def stages_on(schedule: Schedule, rank: int, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stages of a rank, in the order of the forward pass.

    Stage s is on rank s mod p of p; in a schedule of the shape of a V the second p stages go back from the last rank to the first.
    So do the second copies of all p stages in DualPipe.
    """
    if schedule in V_SHAPED or schedule is Schedule.DUAL_PIPE:
        return rank, 2 * ranks - 1 - rank
    return tuple(range(rank, ranks * stages_per_rank, ranks))


def check_schedule(schedule: Schedule, ranks: int, stages_per_rank: int, micro_batches: int) -> None:
    """Raise `InputError` where a schedule does not exist for these numbers."""
    if schedule is Schedule.GPIPE and stages_per_rank > 1:
        raise InputError(f"{schedule} has one stage on each rank, not {stages_per_rank}")
    if schedule in V_SHAPED and stages_per_rank != 2:
        raise InputError(f"{schedule} has two stages on each rank (virtual_stages 2), not {stages_per_rank}")
    if schedule is Schedule.DUAL_PIPE and (ranks % 2 or stages_per_rank > 1):
        raise InputError(f"{schedule} has an even number of ranks with one stage in two copies, not {ranks} with {stages_per_rank}")
    if schedule is Schedule.DUAL_PIPE and micro_batches % 2:
        raise InputError(f"{schedule} needs an even number of micro-batches, half from each end, not {micro_batches}")
    if schedule in (Schedule.DUAL_PIPE_V, Schedule.DUAL_PIPE) and micro_batches < 2 * ranks:
        raise InputError(f"{schedule} needs at least {2 * ranks} micro-batches, twice its ranks, not {micro_batches}")
    if stages_per_rank > 1 and schedule not in V_SHAPED and micro_batches % rounds(ranks, micro_batches):
        legal = micro_batches // ranks * ranks
        raise InputError(
            f"interleaved stages need micro-batches that divide into {rounds(ranks, micro_batches)} equal rounds of at least"
            f" {ranks}, not {micro_batches}: use {legal}"
        )


def rounds(ranks: int, micro_batches: int) -> int:
    """Groups of micro-batches, of at least as many as ranks, that go through all stages of a rank in turn."""
    return max(1, micro_batches // ranks)
