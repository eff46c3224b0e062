"""The table that all sources of stamps end in: one row a collective or a mark, in the order in which a rank enqueued them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# As `dpro_search.runtime.record.collective_stamps.RECORD`, which defines the fields. Times in us count from `enqueue_ns` on; NaN:
# unknown.
RECORD = np.dtype(
    [
        ("enqueue_ns", "<i8"),
        ("arrived_us", "<f4"),
        ("ended_us", "<f4"),
        ("waiting_us", "<f4"),
        ("resumed_us", "<f4"),
        ("sequence", "<u4"),
        ("step", "<i4"),
        ("size_bytes", "<i8"),
        ("group", "<u2"),
        ("operation", "u1"),
        ("unused", "u1"),
        ("peer", "<i2"),
        ("padding", "<i2"),
    ]
)
# Operations 1 to 3 are marks; the names of the others are those of PyTorch's operators.
STEP, FORWARD, UPDATE, FIRST_COLLECTIVE = 1, 2, 3, 4
SEND, RECEIVE = "send", "recv_"

Records = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class StampedGroup:
    """A process group: its name, its ranks in their order, and the library that communicates."""

    name: str
    ranks: tuple[int, ...]
    backend: str = ""


@dataclass(frozen=True, kw_only=True)
class RankStamps:
    """Stamps of one rank.

    Attributes
    ----------
    clock
        Ranks of equal `clock` stamp with one clock; others are aligned by the collectives.
    operations
        Name of each operation number.
    groups
        Process group of each number that the records use.
    """

    rank: int
    world: int
    host: str
    clock: str
    wall_less_clock_ns: int
    operations: tuple[str, ...]
    groups: dict[int, StampedGroup]
    records: Records
