"""``parse_replica_groups(text, participants) -> ReplicaGroups``: which devices communicate with each other in a collective.

XLA has four notations: lists ``{{0,1},{2,3}}``; an iota that is reshaped, transposed and cut into rows, ``[2,2]<=[4]`` and
``[8,4]<=[4,8]T(1,0)``; axes of a mesh, ``mesh['x'=4,'y'=2] {'x'}``, whose devices may be in another order
(``mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}``) and whose axes may be split (``'x':(2)4``: 4 of the axis, of which 2 slower
ones come first); and ``{}``, all participants in one group. A collective-permute has pairs instead, ``{{0,1},{1,0}}``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from dpro_search.errors import TraceFormatError

Ints = npt.NDArray[np.int64]

MOST_DEVICES = 1 << 22  # a text that asks for more is damaged

_LIST = re.compile(r"\{[\d,\s]*\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"@?mesh[\[<](.*?)[\]>](?:,\s*device_ids=)?(?:\((.*)\))?\s*(?:\{(.*)\})?")
_AXIS = re.compile(r"""['"]?([^'"=,\s]+?)['"]?=(\d+)""")
_AXIS_REFERENCE = re.compile(r"""['"]?([^'",:\s]+)['"]?(?::\((\d+)\)(\d+))?""")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclass(frozen=True, eq=False)
class ReplicaGroups:
    """Groups of numbers of replicas, partitions or devices: `Collective` says which of them a collective counts."""

    text: str  # As the program has it.
    ids: Ints  # Shape [groups, largest size]; where an all-reduce has groups of different sizes, the smaller end with -1.

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(self.ids)

    @property
    def size(self) -> int:
        """Number of participants of a group, of the largest if they differ."""
        return int(self.ids.shape[1])

    @cached_property
    def sizes(self) -> Ints:
        """Number of participants of each group. Shape [groups]."""
        return np.asarray(np.count_nonzero(self.ids >= 0, axis=1), np.int64)

    def __str__(self) -> str:
        return f"{self.count} groups of {self.size}"


@lru_cache(maxsize=1 << 12)
def parse_replica_groups(text: str, participants: int) -> ReplicaGroups:
    """The groups that a text spells.

    Parameters
    ----------
    text
        Value of the attribute ``replica_groups``.
    participants
        How many take part where the text names none, which is ``{}`` (all in one group, in order).

    Raises
    ------
    TraceFormatError
        The text is in none of the notations, or contradicts itself.
    """
    stripped = text.strip()
    if stripped.replace(" ", "") in ("{}", "{{}}"):
        return ReplicaGroups(text, np.arange(participants, dtype=np.int64).reshape(1, -1))
    try:
        if (iota := _IOTA.fullmatch(stripped)) is not None:
            return ReplicaGroups(text, _iota(_sizes(iota[2]), _sizes(iota[3]), _sizes(iota[1])))
        if (mesh := _MESH.fullmatch(stripped)) is not None:
            return ReplicaGroups(text, _of_mesh(mesh[1], mesh[2] or "", mesh[3]))
        if stripped.startswith("{"):
            return ReplicaGroups(text, _of_lists(stripped))
    except (ValueError, OverflowError) as error:
        raise TraceFormatError(f"replica_groups={_shown(text)} contradicts itself ({error})") from error
    raise TraceFormatError(f"replica_groups={_shown(text)} is in no known notation")


@lru_cache(maxsize=1 << 12)
def parse_source_target_pairs(text: str) -> Ints:
    """The pairs of a collective-permute: who sends, who receives. Shape [pairs, 2].

    Raises `TraceFormatError` if a pair has not two numbers.
    """
    pairs = [_sizes(part[1:-1]) for part in _LIST.findall(text) if part.strip("{} ")]
    if any(len(pair) != 2 for pair in pairs):
        raise TraceFormatError(f"source_target_pairs={_shown(text)} has an entry that is no pair")
    if any(number >= MOST_DEVICES for pair in pairs for number in pair):
        raise TraceFormatError(f"source_target_pairs={_shown(text)} has more than {MOST_DEVICES} devices")
    return np.array(pairs, np.int64).reshape(-1, 2)


def _of_lists(text: str) -> Ints:
    if re.fullmatch(r"\{\s*(?:\{[\d,\s]*\}\s*,?\s*)+\}", text) is None:
        raise ValueError("lists are not closed")
    groups = [_sizes(part[1:-1]) for part in _LIST.findall(text)]
    most = max(map(len, groups))
    return np.array([[*group, *[-1] * (most - len(group))] for group in groups], np.int64)


def _iota(reshaped: tuple[int, ...], order: tuple[int, ...], result: tuple[int, ...]) -> Ints:
    """``[result]<=[reshaped]T(order)``: xla/hlo/ir/tile_assignment.h has the definition."""
    _require_few(reshaped)
    if len(result) > 2:
        raise ValueError(f"{len(result)} dimensions instead of groups and participants")
    ids = np.arange(math.prod(reshaped), dtype=np.int64).reshape(reshaped)
    return (ids.transpose(order) if order else ids).reshape(result if len(result) != 1 else (1, *result))


def _of_mesh(axes_text: str, devices_text: str, references_text: str | None) -> Ints:
    """Rows along the axes that are named, one row for each place on the other axes (xla/hlo/ir/replica_group.cc).

    Of an axis that is split, the named part is a dimension of its own between the slower and the faster rest.
    """
    axes = {name: int(size) for name, size in _AXIS.findall(axes_text)}
    if not axes:
        raise ValueError("a mesh without axes")
    devices = _mesh_devices(tuple(axes.values()), devices_text)
    parts: list[tuple[str, int, int]] = []  # axis, product of its parts before this one, size
    if references_text is None:
        parts = [(name, 1, size) for name, size in axes.items()]
    else:
        for name, before, size in _AXIS_REFERENCE.findall(references_text):
            if name not in axes:
                raise ValueError(f"the mesh has no axis '{name}'")
            parts.append((name, int(before or 1), int(size or axes[name])))
    dimensions: list[int] = []
    place: dict[tuple[str, int, int], int] = {}
    for name, axis_size in axes.items():
        product = 1
        for part in sorted((part for part in parts if part[0] == name), key=lambda part: part[1]):
            if part[1] != product:
                dimensions.append(part[1] // product)
            place[part] = len(dimensions)
            dimensions.append(part[2])
            product = part[1] * part[2]
        if product != axis_size:
            dimensions.append(axis_size // product)
    grouped = [place[part] for part in parts]
    others = [dim for dim in range(len(dimensions)) if dim not in grouped]
    return devices.reshape(dimensions).transpose(*others, *grouped).reshape(-1, math.prod(part[2] for part in parts))


def _mesh_devices(sizes: tuple[int, ...], text: str) -> Ints:
    """Device numbers in the order of the mesh: those that the text lists, a transposed iota, or 0, 1, 2, ..."""
    _require_few(sizes)
    if not text:
        return np.arange(math.prod(sizes), dtype=np.int64)
    if (order := _ORDER.fullmatch(text.strip())) is not None:
        return _iota(_sizes(order[1]), _sizes(order[2]), (math.prod(sizes),)).reshape(-1)
    return np.array(_sizes(text), np.int64)


def _require_few(sizes: tuple[int, ...]) -> None:
    if math.prod(sizes) > MOST_DEVICES:
        raise ValueError(f"more than {MOST_DEVICES} devices")


def _sizes(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in (text or "").split(",") if number.strip())


def _shown(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
