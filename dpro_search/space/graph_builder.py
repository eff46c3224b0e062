"""`GraphBuilder`: makes a `ReplayGraph` op by op (tests, small jobs) or in blocks of arrays (graphs of many ranks)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.replay_graph import Int32s, OrderPolicy, ReplayGraph, SharedCores, csr

_COLUMNS: dict[str, type[np.generic]] = {
    "device": np.int32,
    "duration_us": np.float64,
    "kind": np.int8,
    "priority": np.int32,
    "collective": np.int32,
    "flow_bytes": np.float64,
}


class Axis(Protocol):
    """The values that a template is formatted with along an axis of a block."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Labels(Sequence[str]):
    """Names of numbered things, spelled when somebody asks: a million strings cost more than a million ops.

    Numbers are given out in blocks of any shape; a block's template is formatted with the entry of each of its axes. Things that
    come one by one have their names in a list, which is a block as well.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._first: list[int] = []
        self._blocks: list[tuple[str, tuple[Axis, ...], tuple[int, ...]] | list[str]] = []
        self._singles: list[str] | None = None  # the last block, if it is a list
        self._count = 0

    def add(self, template: str, axes: Sequence[Axis], shape: tuple[int, ...]) -> None:
        """Name the next ``prod(shape)`` things; an empty template leaves them numbers."""
        self._first.append(self._count)
        self._blocks.append((template, tuple(axes), shape))
        self._count += int(np.prod(shape))
        self._singles = None

    def add_one(self, name: str) -> None:
        """Name the next thing; an empty name leaves it a number."""
        if self._singles is None:
            self._singles = []
            self._first.append(self._count)
            self._blocks.append(self._singles)
        self._singles.append(name)
        self._count += 1

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        number = index + self._count if index < 0 else index
        if not 0 <= number < self._count:
            raise IndexError(f"{self._what} {index} of {self._count}")
        at = bisect_right(self._first, number) - 1
        block, place = self._blocks[at], number - self._first[at]
        if isinstance(block, list):
            return block[place] or f"{self._what} {number}"
        template, axes, shape = block
        if not template:
            return f"{self._what} {number}"
        return template.format(*(axis[int(i)] for axis, i in zip(axes, np.unravel_index(place, shape), strict=True)))


class _Growing:
    """An array that grows by single values and by blocks, in the order in which they come."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self._dtype = dtype
        self._parts: list[npt.NDArray[Any]] = []
        self._singles: list[Any] = []  # those after the last part

    def append(self, value: Any) -> None:
        self._singles.append(value)

    def extend(self, values: Any) -> None:
        """Single values, one after the other."""
        self._singles.extend(values)

    def block(self, values: npt.NDArray[Any]) -> None:
        self._close()
        self._parts.append(values)

    def joined(self) -> npt.NDArray[Any]:
        self._close()
        return np.concatenate([np.zeros(0, self._dtype), *self._parts])

    def _close(self) -> None:
        if self._singles:
            self._parts.append(np.array(self._singles, self._dtype))
            self._singles = []


