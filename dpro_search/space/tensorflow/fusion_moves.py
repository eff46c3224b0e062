"""Groupings of tensors, and the moves that turn one into a neighbour.

A grouping states which tensors travel in one collective: a tuple of groups, each a tuple of tensor names. Every function here is
pure; a move keeps each tensor exactly once and leaves no group empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from dpro_search.collect.trace import Floats, TensorInfo

Grouping = tuple[tuple[str, ...], ...]

_COOL_SHARE = 0.1  # of the hottest weight, for groups from which nothing is expected


def contiguous_groups(tensors: Sequence[TensorInfo], count: int, *, tapered: bool = False) -> Grouping:
    """Cut a sequence of tensors into `count` runs of about equal bytes.

    Parameters
    ----------
    tensors
        In the order in which they become ready.
    count
        Number of groups, 1 to len(tensors).
    tapered
        The first and the last of several are to have half as many bytes: the first can be sent earlier, and less is waited for
        at the end.

    Raises
    ------
    ValueError
        `count` groups cannot be made.

    Notes
    -----
    Cut k lies where the bytes so far are nearest to the first k shares of all bytes, moved as little as needed for no group to be
    empty.
    """
    if not 1 <= count <= len(tensors):
        raise ValueError(f"{len(tensors)} tensors cannot make {count} groups")
    shares = np.full(count, 2)
    if tapered:
        shares[[0, -1]] = 1
    until = np.cumsum(shares)
    so_far_bytes = np.cumsum([0] + [tensor.size_bytes for tensor in tensors])
    cuts = [0]
    for k in range(1, count):
        first, last = cuts[-1] + 1, len(tensors) - (count - k)
        distance = np.abs(so_far_bytes[first : last + 1] - so_far_bytes[-1] * until[k - 1] / until[-1])
        cuts.append(first + int(np.argmin(distance)))
    cuts.append(len(tensors))
    return tuple(tuple(t.name for t in tensors[a:b]) for a, b in itertools.pairwise(cuts))


def threshold_groups(tensors: Sequence[TensorInfo], threshold_bytes: int) -> Grouping:
    """Fill groups in order up to a size; a tensor larger than that goes alone. What dynamic fusion does when it never waits."""
    groups: list[list[str]] = []
    room_bytes = -1
    for tensor in tensors:
        if tensor.size_bytes > room_bytes:
            groups.append([])
            room_bytes = threshold_bytes
        groups[-1].append(tensor.name)
        room_bytes -= tensor.size_bytes
    return tuple(tuple(group) for group in groups)


def canonical(groups: Grouping, position: Mapping[str, int]) -> Grouping:
    """The one spelling of a grouping: tensors by position, groups by their last tensor, which is when they can start."""
    inside = (tuple(sorted(group, key=position.__getitem__)) for group in groups)
    return tuple(sorted(inside, key=lambda group: position[group[-1]]))


def merge_groups(groups: Grouping, index: int) -> Grouping:
    """Join a group with the next one; raises `ValueError` if none exists."""
    if not 0 <= index < len(groups) - 1:
        raise ValueError(f"group {index} of {len(groups)} has no next group")
    return (*groups[:index], groups[index] + groups[index + 1], *groups[index + 2 :])


def split_group(groups: Grouping, index: int, at: int) -> Grouping:
    """Cut a group before its tensor `at`; raises `ValueError` if a half would be empty."""
    group = groups[index]
    if not 1 <= at < len(group):
        raise ValueError(f"a group of {len(group)} cannot be cut at {at}")
    return (*groups[:index], group[:at], group[at:], *groups[index + 1 :])


def move_border(groups: Grouping, index: int, shift: int) -> Grouping:
    """Move the border between a group and the next one.

    Parameters
    ----------
    shift
        Tensors that change sides: positive, the next group's first ones; negative, this group's last ones.

    Raises
    ------
    ValueError
        There is no next group, or a group would be left empty.
    """
    both = merge_groups(groups, index)
    return split_group(both, index, len(groups[index]) + shift)


def move_tensor(groups: Grouping, tensor: str, target: int) -> Grouping:
    """Move one tensor to the end of group `target`; a group that it leaves empty disappears."""
    moved = [tuple(name for name in group if name != tensor) for group in groups]
    moved[target] = (*moved[target], tensor)
    return tuple(group for group in moved if group)


def propose(
    groups: Grouping, position: Mapping[str, int], rng: np.random.Generator, hot: Mapping[str, float] | None = None
) -> Grouping:
    """A random neighbour in canonical spelling: merge, split, border or tensor move, each equally likely where it is possible.

    A grouping without a neighbour (one tensor) comes back unchanged.

    Parameters
    ----------
    hot
        How much is to be gained by changing what a tensor does, by name: groups are chosen accordingly. None or empty: all alike.
    """
    neighbours = [i for i in range(len(groups) - 1) if len(groups[i]) + len(groups[i + 1]) > 2]
    divisible = [i for i, group in enumerate(groups) if len(group) > 1]
    kinds = ["merge", "tensor"] * (len(groups) > 1) + ["split"] * bool(divisible) + ["border"] * bool(neighbours)
    if not kinds:
        return groups
    weights = _group_weights(groups, hot) if hot else None
    pairs = None if weights is None else np.maximum(weights[:-1], weights[1:])
    match kinds[rng.integers(len(kinds))]:
        case "merge":
            moved = merge_groups(groups, _drawn(range(len(groups) - 1), pairs, rng))
        case "split":
            index = _drawn(divisible, weights, rng)
            moved = split_group(groups, index, int(rng.integers(1, len(groups[index]))))
        case "border":
            moved = _shifted_border(groups, _drawn(neighbours, pairs, rng), rng)
        case _:
            source = _drawn(range(len(groups)), weights, rng)
            target = (source + int(rng.integers(1, len(groups)))) % len(groups)
            moved = move_tensor(groups, groups[source][rng.integers(len(groups[source]))], target)
    return canonical(moved, position)


def _group_weights(groups: Grouping, hot: Mapping[str, float]) -> Floats:
    """How often each group is to be chosen: by its hottest tensor, but none never."""
    weights = np.array([max(hot.get(name, 0.0) for name in group) for group in groups])
    return weights + _COOL_SHARE * float(weights.max()) + 1e-12


def _drawn(candidates: Sequence[int], weights: Floats | None, rng: np.random.Generator) -> int:
    if weights is None:
        return candidates[int(rng.integers(len(candidates)))]
    upto = np.cumsum(weights[list(candidates)])
    place = int(np.searchsorted(upto, rng.random() * upto[-1], side="right"))
    return candidates[min(place, len(candidates) - 1)]


def _shifted_border(groups: Grouping, index: int, rng: np.random.Generator) -> Grouping:
    """Short shifts are likelier than long ones: a good grouping is improved by fine adjustments."""
    left, right = len(groups[index]), len(groups[index + 1])
    sides = [1] * (right > 1) + [-1] * (left > 1)
    side = sides[rng.integers(len(sides))]
    longest = right - 1 if side > 0 else left - 1
    return move_border(groups, index, side * min(int(rng.geometric(0.4)), longest))
