"""The axes of a torus that the groups of a collective span: ``spans_of(torus, places, replica_groups)``.

A group whose chips are all combinations of some positions on each axis (a *box*) can use rings or lines along these axes. Chips
that are neighbours in a group but not on the torus send over the links of the chips between them. Groups whose chips alternate, or
that have cores of the same chips, share links: `AxisSpan.sharing` counts how many groups use the busiest link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dpro_search.cluster import Torus
from dpro_search.errors import InputError

Ints = npt.NDArray[np.int64]
_AXES = 3


@dataclass(frozen=True)
class Places:
    """The chip of each device of a program, in the order in which replica groups number the devices."""

    coordinates: Ints  # Place of the device's chip in its slice, [devices, 3]. Cores of a chip have the same.
    slices: Ints  # Number of the device's slice, [devices].

    def __post_init__(self) -> None:
        if self.coordinates.ndim != 2 or self.coordinates.shape[1] != _AXES or self.slices.shape != self.coordinates.shape[:1]:
            raise InputError("a program's devices need three coordinates each, and a slice")


def places_of(torus: Torus) -> Places:
    """The devices of a torus in the order in which libtpu lists them: slice by slice, host by host, the cores of a chip in turn."""
    slice_coordinates = np.repeat(np.array(torus.coordinates(), np.int64), torus.devices_per_chip, axis=0)
    return Places(
        coordinates=np.tile(slice_coordinates, (torus.slices, 1)),
        slices=np.repeat(np.arange(torus.slices), len(slice_coordinates)),
    )


def check_places(torus: Torus, places: Places) -> None:
    """Raises `InputError` if a device is not on the torus."""
    if (places.coordinates < 0).any() or (places.coordinates >= np.array(torus.sizes)).any():
        raise InputError(f"a device's coordinates are not on {torus.text}")
    if (places.slices < 0).any() or (places.slices >= torus.slices).any():
        raise InputError(f"a device is in none of {torus.slices} slices")


@dataclass(frozen=True, kw_only=True)
class AxisSpan:
    """The part of one axis that a group spans."""

    axis: int  # 0, 1 or 2.
    size: int  # Positions of the group on the axis, at least 2.
    closed: bool  # Whether they form a ring: links lead from the last on to the first, at the same distance.
    hops: int  # Links between the most distant positions on a line, or from one around a ring to itself.
    sharing: int  # Groups that send over the busiest of these links.


@dataclass(frozen=True, kw_only=True)
class GroupSpan:
    """The place of one group of a collective, as far as its time depends on it.

    Attributes
    ----------
    devices
        Number of devices.
    chips
        Chips of the group in each slice; several of its devices may be cores of one chip.
    slices
        Slices that it spans.
    axes
        Axes that its chips of a slice span as a box.
    ring_sharing, ring_hops
        For chips that form no box, and send along a ring in the order of the group: how often that ring and those of other groups
        use the busiest link, and the links between the most distant neighbours. 0 for boxes.
    dcn_sharing
        Groups that send from the same chip to other slices.
    """

    devices: int
    chips: int
    slices: int = 1
    axes: tuple[AxisSpan, ...] = ()
    ring_sharing: int = 0
    ring_hops: int = 0
    dcn_sharing: int = 1


def spans_of(torus: Torus, places: Places, replica_groups: Sequence[Sequence[int]] | Ints) -> tuple[GroupSpan, ...]:
    """The different spans of a collective's groups, which all communicate at the same time.

    Parameters
    ----------
    replica_groups
        Numbers of devices, [groups, size].

    Raises
    ------
    InputError
        A number is of no device, a device is in two groups or not on the torus, or slices hold unequal parts of a group.
    """
    groups = np.asarray(replica_groups, np.int64)
    if groups.ndim != 2 or groups.size == 0 or groups.min() < 0 or groups.max() >= len(places.slices):
        raise InputError(f"replica groups must be numbers of the program's {len(places.slices)} devices, [groups, size]")
    if len(np.unique(groups)) != groups.size:
        raise InputError("a device is in two replica groups")
    check_places(torus, places)
    parts = [_parts(places, group) for group in groups]
    loads = _box_loads(torus, parts)
    dcn = _dcn_sharing(torus, places, groups)
    rings = _ring_loads(torus, parts)
    return tuple(dict.fromkeys(_span(torus, group_parts, loads, rings, dcn) for group_parts in parts))


@dataclass(frozen=True)
class _TorusPart:
    """The chips of a group in one slice."""

    slice: int
    chips: Ints  # Without repetition, in the order of the group, [chips, 3].
    devices: int
    axes: tuple[Ints, ...] | None  # Positions on each axis, in the order of the span; None: no box.


def _parts(places: Places, group: Ints) -> tuple[_TorusPart, ...]:
    """The parts of a group in each slice; raises `InputError` if they differ in their numbers of chips."""
    parts = []
    for number in dict.fromkeys(places.slices[group].tolist()):
        devices = group[places.slices[group] == number]
        chips = np.array(list(dict.fromkeys(map(tuple, places.coordinates[devices].tolist()))), np.int64)
        positions = tuple(np.unique(chips[:, axis]) for axis in range(_AXES))
        is_box = np.prod([len(values) for values in positions]) == len(chips)
        parts.append(_TorusPart(number, chips, len(devices), positions if is_box else None))
    if len({(len(part.chips), part.devices) for part in parts}) > 1:
        raise InputError("a replica group has unequal numbers of devices in its slices")
    return tuple(parts)


def _arc(values: Ints, size: int, wraps: bool) -> tuple[int, int, bool]:
    """First position and number of links of the shortest way through some positions of an axis, and whether it is a closed ring."""
    if not wraps:
        return int(values[0]), int(values[-1] - values[0]), False
    gaps = np.diff(np.append(values, values[0] + size))
    if len(values) > 1 and (gaps == gaps[0]).all():
        return int(values[0]), size, True
    largest = int(np.argmax(gaps))
    return int(values[(largest + 1) % len(values)]), int(size - gaps[largest]), False


def _box_loads(torus: Torus, parts: Sequence[tuple[_TorusPart, ...]]) -> Ints:
    """Number of boxes that use each link, [slices, axis, x, y, z]; a link is counted at the position that it leads on from."""
    loads = np.zeros((torus.slices, _AXES, *torus.sizes), np.int64)
    for part in (part for group_parts in parts for part in group_parts):
        if part.axes is None:
            continue
        for axis, values in enumerate(part.axes):
            if len(values) > 1:
                first, links, _ = _arc(values, torus.sizes[axis], torus.closed[axis])
                used = (first + np.arange(links)) % torus.sizes[axis]
                loads[part.slice, axis][np.ix_(*(used if one == axis else part.axes[one] for one in range(_AXES)))] += 1
    return loads


def _ring_loads(torus: Torus, parts: Sequence[tuple[_TorusPart, ...]]) -> tuple[Ints, int]:
    """Messages on each link of the rings of groups that form no box, [slices, axis, direction, x, y, z], and the longest way."""
    shape = (torus.slices, _AXES, 2, *torus.sizes)
    loads, longest = np.zeros(shape, np.int64), 0
    for part in (part for group_parts in parts for part in group_parts):
        if part.axes is None:
            for targets in (np.roll(part.chips, -1, axis=0), np.roll(part.chips, 1, axis=0)):
                load, hops = link_loads(torus, part.chips, targets)
                loads[part.slice] += load
                longest = max(longest, hops)
    return loads, longest


def link_loads(torus: Torus, sources: Ints, targets: Ints) -> tuple[Ints, int]:
    """Messages on each link if every source sends one to its target, and the links of the longest way.

    Messages go along the first axis first, then the second, then the third, on each the shorter way (dimension-ordered routing).

    Parameters
    ----------
    sources, targets
        Coordinates of chips of one slice, [messages, 3].

    Returns
    -------
    ndarray, int
        Messages by axis, direction (up, down) and the chip that sends them on, [3, 2, x, y, z].
    """
    loads = np.zeros((_AXES, 2, *torus.sizes), np.int64)
    at, longest = sources.copy(), np.zeros(len(sources), np.int64)
    for axis, size in enumerate(torus.sizes):
        distance = targets[:, axis] - sources[:, axis]
        if torus.closed[axis]:
            distance = (distance + (size - 1) // 2) % size - (size - 1) // 2
        longest += np.abs(distance)
        for step in range(int(np.abs(distance).max(initial=0))):
            moving = np.flatnonzero(np.abs(distance) > step)
            up = distance[moving] > 0
            np.add.at(loads, (axis, np.where(up, 0, 1), *at[moving].T), 1)
            at[moving, axis] = (at[moving, axis] + np.where(up, 1, -1)) % size
    return loads, int(longest.max(initial=0))


def _dcn_sharing(torus: Torus, places: Places, groups: Ints) -> int:
    """Groups over several slices that send from one chip, the most of all chips."""
    crossing = groups[[len(np.unique(places.slices[group])) > 1 for group in groups]]
    if not crossing.size:
        return 1
    x, y, z = places.coordinates.T
    _, y_size, z_size = torus.sizes
    chip = ((places.slices * torus.sizes[0] + x) * y_size + y) * z_size + z
    pairs = np.unique(np.column_stack([chip[crossing].ravel(), np.repeat(np.arange(len(crossing)), crossing.shape[1])]), axis=0)
    return int(np.unique(pairs[:, 0], return_counts=True)[1].max())


def _span(torus: Torus, parts: tuple[_TorusPart, ...], loads: Ints, rings: tuple[Ints, int], dcn_sharing: int) -> GroupSpan:
    """The span of a group; where its slices differ, the busiest links of all count."""
    first = parts[0]
    span = GroupSpan(
        devices=sum(part.devices for part in parts),
        chips=len(first.chips),
        slices=len(parts),
        dcn_sharing=dcn_sharing if len(parts) > 1 else 1,
    )
    if any(part.axes is None for part in parts):
        ring_loads, hops = rings
        busiest = max(int(ring_loads[part.slice].max()) for part in parts)
        return replace(span, ring_sharing=max(busiest, 1), ring_hops=max(hops, 1))
    spans = []
    for axis in range(_AXES):
        in_slices = [_axis_span(torus, part, axis, loads) for part in parts]
        known = [one for one in in_slices if one is not None]
        if known:
            spans.append(max(known, key=lambda one: (not one.closed, one.sharing, one.hops)))
    return replace(span, axes=tuple(spans))


def _axis_span(torus: Torus, part: _TorusPart, axis: int, loads: Ints) -> AxisSpan | None:
    assert part.axes is not None, "a box"
    values = part.axes[axis]
    if len(values) < 2:
        return None
    first, links, closed = _arc(values, torus.sizes[axis], torus.closed[axis])
    used = (first + np.arange(links)) % torus.sizes[axis]
    busiest = loads[part.slice, axis][np.ix_(*(used if one == axis else part.axes[one] for one in range(_AXES)))].max()
    return AxisSpan(axis=axis, size=len(values), closed=closed, hops=links, sharing=int(busiest))
