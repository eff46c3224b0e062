"""Measures of steps from stamps: each rank's own time, the waits it had and caused, and how long transfers took.

A rank's *own time* is the part of a step in which it does not wait for a collective. It needs one rank's clock only. A rank waits
from the call of `Work.wait` to its return. Where nobody calls it (DDP's reducer waits in C++), it waits from its last enqueue
before the optimizer's step until the last of these collectives has ended. Own time before the first forward pass of a step is
input; the rest is compute.

Every rank is late for the same all-reduce if one is, but only that one has more own time: that tells the origin of a wait, also
over the stages of a pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro_search.analysis.ranks.matching import Ints, matched
from dpro_search.collect.readers.stamps.records import (
    FIRST_COLLECTIVE,
    FORWARD,
    RECEIVE,
    SEND,
    STEP,
    UPDATE,
    RankStamps,
    Records,
    StampedGroup,
)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StepMeasures:
    """Measures of n steps on R ranks, in us.

    Attributes
    ----------
    steps
        Numbers of the steps, [n].
    end_ns
        End of each step on the clock of the first rank, [n].
    length_us
        Length of each step, the median over ranks, [n].
    input_us, compute_us
        Own time of each rank, [n, R].
    waited_us
        Time in which each rank waited for collectives, [n, R].
    ended_us
        End of collectives on each rank from the last arrival on, summed over a step, [2, n, R]: of rings that carry data from rank
        r - 1 to r, and of those that carry it from r + 1 to r; NaN for ranks without any.
    last
        Number of collectives at which each rank arrived last, [n, R].
    collectives
        Number of collectives that were matched over all ranks of their group, [n].
    edges
        Transfer times of messages from one rank to another, summed over a step, [n], by (source, destination).
    """

    steps: Ints
    end_ns: Ints
    length_us: Floats
    input_us: Floats
    compute_us: Floats
    waited_us: Floats
    ended_us: Floats
    last: Ints
    collectives: Ints
    edges: Mapping[tuple[int, int], Floats]


def measured(stamps: Sequence[RankStamps], offsets_ns: Ints, begins_ns: Ints, steps: Ints) -> StepMeasures:
    """Measures of whole steps.

    Parameters
    ----------
    stamps
        Stamps of R ranks with the records of these steps.
    offsets_ns
        What each rank's clock is ahead of the first rank's in each step, [n, R].
    begins_ns
        End of the step before the first one on each rank's clock, [R].
    steps
        Numbers of the steps, ascending, [n].
    """
    count, ranks = len(steps), len(stamps)
    shape = (count, ranks)
    end_ns = np.zeros(shape, np.int64)
    input_us, compute_us, waited_us = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for place, each in enumerate(stamps):
        end_ns[:, place], input_us[:, place], compute_us[:, place], waited_us[:, place] = _one_rank(
            each.records, int(begins_ns[place]), steps
        )
    lengths = np.diff(np.vstack([begins_ns[None], end_ns]), axis=0) / 1e3
    ended_us, last, collectives = _collectives(stamps, offsets_ns, steps)
    return StepMeasures(
        steps=steps,
        end_ns=end_ns[:, 0],
        length_us=np.median(lengths, axis=1),
        input_us=input_us,
        compute_us=compute_us,
        waited_us=waited_us,
        ended_us=ended_us,
        last=last,
        collectives=collectives,
        edges=_messages(stamps, offsets_ns, steps),
    )


def _one_rank(records: Records, begin_ns: int, steps: Ints) -> tuple[Ints, Floats, Floats, Floats]:
    """End of each step, input, compute and waited time of one rank, [n] each."""
    step, count = np.searchsorted(steps, records["step"]), len(steps)
    operation = records["operation"]
    at_us = (records["enqueue_ns"] - begin_ns) / 1e3

    def mark(number: int, without: float) -> Floats:
        marks = np.full(count, without)
        rows = np.flatnonzero(operation == number)
        marks[step[rows]] = at_us[rows]
        return marks

    end_us = mark(STEP, np.nan)
    start_us = np.concatenate([[0.0], end_us[:-1]])
    forward_us = mark(FORWARD, np.nan)
    forward_us = np.where(np.isnan(forward_us), start_us, forward_us)
    update_us = mark(UPDATE, np.nan)
    update_us = np.where(np.isnan(update_us), end_us, update_us)
    waits = np.flatnonzero(~np.isnan(records["resumed_us"]) & (operation >= FIRST_COLLECTIVE))
    wait_from = at_us[waits] + records["waiting_us"][waits]
    wait_us = _alone_us(wait_from, at_us[waits] + records["resumed_us"][waits])
    waited_us: Floats = np.bincount(step[waits], wait_us, count).astype(np.float64)
    early = wait_from < forward_us[step[waits]]
    waited_before_forward_us = np.bincount(step[waits[early]], wait_us[early], count)
    silent = np.flatnonzero(np.isnan(records["resumed_us"]) & ~np.isnan(records["ended_us"]) & (operation >= FIRST_COLLECTIVE))
    last_end_us, last_enqueue_us = np.full(count, -np.inf), np.full(count, -np.inf)
    np.maximum.at(last_end_us, step[silent], at_us[silent] + records["ended_us"][silent])
    np.maximum.at(last_enqueue_us, step[silent], at_us[silent])
    some = np.isfinite(last_end_us)
    waited_us[some] += np.maximum(np.minimum(last_end_us, update_us)[some] - last_enqueue_us[some], 0)
    input_us = np.maximum(forward_us - start_us - waited_before_forward_us, 0)
    compute_us = np.maximum(end_us - start_us - waited_us - input_us, 0)
    return (end_us * 1e3).astype(np.int64) + begin_ns, input_us, compute_us, waited_us


def _alone_us(from_us: Floats, until_us: Floats) -> Floats:
    """Length of each interval without what intervals that began before it cover."""
    order = np.argsort(from_us, kind="stable")
    covered_us = np.concatenate([[-np.inf], np.maximum.accumulate(until_us[order])[:-1]])[: len(order)]
    alone_us = np.zeros(len(order))
    alone_us[order] = np.maximum(until_us[order] - np.maximum(from_us[order], covered_us), 0)
    return alone_us


def _collectives(stamps: Sequence[RankStamps], offsets_ns: Ints, steps: Ints) -> tuple[Floats, Ints, Ints]:
    """Summed ends, times as the last, [n, R] each, and matched collectives, [n]."""
    count, ranks = len(steps), len(stamps)
    ended_us, last, collectives = np.zeros((2, count, ranks)), np.zeros((count, ranks), np.int64), np.zeros(count, np.int64)
    seen = np.zeros((count, ranks), bool)
    for group, places, rows in matched(stamps):
        origin_ns = int(rows[0]["enqueue_ns"][0])
        step = np.searchsorted(steps, rows[0]["step"])
        row = np.clip(step, 0, count - 1)
        enqueue_us = np.stack(
            [(part["enqueue_ns"] - origin_ns - offsets_ns[row, place]) / 1e3 for part, place in zip(rows, places, strict=True)],
            axis=1,
        )
        arrived_us = enqueue_us + np.nan_to_num(np.stack([part["arrived_us"] for part in rows], axis=1))
        end_us = enqueue_us + np.stack([part["ended_us"] for part in rows], axis=1)
        whole = ~np.isnan(end_us).any(axis=1) & (step < count)
        after_us = np.maximum(end_us - arrived_us.max(axis=1, keepdims=True), 0)[whole]
        step = step[whole]
        flows = _flows_from_next(group, stamps[0].operations)[rows[0]["operation"][whole]].astype(np.int64)
        for flow in (0, 1):
            some = flows == flow
            present, begins = np.unique(step[some], return_index=True)
            if len(present):
                ended_us[flow, present[:, None], places] += np.add.reduceat(after_us[some], begins, axis=0)
        np.add.at(last, (step, places[arrived_us[whole].argmax(axis=1)]), 1)
        seen[np.unique(step)[:, None], places] = True
        collectives += np.bincount(step, minlength=count)
    return np.where(seen, ended_us, np.nan), last, collectives


def _messages(stamps: Sequence[RankStamps], offsets_ns: Ints, steps: Ints) -> dict[tuple[int, int], Floats]:
    """Transfer time of messages between each pair of ranks, from when both ends were ready to the end at the receiver."""
    sent, received = (_ends(stamps, offsets_ns, steps, operation) for operation in (SEND, RECEIVE))
    edges: dict[tuple[int, int], Floats] = {}
    for key, (sequence, ready_ns, _, _) in sent.items():
        source, destination, group = key
        if (destination, source, group) not in received:
            continue
        other_sequence, other_ready_ns, end_ns, step = received[destination, source, group]
        _, rows, other_rows = np.intersect1d(sequence, other_sequence, assume_unique=True, return_indices=True)
        transfer_us = np.maximum(end_ns[other_rows] - np.maximum(ready_ns[rows], other_ready_ns[other_rows]), 0) / 1e3
        usable = ~np.isnan(transfer_us)
        total = np.bincount(step[other_rows][usable], transfer_us[usable], len(steps))
        edges[source, destination] = edges.get((source, destination), np.zeros(len(steps))) + total
    return edges


def _ends(
    stamps: Sequence[RankStamps], offsets_ns: Ints, steps: Ints, operation: str
) -> dict[tuple[int, int, str], tuple[Ints, Floats, Floats, Ints]]:
    """Sequence, readiness, end and step of the messages of each (rank, other rank, group)."""
    ends = {}
    for each, offset_ns in zip(stamps, offsets_ns.T, strict=True):
        if operation not in each.operations:
            continue
        rows = each.records[each.records["operation"] == each.operations.index(operation)]
        for number, peer in {(int(row["group"]), int(row["peer"])) for row in rows[["group", "peer"]]}:
            group = each.groups.get(number)
            part = rows[(rows["group"] == number) & (rows["peer"] == peer)]
            if group is None or not 0 <= peer < len(group.ranks):
                continue
            row = np.minimum(np.searchsorted(steps, part["step"]), len(steps) - 1)
            enqueue_ns = part["enqueue_ns"].astype(np.float64) - offset_ns[row]
            waits_us = np.nan_to_num(part["waiting_us"].astype(np.float64)) if operation == RECEIVE else 0.0
            ready_ns, end_ns = enqueue_ns + waits_us * 1e3, enqueue_ns + part["ended_us"] * 1e3
            key = each.rank, group.ranks[peer], group.name
            ends[key] = part["sequence"].astype(np.int64), ready_ns, end_ns, row
    return ends


def _flows_from_next(group: StampedGroup, operations: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Whether the ring of each operation (by its number) carries data from rank r + 1 to r, rather than from r - 1 to r.

    Gloo's all-gather passes data on to the next rank, its all-reduce to the one before (allgather_ring.h, allreduce.cc); what else
    Gloo offers PyTorch is made of these. NCCL's rings pass data on to the next rank.
    """
    return np.array([group.backend == "gloo" and "gather" not in name for name in operations])
