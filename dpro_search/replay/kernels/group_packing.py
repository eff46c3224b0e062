"""`GroupWork` in three arrays: numba takes 10 us and more to look at a tuple of many arrays, as long as a replay takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats, Ints
from dpro_search.space.group_work import GroupWork
from dpro_search.space.replay_graph import Int32s

_INTS, _FLOATS = 19, 7  # leading fields of `GroupWork` that are arrays of integers, and those after them that are of floats


class Packed(NamedTuple):
    """Where the arrays of integers begin [20], then those of floats [8], then the whole numbers; and the arrays, end to end."""

    table: Ints
    ints: Int32s
    floats: Floats


def packed(work: GroupWork) -> Packed:
    """What `unpacked` makes the same of again."""
    columns: tuple[Any, ...] = work
    ints, floats = columns[:_INTS], columns[_INTS : _INTS + _FLOATS]
    table = [
        *np.cumsum([0, *map(len, ints)]).tolist(),
        *np.cumsum([0, *map(len, floats)]).tolist(),
        *(work.rows, work.streams, work.steps, work.iterations, int(work.meets)),
    ]
    scalars = np.array([work.negotiate_us, work.latency_us])
    return Packed(
        np.array(table, np.int64),
        np.concatenate([column.astype(np.int32) for column in ints]),
        np.concatenate([*(column.astype(np.float64) for column in floats), scalars]),
    )


@njit(nogil=True)
def unpacked(table: Ints, ints: Int32s, floats: Floats) -> GroupWork:
    """The work, as views of the arrays."""
    at, f = table, floats
    return GroupWork(
        ints[at[0] : at[1]],
        ints[at[1] : at[2]],
        ints[at[2] : at[3]],
        ints[at[3] : at[4]],
        ints[at[4] : at[5]],
        ints[at[5] : at[6]],
        ints[at[6] : at[7]],
        ints[at[7] : at[8]],
        ints[at[8] : at[9]],
        ints[at[9] : at[10]],
        ints[at[10] : at[11]],
        ints[at[11] : at[12]],
        ints[at[12] : at[13]],
        ints[at[13] : at[14]],
        ints[at[14] : at[15]],
        ints[at[15] : at[16]],
        ints[at[16] : at[17]],
        ints[at[17] : at[18]],
        ints[at[18] : at[19]],
        f[at[20] : at[21]],
        f[at[21] : at[22]],
        f[at[22] : at[23]],
        f[at[23] : at[24]],
        f[at[24] : at[25]],
        f[at[25] : at[26]],
        f[at[26] : at[27]],
        at[28],
        at[29],
        at[30],
        at[31],
        at[32] != 0,
        f[at[27]],
        f[at[27] + 1],
    )
