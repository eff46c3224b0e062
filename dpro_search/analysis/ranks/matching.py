"""Matching collectives over ranks, by group and sequence number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dpro_search.collect.readers.stamps.records import FIRST_COLLECTIVE, RECEIVE, SEND, RankStamps, Records, StampedGroup

Ints = npt.NDArray[np.int64]


def matched(stamps: Sequence[RankStamps]) -> Iterator[tuple[StampedGroup, Ints, list[Records]]]:
    """Each group, the places of its ranks, and their records of the collectives that all of them have, in equal order."""
    place_of = {each.rank: place for place, each in enumerate(stamps)}
    for group, numbers in groups_of(stamps).items():
        if len(numbers) < 2 or any(rank not in place_of for rank in group.ranks):
            continue
        places = np.array([place_of[rank] for rank in group.ranks])
        parts = [part_of(stamps[place], numbers[place]) for place in places]
        low, high = max(int(part["sequence"][0]) for part in parts), min(int(part["sequence"][-1]) for part in parts)
        if high >= low and all(len(part) == int(part["sequence"][-1]) - int(part["sequence"][0]) + 1 for part in parts):
            firsts = [int(part["sequence"][0]) for part in parts]
            yield group, places, [part[low - first : high - first + 1] for part, first in zip(parts, firsts, strict=True)]


def groups_of(stamps: Sequence[RankStamps]) -> dict[StampedGroup, dict[int, int]]:
    """Number that each rank (by place) uses for each group."""
    groups: dict[StampedGroup, dict[int, int]] = defaultdict(dict)
    for place, each in enumerate(stamps):
        for number, group in each.groups.items():
            if each.rank in group.ranks and ((each.records["group"] == number) & _is_collective(each)).any():
                groups[group][place] = number
    return {group: numbers for group, numbers in groups.items() if len(numbers) == len(group.ranks)}


def _is_collective(stamps: RankStamps) -> npt.NDArray[np.bool_]:
    names = np.array(stamps.operations)
    messages = np.isin(names, (SEND, RECEIVE, "recv_any_source_"))[stamps.records["operation"]]
    flags: npt.NDArray[np.bool_] = (stamps.records["operation"] >= FIRST_COLLECTIVE) & ~messages
    return flags


def part_of(stamps: RankStamps, number: int) -> Records:
    part: Records = stamps.records[(stamps.records["group"] == number) & _is_collective(stamps)]
    sequence = part["sequence"]
    if (sequence[1:] >= sequence[:-1]).all():
        return part
    ordered: Records = part[np.argsort(sequence, kind="stable")]
    return ordered
