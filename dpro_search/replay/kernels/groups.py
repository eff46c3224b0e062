"""Replay of a data-parallel job under a grouping of its tensors: no graph is made, what groups do follows from their numbers.

The times are those of the job's graph (`space/job_graph.py`) under the rules of `replay/reference.py`: at an instant, everything
that ends ends, then free devices choose, and so on. A replay may go on from a snapshot of another one that was equal up to then.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats, Ints
from dpro_search.replay.kernels.events import SHORT, earliest, pop, push
from dpro_search.replay.kernels.group_packing import unpacked
from dpro_search.replay.kernels.group_state import (
    ENDED,
    EVENTS,
    WAITS,
    Bytes,
    Grouping,
    Snapshots,
    State,
    begin,
    fill_slots,
    nearest,
    places,
    restore,
    save,
    starts_afresh,
)
from dpro_search.space.group_work import GroupWork
from dpro_search.space.replay_graph import Int32s

# Numbers out of arrays become those of one type: numba compiles the functions that they are given to once for each type.
_whole: Any = np.int64


@njit(nogil=True)
def _enqueue(
    d: int, code: int, now: float, key: Int32s, ints: Int32s, head: int, tail: int, codes: Int32s, ready_us: Floats
) -> None:
    """Put work into a device's line: first in, first out; by key at one instant. Without keys the code is the key."""
    first, at = ints[head + d], ints[tail + d]
    mine = key[code] if len(key) > 0 else code
    while at > first and ready_us[at - 1] == now and (key[codes[at - 1]] if len(key) > 0 else codes[at - 1]) > mine:
        codes[at], ready_us[at] = codes[at - 1], ready_us[at - 1]
        at -= 1
    codes[at], ready_us[at] = code, now
    ints[tail + d] += 1


