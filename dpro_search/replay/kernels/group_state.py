"""What a replay of groups (`groups.py`) is made of: the grouping, the state at an instant, and snapshots of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats, Ints
from dpro_search.space.group_work import GroupWork
from dpro_search.space.replay_graph import Int32s

Bytes = npt.NDArray[np.uint8]

EVENTS, ENDED, WAITS = range(3)  # first entries of `ints`


class State(NamedTuple):
    """A replay at an instant; of R rows, T tensors, n ops, D devices, E = D + 2 T things that can be due, S steps.

    Attributes
    ----------
    ints
        Things due, ops and groups that have ended; then: waits of each op [n], makers missing of each tensor [R * T], messages
        that a group has received, -1 before its post [R * T], rows that posted a group [T], head and tail of each device's line
        and its current work [D each], codes of what is due [E].
    floats
        The instant; times of what is due [E], end of each iteration, end of each carried op.
    flags
        Whether the message of each group's step has come, [R * T * S].
    codes, ready_us
        Waiting work and since when, in the devices' stretches.
    """

    ints: Int32s
    floats: Floats
    flags: Bytes
    codes: Int32s
    ready_us: Floats


class Grouping(NamedTuple):
    """A grouping in the slots of `GroupWork`.

    Attributes
    ----------
    slot_of
        Slot of each tensor: the last tensor of its group, [T].
    first, following
        First tensor of each slot's group, and the one after each in its group, -1 for none, [T].
    size_bytes
        Of each slot's group, [T].
    """

    slot_of: Int32s
    first: Int32s
    following: Int32s
    size_bytes: Floats


class Snapshots(NamedTuple):
    """Room for states: one a row of each array."""

    ints: Int32s
    floats: Floats
    flags: Bytes
    codes: Int32s
    ready_us: Floats


@njit(nogil=True)
def places(work: GroupWork) -> tuple[int, int, int, int, int, int, int, int]:
    """Where in `ints` what follows the waits begins, and E."""
    cells, tensors, devices = len(work.makers), len(work.tensor_bytes), len(work.in_program)
    missing = WAITS + len(work.duration_us)
    received = missing + cells
    posted = received + cells
    head = posted + tensors
    tail, current, due = head + devices, head + 2 * devices, head + 3 * devices
    return missing, received, posted, head, tail, current, due, devices + 2 * tensors


def state_sizes(work: GroupWork) -> tuple[int, int, int, int]:
    """Lengths of a state's ints, floats, flags, and of its lines."""
    events = len(work.in_program) + 2 * len(work.tensor_bytes)
    ints = WAITS + len(work.duration_us) + 2 * len(work.makers) + len(work.tensor_bytes) + 3 * len(work.in_program) + events
    floats = 1 + events + work.iterations + int(work.carried.max(initial=-1)) + 1
    return ints, floats, len(work.makers) * work.steps, int(work.slot_ptr[-1])


@njit(nogil=True)
def fill_slots(group_of: Ints, tensor_bytes: Floats, iterations: int, grouping: Grouping) -> None:
    """Fill in a grouping, group of each tensor of one iteration, for all iterations."""
    tensors = len(group_of)
    last = np.full(tensors, -1, np.int32)
    for tensor in range(tensors):
        last[group_of[tensor]] = tensor
    grouping.first[:] = -1
    grouping.size_bytes[:] = 0.0
    for k in range(iterations):
        base = k * tensors
        for tensor in range(tensors - 1, -1, -1):
            slot = base + last[group_of[tensor]]
            grouping.slot_of[base + tensor] = slot
            grouping.following[base + tensor] = grouping.first[slot]
            grouping.first[slot] = base + tensor
        for tensor in range(tensors):
            grouping.size_bytes[base + last[group_of[tensor]]] += tensor_bytes[tensor]


@njit(nogil=True)
def begin(work: GroupWork, state: State, tensor_us: Floats) -> None:
    """The state before anything has happened; `tensor_us` is filled by `advance`."""
    missing, received, posted, head, tail, current, _, _ = places(work)
    ints, devices = state.ints, len(work.in_program)
    ints[EVENTS] = ints[ENDED] = 0
    # Element by element: numba compiles the message for arrays of unequal length into each assignment, which takes seconds.
    for op in range(len(work.needs)):
        ints[WAITS + op] = work.needs[op]
    for cell in range(len(work.makers)):
        ints[missing + cell] = work.makers[cell]
    ints[received:posted] = -1
    ints[posted:head] = 0
    for d in range(devices):
        filled = d < work.streams and work.in_program[d]
        ints[head + d] = work.slot_ptr[d]
        ints[tail + d] = work.slot_ptr[d + 1] if filled else work.slot_ptr[d]
        ints[current + d] = -1
    state.floats[:] = 0.0
    state.flags[:] = 0
    tensor_us[:] = 0.0


