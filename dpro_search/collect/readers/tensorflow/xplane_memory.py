"""Memory in a TensorFlow profile: every piece that the framework's allocator handed out and got back.

The best-fit allocator (TensorFlow's "BFC": of a GPU, or "mklcpu" of a CPU, which passes on pieces from 256 KiB) notes them from
level 2 of the host tracer on, each with what it had in use afterwards, and with the op on whose behalf it was requested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Ints, TensorType

ALLOCATION, RELEASE = "MemoryAllocation", "MemoryDeallocation"
_LARGEST = 2**53
_DTYPES = {
    "float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16", "bool": "bool",
    "int8": "int8", "uint8": "uint8", "int16": "int16", "uint16": "uint16", "int32": "int32", "uint32": "uint32", "int64": "int64",
    "uint64": "uint64",
}  # fmt: skip  # DataTypeString of tensorflow/core/framework/types.cc


@dataclass(frozen=True, kw_only=True)
class MemoryEvents:
    """m allocations and releases of one allocator, in the order of time."""

    allocator: str  # Its name; "" without events.
    time_us: Floats  # Microseconds since the profile's origin, [m].
    op: Ints  # Index into `ops` of the op in whose name it was done, [m].
    # is_allocation, address: [m].
    is_allocation: npt.NDArray[np.bool_]
    address: Ints
    # requested_bytes, taken_bytes: What was requested, and the size of the piece, [m].
    requested_bytes: Ints
    taken_bytes: Ints
    in_use_bytes: Ints  # All that the allocator had handed out then, after this event, [m].
    ops: tuple[str, ...]  # Names of ops; "" is none.

    def releases(self) -> Ints:
        """The event that gives back each allocation, [m]; -1: none does, or the event is no allocation."""
        release = np.full(len(self.time_us), -1, dtype=np.int64)
        held: dict[int, int] = {}
        for i, (address, allocates) in enumerate(zip(self.address.tolist(), self.is_allocation.tolist(), strict=True)):
            if allocates:
                held[address] = i
            elif address in held:
                release[held.pop(address)] = i
        return release


def memory_events(rows: Sequence[tuple[float, bool, Mapping[str, Any]]]) -> tuple[MemoryEvents, int]:
    """The events of the allocator that has the most, and how many were left out.

    Parameters
    ----------
    rows
        Of each event: time in us, whether it allocates, its stats.
    """
    whole = [(time_us, allocates, numbers, stats) for time_us, allocates, stats in rows if (numbers := _numbers(stats)) is not None]
    names = Counter(str(stats.get("allocator_name", "")) for _, _, _, stats in whole)
    allocator = names.most_common(1)[0][0] if names else ""
    its_rows = sorted((row for row in whole if str(row[3].get("allocator_name", "")) == allocator), key=lambda row: row[0])
    ops: dict[str, int] = {}
    op = [ops.setdefault(str(stats.get("tf_op") or ""), len(ops)) for _, _, _, stats in its_rows]
    columns = np.array([numbers for _, _, numbers, _ in its_rows], dtype=np.int64).reshape(-1, 4)
    events = MemoryEvents(
        allocator=allocator,
        time_us=np.array([time_us for time_us, _, _, _ in its_rows], dtype=np.float64),
        op=np.array(op, dtype=np.int64),
        is_allocation=np.array([allocates for _, allocates, _, _ in its_rows], dtype=np.bool_),
        address=columns[:, 0],
        requested_bytes=columns[:, 1],
        taken_bytes=columns[:, 2],
        in_use_bytes=columns[:, 3],
        ops=tuple(ops),
    )
    return events, len(rows) - len(its_rows)


def tensor_types(shapes: str) -> tuple[TensorType | None, ...]:
    """Types of an op's inputs as the tracer writes them, "(float[8,64];;int32[])" nothing for a handle; () for another text."""
    if not (shapes.startswith("(") and shapes.endswith(")")):
        return ()
    return tuple(_tensor_type(part) for part in shapes[1:-1].split(";"))


def _tensor_type(written: str) -> TensorType | None:
    name, bracket, rest = written.partition("[")
    sizes = rest[:-1].split(",") if rest[:-1] else []
    if not bracket or not rest.endswith("]") or not all(size.isdecimal() and len(size) < 12 for size in sizes):
        return None
    tensor_type = TensorType(_DTYPES.get(name, name), tuple(int(size) for size in sizes))
    return tensor_type if tensor_type.elements < _LARGEST else None


def _numbers(stats: Mapping[str, Any]) -> tuple[int, int, int, int] | None:
    """(address, requested, taken, in use); None if one is missing or impossible."""
    values = [stats.get(name) for name in ("addr", "requested_bytes", "allocation_bytes", "bytes_allocated")]
    numbers = [number for number in values if isinstance(number, int) and 0 <= number < 2**63]
    if len(numbers) < len(values) or max(numbers[1:]) >= _LARGEST:
        return None
    return numbers[0], numbers[1], numbers[2], numbers[3]
