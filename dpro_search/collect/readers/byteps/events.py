"""Events of a job of BytePS, from what its workers and servers wrote: stages, messages on the wire, work of servers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dpro_search.collect.readers.byteps.logs import MessageLane, MessageLog, ServerOp, rounds_of, wire_times
from dpro_search.collect.readers.event_table import EventTable
from dpro_search.collect.readers.mxnet import importer as mxnet_profiler
from dpro_search.collect.readers.mxnet.files import COMM, Profile
from dpro_search.collect.recorded_names import role_in_mxnet, role_in_server
from dpro_search.collect.trace import ClockReport, CollectiveKind, EventKind, TensorInfo, Trace

FORMAT = "byteps"
STAGES = ("REDUCE", "COPYD2H", "PUSH", "PULL", "COPYH2D", "BROADCAST")

_KINDS = {"PUSH": EventKind.COLLECTIVE, "PULL": EventKind.COLLECTIVE}  # the others move data within the worker
_COLLECTIVE_KINDS = {
    "REDUCE": CollectiveKind.REDUCE,  # among the devices of a worker, as is BROADCAST
    "PUSH": CollectiveKind.PUSH,
    "PULL": CollectiveKind.PULL,
    "BROADCAST": CollectiveKind.BROADCAST,
}
_QUEUE_STREAM, _COMPUTE_STREAM, _WIRE_STREAM = 99, 100, 1000


@dataclass(kw_only=True)
class Push:
    """The stages of one partition in one step on one worker: events by stage."""

    tensor: str
    key: int
    step: int
    span_us: dict[str, tuple[float, float]] = field(default_factory=dict)
    event: dict[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class WorkerEvents:
    path: Path
    totals: list[tuple[float, float, str, int]] = field(default_factory=list)  # start, end, tensor, step
    parts: dict[tuple[int, int], Push] = field(default_factory=dict)  # by key and step
    log: MessageLog | None = None
    profile: Profile | None = None


@dataclass(kw_only=True)
class Server:
    ops: list[ServerOp] = field(default_factory=list)
    log: MessageLog | None = None


def inside(times: Sequence[float], span: tuple[float, float]) -> int | None:
    """Index of the first instant within a span."""
    position = bisect_left(times, span[0])
    return position if position < len(times) and times[position] <= span[1] else None


class JobEvents:
    """Makes the events of all ranks."""

    def __init__(
        self,
        workers: Sequence[WorkerEvents],
        servers: Sequence[Server],
        names: dict[str, str],
        clock: ClockReport,
        base_us: float,
        dropped: Counter[str],
    ) -> None:
        self._workers, self._servers, self._clock, self._dropped = workers, servers, clock, dropped
        self._base_us = base_us
        self._names = names
        self._tensor = {tensor: number for number, tensor in enumerate(names)}
        self._table = EventTable()
        self._sent = [{(tensor, step) for _, _, tensor, step in worker.totals} for worker in workers]
        self._whole: dict[tuple[str, int], int] = {}  # number of the collective of a tensor in a step
        self._totals: dict[tuple[int, int], list[int]] = defaultdict(list)  # events of a rank's push-pulls in a step, by start
        self._collectives = len(set().union(*self._sent))  # those of messages come after
        self._arrivals: dict[tuple[int, int], list[tuple[float, int, int]]] = defaultdict(list)  # server, key: when, event, step
        self._answers: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)  # server, key: when sent, event

    def trace(self) -> Trace:
        for rank, worker in enumerate(self._workers):
            self._add_worker(rank, worker)
        self._add_causes_between_workers()
        for rank, worker in enumerate(self._workers):
            self._add_wire(rank, worker)
        for number, server in enumerate(self._servers):
            self._add_server(number, server)
        spans = self._step_spans()
        return self._table.trace(
            format=FORMAT,
            framework="mxnet" if any(worker.profile for worker in self._workers) else "unknown",
            comm="byteps",
            clock=self._clock,
            steps=((rank, step, *span) for (rank, step), span in spans.items()),
            dropped=self._dropped,
            warnings=self._warnings(),
            tensors=(TensorInfo(name=name, node="", dtype="", shape=(), size_bytes=0) for name in self._names.values()),
            is_aligned=True,
        )

    def _step_spans(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Start and end of each step of each worker: its iteration where a profile marks it, else its push-pulls."""
        spans: dict[tuple[int, int], tuple[float, float]] = {}
        for rank, worker in enumerate(self._workers):
            totals: dict[int, list[float]] = defaultdict(list)
            for start, end, _, step in worker.totals:
                totals[step] += [start, end]
            iterations = mxnet_profiler.step_starts(worker.profile) if worker.profile else []
            if worker.profile:
                computing = [op for op in worker.profile.ops if not COMM.search(op.name)]
                self._dropped["operators outside the traced steps"] += len(computing)
                self._dropped["push-pulls written twice"] += len(worker.profile.ops) - len(computing)
                self._dropped["API calls"] += len(worker.profile.calls)
            for step, times in totals.items():
                around = [(start, end) for _, start, end in iterations if start <= min(times) <= end]
                start, end = around[0] if around else (min(times), max(times))
                spans[rank, step] = self._at(rank, start), self._at(rank, end)
                if around and worker.profile:
                    self._add_compute(rank, worker.profile, step, start, end)
        return spans

    def _add_compute(self, rank: int, profile: Profile, step: int, start_us: float, end_us: float) -> None:
        """A worker's operators in a step. Its gradients follow the last one before them, and the first one after them follows."""
        ops = [op for op in profile.ops if start_us <= op.start_us <= end_us and not COMM.search(op.name)]
        self._dropped["operators outside the traced steps"] -= len(ops)
        events = [
            self._table.add(
                op.name,
                EventKind.OP,
                rank=rank,
                stream=_COMPUTE_STREAM + op.thread,
                start_us=self._at(rank, op.start_us),
                end_us=self._at(rank, op.end_us),
                step=step,
                role=role_in_mxnet(op.name),
            )
            for op in ops
        ]
        begins, ends = [op.start_us for op in ops], np.maximum.accumulate([op.end_us for op in ops]).tolist()
        totals = [total for total in self._workers[rank].totals if total[3] == step]
        for comm, (enqueued_us, back_us, *_) in zip(self._totals[rank, step], totals, strict=True):
            producer, consumer = bisect_right(ends, enqueued_us) - 1, bisect_left(begins, back_us)
            if producer >= 0:
                self._table.need(events[producer], comm)
            if consumer < len(ops):
                self._table.need(comm, events[consumer])

    def _warnings(self) -> tuple[str, ...]:
        warnings = ["sizes of tensors are not in the files"]
        without = [str(rank) for rank, worker in enumerate(self._workers) if worker.log is None]
        if without:
            warnings.append(f"ranks {', '.join(without)}: no message log, so wire time within PUSH and PULL is not known")
        if not any(server.ops for server in self._servers):
            warnings.append("no server log, so the servers' work within PULL is not known")
        return tuple(warnings)

    def _at(self, rank: int, time_us: float) -> float:
        """An epoch time of a rank's clock on the aligned clock of the trace."""
        return time_us - self._base_us - self._clock.offset_us[rank]

    def _number(self) -> int:
        self._collectives += 1
        return self._collectives - 1

    def _add_worker(self, rank: int, worker: WorkerEvents) -> None:
        for start, end, tensor, step in worker.totals:
            number = self._whole.setdefault((tensor, step), len(self._whole))
            event = self._table.add(
                self._names[tensor],
                EventKind.COMM,
                rank=rank,
                start_us=self._at(rank, start),
                end_us=self._at(rank, end),
                step=step,
                tensor=self._tensor[tensor],
                collective=number if all((tensor, step) in sent for sent in self._sent) else -1,
            )
            self._totals[rank, step].append(event)
        for part in worker.parts.values():
            before: tuple[int, float] | None = None
            for stage in (stage for stage in STAGES if stage in part.span_us):
                start, end = (self._at(rank, time_us) for time_us in part.span_us[stage])
                name = f"{self._names[part.tensor]}[{part.key & 0xFFFF}]"
                about = {"rank": rank, "step": part.step, "tensor": self._tensor[part.tensor]}
                event = self._table.add(
                    f"{name} {stage}",
                    _KINDS.get(stage, EventKind.COPY),
                    start_us=start,
                    end_us=end,
                    stream=1 + STAGES.index(stage),
                    collective_kind=_COLLECTIVE_KINDS.get(stage, CollectiveKind.UNKNOWN),
                    **about,
                )
                if before and stage == "PUSH" and start > before[1]:
                    waits = self._table.add(
                        f"{name} wait for push", EventKind.QUEUE, start_us=before[1], end_us=start, stream=_QUEUE_STREAM, **about
                    )
                    self._table.need(before[0], waits)
                if before:
                    self._table.need(before[0], event)
                part.event[stage] = event
                before = event, end

    def _add_causes_between_workers(self) -> None:
        """A partition is back nowhere before every worker has pushed it. (The acknowledgement of a push may still be under way.)"""
        for key in {key for worker in self._workers for key in worker.parts}:
            pushes = [worker.parts[key].event.get("PUSH") for worker in self._workers if key in worker.parts]
            for worker in self._workers:
                back = worker.parts[key].event.get("COPYH2D") if key in worker.parts else None
                push_of_worker = worker.parts[key].event.get("PUSH") if key in worker.parts else None
                for push in pushes:
                    if (
                        back is not None
                        and push is not None
                        and push != push_of_worker
                        and self._table.end_us[push] <= self._table.start_us[back]
                    ):
                        self._table.need(push, back)

    def _add_wire(self, rank: int, worker: WorkerEvents) -> None:
        """Time on the wire of the messages of a worker's pushes and pulls."""
        if worker.log is None:
            return
        for number, server in enumerate(self._servers):
            if server.log is None:
                continue
            for part in worker.parts.values():
                request = MessageLane(True, True, part.key, worker.log.node, server.log.node)
                answer = MessageLane(False, False, part.key, server.log.node, worker.log.node)
                self._add_message(rank, number, part, "PUSH", wire_times(request, worker.log, server.log), 0)
                self._add_message(rank, number, part, "PULL", wire_times(answer, server.log, worker.log), 1)

    def _add_message(
        self, rank: int, number: int, part: Push, stage: str, times: Sequence[tuple[int, int]], worker_end: int
    ) -> None:
        """The message whose end `worker_end` (0: sent, 1: received by the worker) lies within the worker's stage."""
        if stage not in part.span_us:
            return
        position = inside([pair[worker_end] for pair in times], part.span_us[stage])
        if position is None:
            self._dropped["stages without a logged message"] += bool(times)
            return
        server_rank = len(self._workers) + number
        ends = (rank, server_rank) if worker_end == 0 else (server_rank, rank)
        start, end = (self._at(end_rank, time_us) for end_rank, time_us in zip(ends, times[position], strict=True))
        self._table.collective[part.event[stage]] = self._number()
        event = self._table.add(
            f"{self._names[part.tensor]}[{part.key & 0xFFFF}] {stage} wire",
            EventKind.COLLECTIVE,
            rank=server_rank,
            stream=_WIRE_STREAM + 2 * rank + worker_end,
            start_us=start,
            end_us=max(start, end),
            step=part.step,
            tensor=self._tensor[part.tensor],
            collective=self._number(),
            collective_kind=_COLLECTIVE_KINDS[stage],
        )
        if stage == "PUSH":
            if "COPYD2H" in part.event:
                self._table.need(part.event["COPYD2H"], event)
            self._arrivals[number, part.key].append((times[position][1], event, part.step))
        else:
            self._answers[number, part.key].append((times[position][0], event))
            if "COPYH2D" in part.event:
                self._table.need(event, part.event["COPYH2D"])

    def _add_server(self, number: int, server: Server) -> None:
        """Work of a server's threads: each part waits for the thread, is copied or summed; the sum is answered."""
        rank = len(self._workers) + number
        tensor_of = {key: part.tensor for worker in self._workers for (key, _), part in worker.parts.items()}
        for members in rounds_of(server.ops):
            ops = [server.ops[i] for i in members]
            key = ops[0].key
            tensor = tensor_of.get(key)
            causes, step = self._causes(number, key, ops)
            name = f"{self._names[tensor]}[{key & 0xFFFF}]" if tensor else f"key {key}"
            about = {"rank": rank, "step": step, "tensor": self._tensor[tensor] if tensor else -1}
            before = None
            for position, op in enumerate(ops):
                start, end = self._at(rank, op.start_us), self._at(rank, op.end_us)
                event = self._table.add(
                    f"{name} {op.operation}",
                    EventKind.SERVER,
                    start_us=start,
                    end_us=end,
                    stream=op.thread,
                    role=role_in_server(op.operation),
                    **about,
                )
                if before is not None:
                    self._table.need(before, event)
                if position < len(causes):
                    arrived_us, cause, _ = causes[position]
                    self._table.need(cause, event)
                    if self._at(rank, arrived_us) < start:
                        self._table.add(
                            f"{name} wait for server",
                            EventKind.QUEUE,
                            start_us=self._at(rank, arrived_us),
                            end_us=start,
                            stream=_QUEUE_STREAM,
                            **about,
                        )
                before = event
            if before is not None and ops[-1].operation == "COPY_MERGED" and step >= 0:
                for sent_us, answer in self._answers[number, key]:
                    if sent_us >= ops[-1].end_us and self._table.step[answer] == step:
                        self._table.need(before, answer)

    def _causes(self, number: int, key: int, ops: Sequence[ServerOp]) -> tuple[list[tuple[float, int, int]], int]:
        """The arrivals that a round's copies and sums worked on, in order, and the round's step; -1 outside the traced steps."""
        taking = [op for op in ops if op.operation != "COPY_MERGED"]
        logged = sorted(self._arrivals[number, key])
        if logged and taking:
            known = bisect_right([arrived_us for arrived_us, _, _ in logged], taking[-1].start_us)
            causes = logged[max(known - len(taking), 0) : known]
            if len(causes) == len(taking) and len({step for _, _, step in causes}) == 1:
                self._arrivals[number, key] = logged[known:]  # no later round can work on these
                return causes, causes[0][2]
            return [], -1
        rank = len(self._workers) + number
        middle_us = self._at(rank, (ops[0].start_us + ops[-1].end_us) / 2)
        for worker_rank, worker in enumerate(self._workers):
            for (part_key, step), part in worker.parts.items():
                if part_key == key and {"PUSH", "PULL"} <= set(part.span_us):
                    first, last = part.span_us["PUSH"][0], part.span_us["PULL"][1]
                    if self._at(worker_rank, first) <= middle_us <= self._at(worker_rank, last):
                        return [], step
        return [], -1