@njit(nogil=True)
def save(work: GroupWork, state: State, snapshots: Snapshots, row: int) -> None:
    """Save a state in a row of the room; of the lines only what waits."""
    _, _, _, head, tail, _, _, _ = places(work)
    for at in range(len(state.ints)):
        snapshots.ints[row, at] = state.ints[at]
    for at in range(len(state.floats)):
        snapshots.floats[row, at] = state.floats[at]
    for at in range(len(state.flags)):
        snapshots.flags[row, at] = state.flags[at]
    for d in range(len(work.in_program)):
        if not work.in_program[d]:
            for at in range(state.ints[head + d], state.ints[tail + d]):
                snapshots.codes[row, at] = state.codes[at]
                snapshots.ready_us[row, at] = state.ready_us[at]


@njit(nogil=True)
def restore(work: GroupWork, state: State, snapshots: Snapshots, row: int) -> None:
    """Bring a saved state back."""
    _, _, _, head, tail, _, _, _ = places(work)
    for at in range(len(state.ints)):
        state.ints[at] = snapshots.ints[row, at]
    for at in range(len(state.floats)):
        state.floats[at] = snapshots.floats[row, at]
    for at in range(len(state.flags)):
        state.flags[at] = snapshots.flags[row, at]
    for d in range(len(work.in_program)):
        if not work.in_program[d]:
            for at in range(state.ints[head + d], state.ints[tail + d]):
                state.codes[at] = snapshots.codes[row, at]
                state.ready_us[at] = snapshots.ready_us[row, at]


@njit(nogil=True)
def starts_afresh(work: GroupWork, state: State, makespan_us: float) -> bool:
    """Whether the next iteration begins everywhere when the last op of this one ends: then all iterations are equal."""
    _, _, _, _, _, _, _, most_due = places(work)
    carried_us = state.floats[1 + most_due + work.iterations :]
    for starter in range(len(work.restart_ptr) - 1):
        latest_us = -1.0
        for k in range(work.restart_ptr[starter], work.restart_ptr[starter + 1]):
            latest_us = max(latest_us, carried_us[work.restart_idx[k]])
        if latest_us < makespan_us:
            return False
    for maker_count in work.makers:
        if maker_count == 0:
            return False  # a tensor that is there at once
    return len(work.restart_ptr) > 1


@njit(nogil=True)
def nearest(work: GroupWork, slot_of: Int32s, base_slots: Int32s, base_tensor_us: Floats, snapshot_us: Floats) -> tuple[int, int]:
    """Which of some replayed groupings, and which of its snapshots, another grouping can go on from with the least to do.

    Parameters
    ----------
    slot_of
        Slot of each tensor, [T].
    base_slots, base_tensor_us, snapshot_us
        The same of each base, [bases, T]; when its tensors were made, [bases, R * T]; instants of its snapshots, ascending, inf
        where there is none, [bases, snapshots].

    Returns
    -------
    tuple
        Base and snapshot; (base, -1): it is the same grouping; (-1, -1): none will do.
    """
    bases, tensors = base_slots.shape
    best_us, base, snapshot = -1.0, -1, -1
    differs = np.zeros(tensors, np.bool_)
    old_us, new_us = np.zeros(tensors), np.zeros(tensors)
    for b in range(bases):
        if snapshot_us.shape[1] == 0 or base_slots[b, 0] < 0:
            continue
        differs[:] = False
        same = True
        for tensor in range(tensors):
            if base_slots[b, tensor] != slot_of[tensor]:
                same = False
                differs[base_slots[b, tensor]] = differs[slot_of[tensor]] = True
        if same:
            return b, -1
        # Nothing differs before the first post of a group that only one of the two has.
        until_us = np.inf
        for row in range(work.rows):
            old_us[:] = new_us[:] = -1.0
            for tensor in range(tensors):
                made_us = base_tensor_us[b, row * tensors + tensor]
                old, new = base_slots[b, tensor], slot_of[tensor]
                old_us[old], new_us[new] = max(old_us[old], made_us), max(new_us[new], made_us)
            for slot in range(tensors):
                if differs[slot]:
                    until_us = min(until_us, old_us[slot] if old_us[slot] >= 0 else np.inf)
                    until_us = min(until_us, new_us[slot] if new_us[slot] >= 0 else np.inf)
        for k in range(snapshot_us.shape[1]):
            if snapshot_us[b, k] <= until_us and snapshot_us[b, k] > best_us:
                best_us, base, snapshot = snapshot_us[b, k], b, k
    return base, snapshot