class GraphBuilder:
    """Collects devices, links, ops and dependencies; `build` makes the graph. Everything that is added gets the next number.

    >>> builder = GraphBuilder()
    >>> stream = builder.add_device(rank=0)
    >>> forward = builder.add_op(stream, 100.0, name="forward")
    >>> backward = builder.add_op(stream, 200.0, name="backward", kind=OpKind.BACKWARD, after=[forward])
    >>> len(builder.build())
    2
    """

    def __init__(self) -> None:
        self._ops = {name: _Growing(dtype) for name, dtype in _COLUMNS.items()}
        self._policy, self._rank, self._rate = _Growing(np.int8), _Growing(np.int32), _Growing(np.float64)
        self._pairs = {name: (_Growing(np.int32), _Growing(np.int32)) for name in ("edge", "link", "carry")}
        self._names, self._device_names = Labels("op"), Labels("device")
        self._links = 0
        self._count = 0  # of ops
        self._rows: list[tuple[int, float, OpKind, int, int, float]] = []  # ops that were added one by one, not yet in the columns

    def add_device(self, rank: int = 0, policy: OrderPolicy = OrderPolicy.FIFO, name: str = "") -> int:
        """A device of a rank."""
        self._rank.append(rank)
        self._policy.append(policy)
        self._device_names.add_one(name)
        return len(self._device_names) - 1

    def add_devices(self, rank: npt.ArrayLike, policy: npt.ArrayLike, name: str = "", axes: Sequence[Axis] = ()) -> Int32s:
        """A block of devices; returns their numbers in the shape of `rank`, against which `policy` broadcasts."""
        ranks = np.asarray(rank, np.int32)
        numbers = _numbers(len(self._device_names), ranks.shape)
        self._rank.block(ranks.ravel())
        self._policy.block(_filled(policy, ranks.shape, np.int8))
        self._device_names.add(name, axes, ranks.shape)
        return numbers

    def add_link(self, bytes_per_us: float) -> int:
        """One direction of a link."""
        return int(self.add_links([bytes_per_us])[0])

    def add_links(self, bytes_per_us: npt.ArrayLike) -> Int32s:
        """A block of links; returns their numbers."""
        rates = np.asarray(bytes_per_us, np.float64)
        numbers = _numbers(self._links, rates.shape)
        self._links += rates.size
        self._rate.block(rates.ravel())
        return numbers

    def add_op(
        self,
        device: int,
        duration_us: float,
        *,
        name: str = "",
        kind: OpKind = OpKind.FORWARD,
        priority: int = 0,
        after: Sequence[int] = (),
        collective: int | None = None,
        flow_bytes: float = 0.0,
        links: Sequence[int] = (),
    ) -> int:
        """One op, which needs the ops `after`; some hundred times faster than a block of one."""
        op = self._count
        self._count += 1
        self._rows.append((device, duration_us, kind, priority, -1 if collective is None else collective, flow_bytes))
        if links:
            self._singly("link", [op] * len(links), links)
        if after:
            self._singly("edge", after, [op] * len(after))
        self._names.add_one(name)
        return op

    def add_ops(
        self,
        device: npt.ArrayLike,
        duration_us: npt.ArrayLike,
        *,
        kind: npt.ArrayLike = OpKind.FORWARD,
        priority: npt.ArrayLike = 0,
        collective: npt.ArrayLike = -1,
        flow_bytes: npt.ArrayLike = 0.0,
        links: npt.ArrayLike | None = None,
        name: str = "",
        axes: Sequence[Axis] = (),
    ) -> Int32s:
        """A block of ops; returns their numbers in the shape of `device`, against which the other columns broadcast.

        Parameters
        ----------
        links
            Links that each op's bytes cross, [..., k]; -1 where an op crosses fewer than k.
        name, axes
            Template of the names, and for each axis of the block what the template is formatted with.
        """
        devices = np.asarray(device, np.int32)
        numbers = _numbers(len(self), devices.shape)
        columns = (devices, duration_us, kind, priority, collective, flow_bytes)
        self._add_rows()
        self._count += numbers.size
        for (column, dtype), values in zip(_COLUMNS.items(), columns, strict=True):
            self._ops[column].block(_filled(values, devices.shape, dtype))
        if links is not None:
            crossed = np.asarray(links, np.int32)
            crossed = np.broadcast_to(crossed, (*devices.shape, crossed.shape[-1]))
            self._pair("link", np.broadcast_to(numbers[..., None], crossed.shape)[crossed >= 0], crossed[crossed >= 0])
        self._names.add(name, axes, devices.shape)
        return numbers

    def add_edges(self, source: npt.ArrayLike, destination: npt.ArrayLike) -> None:
        """`destination` needs `source`; arrays are broadcast against each other."""
        self._pair("edge", source, destination)

    def carry(self, source: npt.ArrayLike, destination: npt.ArrayLike) -> None:
        """`destination` needs the `source` of the iteration before; arrays are broadcast against each other."""
        if isinstance(source, int) and isinstance(destination, int):
            self._singly("carry", (source,), (destination,))
        else:
            self._pair("carry", source, destination)

    def __len__(self) -> int:
        return self._count

    def build(
        self, slowdown: Floats | None = None, *, servers: Int32s | None = None, cores: SharedCores | None = None
    ) -> ReplayGraph:
        """The graph of all that was added; `ReplayGraph.validate` says what is wrong with it."""
        self._add_rows()
        ops = {name: column.joined() for name, column in self._ops.items()}
        source, destination = self._joined_pairs("edge")
        pred_ptr, pred_idx = csr(destination, source, len(self))
        carry_src, carry_dst = self._joined_pairs("carry")
        optional: dict[str, Any] = {}
        if (ops["collective"] >= 0).any():
            optional["collective"] = ops["collective"]
        if self._links:
            link_ptr, link_idx = csr(*self._joined_pairs("link"), len(self))
            optional |= {"flow_bytes": ops["flow_bytes"], "link_ptr": link_ptr, "link_idx": link_idx}
            optional["link_bytes_per_us"] = self._rate.joined()
        if slowdown is not None:
            optional["slowdown"] = slowdown
        if servers is not None:
            optional["servers"] = servers
        return ReplayGraph(
            duration_us=ops["duration_us"],
            device=ops["device"],
            kind=ops["kind"],
            priority=ops["priority"],
            pred_ptr=pred_ptr,
            pred_idx=pred_idx,
            policy=self._policy.joined(),
            rank_of_device=self._rank.joined(),
            carry_src=carry_src,
            carry_dst=carry_dst,
            names=self._names,
            device_names=self._device_names,
            cores=cores,
            **optional,
        )

    def _add_rows(self) -> None:
        """Take the ops that were added one by one into the columns."""
        for column, values in zip(self._ops.values(), zip(*self._rows, strict=True), strict=False):
            column.extend(values)
        self._rows.clear()

    def _pair(self, which: str, left: npt.ArrayLike, right: npt.ArrayLike) -> None:
        lefts, rights = np.broadcast_arrays(np.asarray(left, np.int32), np.asarray(right, np.int32))
        self._pairs[which][0].block(lefts.ravel())
        self._pairs[which][1].block(rights.ravel())

    def _singly(self, which: str, lefts: Sequence[int], rights: Sequence[int]) -> None:
        """Pairs of plain numbers, as many on either side."""
        self._pairs[which][0].extend(lefts)
        self._pairs[which][1].extend(rights)

    def _joined_pairs(self, which: str) -> tuple[Int32s, Int32s]:
        left, right = self._pairs[which]
        return left.joined(), right.joined()


def _numbers(first: int, shape: tuple[int, ...]) -> Int32s:
    return np.arange(first, first + int(np.prod(shape)), dtype=np.int32).reshape(shape)


def _filled(values: npt.ArrayLike, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.broadcast_to(np.asarray(values, dtype), shape).ravel()
