"""`ParallelTimes`: what a parallel job's blocks and exchanges take on one machine, as a file (``times.json``).

Written by `dpro-search fit --collect parallel`; a ``job.toml`` names it under ``times``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from dpro_search._regular_files import read_regular
from dpro_search.collect._files import DAMAGED, write_file
from dpro_search.errors import InputError

VERSION = 1
_Row = TypeVar("_Row", bound=msgspec.Struct)

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]  # a time, a size or a rate: neither negative nor infinite


class BlockTime(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's own work in a block, for one micro-batch, without exchanges.

    Attributes
    ----------
    block
        Its name, as `parallel.model.blocks_of` has it.
    sharded
        Whether ranks gather the block's parameters before each pass (ZeRO-3): copies are in the times.
    reduce_us
        In the last backward pass of a step, what it takes beside that to hand gradients over to be exchanged.
    spread
        Standard deviation of a pass over its mean: ranks that wait for each other wait for the slowest.
    """

    block: str
    tp: _Count = 1
    sequence_parallel: bool = False
    micro_batch: _Count
    sequence: _Count
    sharded: bool = False
    forward_us: _Amount
    backward_us: _Amount
    reduce_us: _Amount = 0.0
    spread: _Amount = 0.0


class UpdateTime(msgspec.Struct, frozen=True, kw_only=True):
    """From the end of a step's backward passes to the next step: the optimizer, and what the script does beside.

    On a GPU also what the first and the last micro-batch of a step take beside a usual one.
    """

    elements: _Amount  # Parameters that the rank has.
    us: _Amount


class TimedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's step on a GPU under a plan, with no other rank: exchanges take no time.

    Attributes
    ----------
    settings
        Of the plan as it was timed, as ``--set`` takes them: without a pipeline.
    micro_batches
        Of the step.
    step_us, update_us
        From the first forward pass to the last backward pass; and from there to the next step.
    peak_bytes
        Most that tensors held (`torch.cuda.max_memory_allocated`).
    blocks
        As they were timed: with recomputation where the plan has it.
    """

    settings: dict[str, Any]
    micro_batches: _Count
    step_us: _Amount
    update_us: _Amount
    peak_bytes: Annotated[int, msgspec.Meta(ge=0)]
    blocks: tuple[BlockTime, ...] = ()
    finite: bool = True  # Whether all losses were: of numbers that are not, products take less time.


class CollectiveTime(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange, from when the last rank has begun it; groups like it exchange at the same time.

    Attributes
    ----------
    collective
        all_reduce, all_gather, reduce_scatter or send_recv (one message, one way).
    ranks_per_host, hosts
        Of the group.
    world
        Ranks of the whole job, which share the machine's cores.
    size_bytes
        Of the whole tensor of all ranks (all_gather, reduce_scatter), or of each rank's.
    """

    collective: str
    ranks_per_host: _Count
    hosts: _Count
    world: _Count
    rate_bps: _Amount | None = None  # None: not limited.
    size_bytes: _Amount
    us: _Amount


class ParallelTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    version: int = VERSION
    machine: str = ""
    device: str = ""  # The GPU, as its driver calls it; empty: cores.
    torch: str = ""
    precision: str = "fp32"
    cores: _Count = 1  # Cores of the machine; each timed its own process at the same time as the others.
    # What a core or GPU reaches in a large product, and in a copy that no cache holds; 0: not measured.
    flops_per_s: _Amount = 0.0
    memory_bytes_per_s: _Amount = 0.0
    # What the framework adds to a product whose weight tensor parallel ranks share, in each pass; 0: not measured.
    split_forward_us: _Amount = 0.0
    split_backward_us: _Amount = 0.0
    blocks: tuple[BlockTime, ...] = ()
    updates: tuple[UpdateTime, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    steps: tuple[TimedStep, ...] = ()  # On GPUs.

    @staticmethod
    def load(path: Path) -> ParallelTimes:
        """Raises `InputError` for a file that is missing, damaged or of another version."""
        try:
            times = msgspec.json.decode(read_regular(path), type=ParallelTimes)
        except (OSError, *DAMAGED) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise InputError(
                f"{path}: no times of a parallel job ({reason}); 'dpro-search fit --collect parallel' writes them"
            ) from error
        if times.version != VERSION:
            raise InputError(f"{path}: version {times.version}, and this reads version {VERSION}: measure it again")
        return times

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        write_file(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    def with_rows(
        self,
        blocks: Iterable[BlockTime] = (),
        updates: Iterable[UpdateTime] = (),
        collectives: Iterable[CollectiveTime] = (),
        steps: Iterable[TimedStep] = (),
    ) -> ParallelTimes:
        """The same with further rows; one that was measured before of the same thing is replaced."""
        steps = tuple(steps)
        again = [(step.settings, step.micro_batches) for step in steps]
        return msgspec.structs.replace(
            self,
            blocks=_merged(self.blocks, blocks, ("forward_us", "backward_us", "reduce_us", "spread")),
            updates=_merged(self.updates, updates, ("us",)),
            collectives=_merged(self.collectives, collectives, ("us",)),
            steps=(*(step for step in self.steps if (step.settings, step.micro_batches) not in again), *steps),
        )


def _merged(before: Iterable[_Row], more: Iterable[_Row], measured: tuple[str, ...]) -> tuple[_Row, ...]:
    row_of_key: dict[object, _Row] = {}
    for row in (*before, *more):
        key = tuple(value for name, value in msgspec.structs.asdict(row).items() if name not in measured)
        row_of_key[key] = row
    return tuple(row_of_key.values())
