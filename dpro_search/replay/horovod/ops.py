"""One replayed iteration of a Horovod job as a `Timeline` of ops: for Perfetto, tables, and the critical path.

The ops of a rank are the stretches of its main stream, each until the last tensor of a collective is enqueued, and what it updates
after the last collective. Beside them are its parts of the collectives, phase by phase; before each one it waits for Horovod's next
cycle and its negotiation. Ranks that behave alike are one: the first of them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.horovod import machine
from dpro_search.replay.horovod.timeline import HorovodReplay
from dpro_search.replay.kernels.times import OpTimes
from dpro_search.replay.timeline import Timeline
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import OrderPolicy

_PHASES = {machine.COPY_IN: "copy in", machine.LATENCY: "latency", machine.TRANSFER: "transfer", machine.COPY_OUT: "copy out"}


@dataclass(frozen=True)
class _FusedAllReduce:
    """A fused all-reduce: when each rank had enqueued its last tensor, and the names and ends of its phases."""

    tensors: int
    enqueued_us: dict[int, float]
    start_us: float
    phases: list[tuple[str, float]]

    @property
    def end_us(self) -> float:
        return self.phases[-1][1]


@dataclass
class _OpRows:
    """Ops of a timeline and their times, in the order in which they are added."""

    builder: GraphBuilder
    rows: list[tuple[float, float, float, float]]  # ready, start, moved, end

    def add(
        self,
        device: int,
        kind: OpKind,
        name: str,
        times: tuple[float, float, float, float],
        after: list[int],
        collective: int | None,
    ) -> int:
        self.rows.append(times)
        return self.builder.add_op(device, times[3] - times[2], kind=kind, name=name, after=after, collective=collective)


def iteration_ops(timeline: HorovodReplay) -> Timeline:
    """An iteration in the middle of a logged replay; the first rank begins it at 0.

    Raises
    ------
    InputError
        The replay was not logged.
    """
    log = timeline.log
    steps = log[log[:, machine.LOG_KIND] == machine.LOG_STEP]
    if not len(steps):
        raise InputError("the replay has no log: ask for one with log=True")
    iteration = int(steps[:, machine.LOG_ITERATION].max()) // 2
    rows = steps[steps[:, machine.LOG_ITERATION] == iteration]
    begin_us = float(rows[:, machine.LOG_START].min())
    ends_us = {int(row[machine.LOG_RANK]): float(row[machine.LOG_END]) - begin_us for row in rows}
    begins_us = {int(row[machine.LOG_RANK]): float(row[machine.LOG_START]) - begin_us for row in rows}
    main = log[(log[:, machine.LOG_KIND] == machine.LOG_MAIN) & (log[:, machine.LOG_ITERATION] == iteration)]
    collectives = _collectives(log, begin_us, max(ends_us.values()))
    # A main stream whose work is used up exactly at an event leaves no row: then it ends where it has enqueued its last tensor.
    main_us = {rank: max([begins_us[rank], *(one.enqueued_us[rank] for one in collectives)]) for rank in ends_us}
    main_us |= {int(row[machine.LOG_RANK]): float(row[machine.LOG_END]) - begin_us for row in main}
    ops = _OpRows(GraphBuilder(), [])
    stream = {rank: ops.builder.add_device(rank, OrderPolicy.PROGRAM, f"main stream of rank {rank}") for rank in ends_us}
    beside = {rank: ops.builder.add_device(rank, OrderPolicy.PROGRAM, f"Horovod of rank {rank}") for rank in ends_us}
    enqueuing = {rank: _add_main(ops, stream[rank], rank, begins_us[rank], main_us[rank], collectives) for rank in ends_us}
    last = _add_collectives(ops, beside, collectives, enqueuing)
    for rank, end_us in ends_us.items():
        returned_us = collectives[-1].end_us if collectives else 0.0
        start_us = min(max(main_us[rank], returned_us), end_us)
        times = (start_us, start_us, start_us, end_us)
        ops.add(stream[rank], OpKind.UPDATE, f"update@{rank}", times, last.get(rank, []), None)
    ready, start, moved, end = (np.array(column) for column in zip(*ops.rows, strict=True))
    order = np.lexsort((np.arange(len(start)), start)).astype(np.int32)
    return Timeline(
        graph=ops.builder.build(),
        times=OpTimes(ready, start, moved, end, order),
        iteration_us=timeline.iteration_us,
        settled=timeline.settled,
    )


def _add_main(
    ops: _OpRows, device: int, rank: int, begin_us: float, end_us: float, collectives: list[_FusedAllReduce]
) -> dict[int, int]:
    """A rank's main stream, cut where it has enqueued the last tensor of a collective; returns the op before each cut."""
    cuts = sorted((one.enqueued_us[rank], number) for number, one in enumerate(collectives))
    before: dict[int, int] = {}
    now_us = begin_us
    if begin_us > 0:
        ops.add(device, OpKind.UPDATE, f"update of the iteration before@{rank}", (0.0, 0.0, 0.0, begin_us), [], None)
    for enqueued_us, number in cuts:
        until_us = max(enqueued_us, now_us)
        name = f"script, forward, backward until {_name(number, collectives)}@{rank}"
        before[number] = ops.add(device, OpKind.BACKWARD, name, (now_us, now_us, now_us, until_us), [], None)
        now_us = until_us
    rest = (now_us, now_us, now_us, max(end_us, now_us))
    ops.add(device, OpKind.BACKWARD, f"end of backward@{rank}", rest, [], None)
    return before