@njit(nogil=True)
def advance(
    work: GroupWork,
    grouping: Grouping,
    state: State,
    fresh: bool,
    tensor_us: Floats,
    stack: Int32s,
    missing_of_group: Int32s,
    touched: Int32s,
    is_touched: npt.NDArray[np.bool_],
    group_us: Floats,
    snapshots: Snapshots,
    rows_for: Int32s,
    taken_us: Floats,
    every_us: float,
) -> int:
    """Replay to the end.

    Parameters
    ----------
    fresh
        Whether nothing has happened yet.
    tensor_us
        When each row's tensors were made, filled, [R * T].
    stack, missing_of_group, touched, is_touched
        Scratch: [n + 3 R T], [R * T], [devices], [devices, all False].
    group_us
        When each row has the group of each slot, filled from where the replay begins, [R * T].
    snapshots, rows_for, taken_us, every_us
        Snapshots are taken about every so many us, into these rows of the room; `taken_us` is filled with their instants.

    Returns
    -------
    int
        How many snapshots were taken; -1: the job cannot go on.
    """
    missing, received, posted, head, tail, current, due_at, most_due = places(work)
    ints, flags, codes, ready_us = state.ints, state.flags, state.codes, state.ready_us
    due, due_us = ints[due_at:], state.floats[1 : 1 + most_due]
    ends_us = state.floats[1 + most_due : 1 + most_due + work.iterations]
    carried_us = state.floats[1 + most_due + work.iterations :]
    rows, streams, steps, devices = work.rows, work.streams, work.steps, len(work.in_program)
    count, tensors = len(work.duration_us), len(work.tensor_bytes)
    cells, ops_each, tensors_each = rows * tensors, count // work.iterations, tensors // work.iterations
    post, begins, done = count, count + cells, count + 2 * cells  # codes on the stack, after those of ops
    no_key = work.key[:0]
    receivers = streams + rows
    short = devices <= SHORT
    events, ended, stacked, touches, taken = _whole(ints[EVENTS]), _whole(ints[ENDED]), 0, 0, 0
    now = state.floats[0]
    next_us = now + every_us

    groups = 0
    missing_of_group[:] = 0
    for tensor in range(tensors):
        if grouping.slot_of[tensor] == tensor:
            groups += 1
        for row in range(rows):
            cell = row * tensors
            if ints[missing + cell + tensor] > 0:
                missing_of_group[cell + grouping.slot_of[tensor]] += 1
    if fresh:
        for source in work.sources:
            op, d = _whole(source), _whole(work.device[source])
            if not work.in_program[d]:
                _enqueue(d, op, now, work.key, ints, head, tail, codes, ready_us)
        if work.meets:
            for row in range(rows):
                if work.in_program[streams + row]:  # groups in their order
                    for tensor in range(tensors):
                        if grouping.slot_of[tensor] == tensor:
                            codes[ints[tail + streams + row]] = tensor
                            ints[tail + streams + row] += 1
        for d in range(devices):
            touched[d] = d
            is_touched[d] = True
        touches = devices
        for row in range(rows):
            for tensor in range(tensors):
                cell = row * tensors + tensor
                if grouping.slot_of[tensor] == tensor and missing_of_group[cell] == 0:  # nobody makes it
                    stack[stacked] = post + cell
                    stacked += 1

    while True:
        while True:
            while stacked > 0:
                stacked -= 1
                code = _whole(stack[stacked])
                if code < count:  # an op has ended
                    ended += 1
                    ends_us[code // ops_each] = now
                    if work.carried[code] >= 0:
                        carried_us[work.carried[code]] = now
                    for edge in range(work.succ_ptr[code], work.succ_ptr[code + 1]):
                        op = _whole(work.succ_idx[edge])
                        ints[WAITS + op] -= 1
                        if ints[WAITS + op] == 0:
                            d = _whole(work.device[op])
                            if not work.in_program[d]:
                                _enqueue(d, op, now, work.key, ints, head, tail, codes, ready_us)
                            if not is_touched[d]:
                                is_touched[d] = True
                                touched[touches] = d
                                touches += 1
                    for k in range(work.make_ptr[code], work.make_ptr[code + 1]):
                        cell = work.make_idx[k]
                        ints[missing + cell] -= 1
                        if ints[missing + cell] == 0:
                            tensor_us[cell] = now
                            group = cell // tensors * tensors + grouping.slot_of[cell % tensors]
                            missing_of_group[group] -= 1
                            if missing_of_group[group] == 0:
                                stack[stacked] = post + group
                                stacked += 1
                    continue
                row, slot = (code - count) % cells // tensors, (code - count) % tensors
                cell = row * tensors + slot
                if code < begins:  # a row posts a group
                    if work.negotiate_us < 0:
                        stack[stacked] = begins + cell
                        stacked += 1
                        continue
                    ints[posted + slot] += 1
                    if ints[posted + slot] == rows:
                        ints[posted + slot] = 0
                        push(due_us, due, events, now + work.negotiate_us, devices + slot, short)
                        events += 1
                    continue
                d = streams + row
                if code < done:  # a row begins to communicate
                    ints[received + cell] = 0
                    if work.meets:
                        if not work.in_program[d]:
                            _enqueue(d, slot, now, no_key, ints, head, tail, codes, ready_us)
                    elif steps > 0:
                        _enqueue(d, slot * steps, now, no_key, ints, head, tail, codes, ready_us)
                        if flags[cell * steps] != 0:
                            _enqueue(d + rows, slot * steps, now, no_key, ints, head, tail, codes, ready_us)
                            if not is_touched[d + rows]:
                                is_touched[d + rows] = True
                                touched[touches] = d + rows
                                touches += 1
                    else:
                        stack[stacked] = done + cell
                        stacked += 1
                    if not is_touched[d]:
                        is_touched[d] = True
                        touched[touches] = d
                        touches += 1
                    continue
                ended += 1  # a row has a group
                group_us[cell] = now
                tensor = grouping.first[slot]
                while tensor >= 0:
                    for k in range(work.use_ptr[row * tensors + tensor], work.use_ptr[row * tensors + tensor + 1]):
                        op = _whole(work.use_op[k])
                        ints[WAITS + op] -= 1
                        if ints[WAITS + op] == 0:
                            d = _whole(work.device[op])
                            if not work.in_program[d]:
                                _enqueue(d, op, now, work.key, ints, head, tail, codes, ready_us)
                            if not is_touched[d]:
                                is_touched[d] = True
                                touched[touches] = d
                                touches += 1
                    tensor = grouping.following[tensor]

            if events == 0 or earliest(due_us, events, short) != now:
                break
            code = _whole(pop(due_us, due, events, short))
            events -= 1
            if code >= devices:
                slot = (code - devices) % tensors
                ends_us[slot // tensors_each] = now
                agreed = code - devices < tensors
                for row in range(rows):
                    stack[stacked] = (begins if agreed else done) + row * tensors + slot
                    stacked += 1
                    d = streams + row
                    if not agreed:
                        ints[current + d] = -1
                        if not is_touched[d]:
                            is_touched[d] = True
                            touched[touches] = d
                            touches += 1
                continue
            d = code
            code = _whole(ints[current + d])
            ints[current + d] = -1
            if not is_touched[d]:
                is_touched[d] = True
                touched[touches] = d
                touches += 1
            if d < streams:
                stack[0] = code
                stacked = 1
                continue
            slot, step = code // steps, code % steps
            ends_us[slot // tensors_each] = now
            if d < receivers:  # a message has been sent
                sender = step * rows + d - streams
                for k in range(work.dest_ptr[sender], work.dest_ptr[sender + 1]):
                    row = _whole(work.dest_row[k])
                    cell = row * tensors + slot
                    flags[cell * steps + step] = 1
                    if ints[received + cell] == step:
                        to = receivers + row
                        _enqueue(to, code, now, no_key, ints, head, tail, codes, ready_us)
                        if not is_touched[to]:
                            is_touched[to] = True
                            touched[touches] = to
                            touches += 1
                continue
            row = d - receivers
            cell = row * tensors + slot
            ints[received + cell] = step + 1
            if step + 1 == steps:
                stack[0] = done + cell
                stacked = 1
                continue
            _enqueue(streams + row, code + 1, now, no_key, ints, head, tail, codes, ready_us)
            if not is_touched[streams + row]:
                is_touched[streams + row] = True
                touched[touches] = streams + row
                touches += 1
            if flags[cell * steps + step + 1] != 0:
                _enqueue(d, code + 1, now, no_key, ints, head, tail, codes, ready_us)

        for k in range(touches):  # free devices choose
            d = _whole(touched[k])
            is_touched[d] = False
            at = _whole(ints[head + d])
            if ints[current + d] >= 0 or at == ints[tail + d]:
                continue
            if d < streams:
                code = _whole(work.program[at] if work.in_program[d] else codes[at])
                if ints[WAITS + code] > 0:
                    continue  # in program order, and not ready
                until_us = now + work.duration_us[code]
            else:
                code = _whole(codes[at])
                row = (d - streams) % rows
                if work.meets:
                    if ints[received + row * tensors + code] < 0:
                        continue  # likewise
                    ints[head + d] = at + 1
                    ints[current + d] = code
                    ints[posted + code] += 1
                    if ints[posted + code] == rows:
                        size_bytes = grouping.size_bytes[code]
                        takes_us = np.inf
                        for way in range(len(work.way_us)):
                            takes_us = min(takes_us, work.way_us[way] + size_bytes * work.way_us_per_byte[way])
                        until_us = now + takes_us
                        push(due_us, due, events, until_us, devices + tensors + code, short)
                        events += 1
                    continue
                step = code % steps
                message_bytes = grouping.size_bytes[code // steps] / work.divide[step]
                if d < receivers:
                    until_us = now + (work.latency_us + message_bytes / work.bytes_per_us[step * rows + row])
                else:
                    until_us = now + message_bytes * work.reduce_us_per_byte[step]
            ints[head + d] = at + 1
            ints[current + d] = code
            push(due_us, due, events, until_us, d, short)
            events += 1
        touches = 0
        if events == 0:
            break
        now = earliest(due_us, events, short)
        if now >= next_us and taken < len(rows_for):
            ints[EVENTS], ints[ENDED], state.floats[0] = events, ended, now
            save(work, state, snapshots, _whole(rows_for[taken]))
            taken_us[taken] = now
            taken += 1
            next_us += every_us
    state.floats[0] = now
    return taken if ended == count + groups * rows else -1


@njit(nogil=True)
def find(
    table: Ints,
    work_ints: Int32s,
    work_floats: Floats,
    group_of: Ints,
    slot_of: Int32s,
    first: Int32s,
    following: Int32s,
    size_bytes: Floats,
    base_slots: Int32s,
    base_tensor_us: Floats,
    snapshot_us: Floats,
) -> tuple[int, int]:
    """Fill in a grouping (`fill_slots`), and say from where it can go on (`nearest`); the work is `Packed`."""
    work = unpacked(table, work_ints, work_floats)
    each = work.tensor_bytes[: len(group_of)]
    fill_slots(group_of, each, work.iterations, Grouping(slot_of, first, following, size_bytes))
    return nearest(work, slot_of, base_slots, base_tensor_us, snapshot_us)


@njit(nogil=True)
def run(
    table: Ints,
    work_ints: Int32s,
    work_floats: Floats,
    slot_of: Int32s,
    first: Int32s,
    following: Int32s,
    size_bytes: Floats,
    ints: Int32s,
    floats: Floats,
    flags: Bytes,
    codes: Int32s,
    ready_us: Floats,
    saved_ints: Int32s,
    saved_floats: Floats,
    saved_flags: Bytes,
    saved_codes: Int32s,
    saved_ready_us: Floats,
    stack: Int32s,
    missing_of_group: Int32s,
    touched: Int32s,
    is_touched: npt.NDArray[np.bool_],
    group_us: Floats,
    tensor_us: Floats,
    from_row: int,
    rows_for: Int32s,
    taken_us: Floats,
    every_us: float,
) -> tuple[int, float, bool]:
    """Replay a `Grouping` in a `State`, from a row of `Snapshots` (-1: from the start), see `advance`; the work is `Packed`.

    Returns
    -------
    tuple
        Snapshots taken, or -1 if the job cannot go on; when the last op ends; whether the next iteration `starts_afresh` then.
    """
    work = unpacked(table, work_ints, work_floats)
    grouping = Grouping(slot_of, first, following, size_bytes)
    state = State(ints, floats, flags, codes, ready_us)
    snapshots = Snapshots(saved_ints, saved_floats, saved_flags, saved_codes, saved_ready_us)
    if from_row < 0:
        begin(work, state, tensor_us)
    else:
        restore(work, state, snapshots, from_row)
    taken = advance(
        work, grouping, state, from_row < 0, tensor_us, stack, missing_of_group, touched, is_touched, group_us, snapshots, rows_for,
        taken_us, every_us,
    )  # fmt: skip
    makespan_us = state.floats[0]
    return taken, makespan_us, taken >= 0 and starts_afresh(work, state, makespan_us)