def _add_collectives(
    ops: _OpRows, device: dict[int, int], collectives: list[_FusedAllReduce], enqueuing: dict[int, dict[int, int]]
) -> dict[int, list[int]]:
    """Negotiation and all-reduce of each collective on every rank; returns each rank's last part."""
    last: dict[int, list[int]] = {}
    done_us, groups = -np.inf, itertools.count()
    for number, one in enumerate(collectives):
        name, group = _name(number, collectives), next(groups)
        for rank, on in device.items():
            times, after = _negotiated(one, rank, done_us), [enqueuing[rank][number]]
            last[rank] = [ops.add(on, OpKind.HOST, f"{name}@{rank}", times, after, group)]
        now_us = one.start_us
        for phase, end_us in one.phases:
            group = next(groups)
            for rank, on in device.items():
                times = (now_us, now_us, now_us, end_us)
                last[rank] = [ops.add(on, OpKind.COMM, f"{name}, {phase}@{rank}", times, last[rank], group)]
            now_us = end_us
        done_us = one.end_us
    return last


def _negotiated(one: _FusedAllReduce, rank: int, done_us: float) -> tuple[float, float, float, float]:
    """Times of a rank's negotiation: it starts when the tensors are enqueued and the collective before is done."""
    starts_us = {other: max(enqueued_us, done_us) for other, enqueued_us in one.enqueued_us.items()}
    return one.enqueued_us[rank], starts_us[rank], max(starts_us.values()), one.start_us


def _name(number: int, collectives: list[_FusedAllReduce]) -> str:
    tensors = collectives[number].tensors
    return f"all-reduce {number} of {tensors} tensor{'s' if tensors != 1 else ''}"


def _collectives(log: Floats, begin_us: float, end_us: float) -> list[_FusedAllReduce]:
    """Collectives that were done within the iteration, in order; times from its begin on."""
    kind, ended_us = log[:, machine.LOG_KIND], log[:, machine.LOG_END] - begin_us
    posts = log[(kind == machine.LOG_POST) & (ended_us > 0) & (ended_us <= end_us)]
    phases = log[(kind >= machine.COPY_IN) & (kind <= machine.COPY_OUT)]
    collectives: list[_FusedAllReduce] = []
    for number in np.unique(posts[:, machine.LOG_COLLECTIVE]):
        posts_of_collective = posts[posts[:, machine.LOG_COLLECTIVE] == number]
        rows = phases[phases[:, machine.LOG_COLLECTIVE] == number]
        enqueued_us = {
            int(rank): max(
                float(posts_of_collective[posts_of_collective[:, machine.LOG_RANK] == rank, machine.LOG_START].max()) - begin_us,
                0.0,
            )
            for rank in np.unique(posts_of_collective[:, machine.LOG_RANK])
        }
        done_us = float(posts_of_collective[:, machine.LOG_END].max()) - begin_us
        if not len(rows):
            continue
        start_us = max(float(rows[:, machine.LOG_START].min()) - begin_us, *enqueued_us.values())
        ended = [(_PHASES[int(row[machine.LOG_KIND])], max(float(row[machine.LOG_END]) - begin_us, start_us)) for row in rows]
        ended[-1] = ended[-1][0], max(done_us, start_us)
        collectives.append(_FusedAllReduce(int(rows[0, machine.LOG_UNIT]), enqueued_us, start_us, ended))
    return sorted(collectives, key=lambda one: one.end_us)
