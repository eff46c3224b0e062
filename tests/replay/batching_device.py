"""A second implementation of what replaying a Horovod job means: a graph of fixed ops and a device that batches, in plain Python.

`replay/horovod/machine.py` must have its times (`horovod/test_machine.py`). A rank's main stream is a chain of ops, cut where a
unit is enqueued; what a gradient releases is an op of its update stream. Both streams run one op at a time and share the part of
the rank's core. A unit is an op of one *batching device*, ready once every rank has enqueued it. The device works in cycles:

    SLEEP -> NEGOTIATE -> for each batch: COPY_IN -> LATENCY -> TRANSFER -> COPY_OUT -> SLEEP

A cycle takes what is ready when it begins; `machine.fuse` cuts that into batches. The units of a batch end together.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.machine import machine_constants
from dpro_search.replay.horovod import machine
from dpro_search.space.tensorflow.horovod_job import HorovodJob

SLEEP, NEGOTIATE, COPY_IN, LATENCY, TRANSFER, COPY_OUT = "SLEEP", "NEGOTIATE", "COPY_IN", "LATENCY", "TRANSFER", "COPY_OUT"
_EPSILON = 1e-6  # core time that does not count

Op = tuple[str, int, int, int]  # what, iteration, class, number; class -1: of all ranks


class Graph:
    """Ops of all iterations: work, class, what each waits for, and what waits for it."""

    def __init__(self, job: HorovodJob, sample_of: Ints) -> None:
        self.work_us: dict[Op, float] = {}
        self.waits: dict[Op, int] = defaultdict(int)
        self.successors: dict[Op, list[Op]] = defaultdict(list)
        self.program: list[list[Op]] = [[] for _ in range(job.classes)]
        for k, s in enumerate(sample_of):
            for c, units in enumerate(job.post_order[s]):
                done_us = 0.0
                cuts_us = [job.host_us[s, c] + post_us for post_us in job.post_us[s, c]] + [job.host_us[s, c] + job.main_us[s, c]]
                for number, cut_us in enumerate(cuts_us):
                    self.add(("main", k, c, number), float(cut_us - done_us))
                    done_us = cut_us
                for number, unit in enumerate(units):
                    self.edge(("main", k, c, number), ("unit", k, -1, int(unit)))
                self.add(("end", k, c, 0), 0.0)
                if k > 0:
                    self.edge(("end", k - 1, c, 0), ("main", k, c, 0))
            for i, c in enumerate(job.release_class.tolist()):
                self.work_us["update", k, c, i] = float(job.release_work_us[s, i])
                for unit in job.release_unit[job.release_ptr[i] : job.release_ptr[i + 1]].tolist():
                    self.edge(("unit", k, -1, unit), ("update", k, c, i))
                self.edge(("update", k, c, i), ("end", k, c, 0))

    def add(self, op: Op, work_us: float) -> None:
        """An op of a main stream."""
        self.work_us[op] = work_us
        self.program[op[2]].append(op)

    def edge(self, source: Op, target: Op) -> None:
        """The target waits for the source."""
        self.waits[target] += 1
        self.successors[source].append(target)


@dataclass
class Work:
    """What is left of an op, or of a state of the device, and how fast it goes."""

    left: float
    speed: float = 0.0

    @property
    def due_us(self) -> float:
        """Time until it ends."""
        return self.left / self.speed if self.speed > 0 else math.inf


class BatchingDevice:
    """Horovod: the units that are ready, and the state of the batch under way."""

    def __init__(self, job: HorovodJob, draws: Floats) -> None:
        self.job, self.costs = job, job.comm
        self.draws = itertools.cycle(draws)
        self.queue: list[Op] = []
        self.batches: deque[list[Op]] = deque()
        self.state, self.work = SLEEP, Work(0.0)
        self.state_us = self.cycle_us = 0.0
        self.negotiation_us = self.latency_us = 1.0
        self.size_bytes, self.slower = 0.0, 1.0
        self.sent_by_us, self.spared_us_per_byte = -job.comm.burst_us, 0.0
        self.crowd = float(np.bincount(job.core, weights=job.on_core).max())

    def leave_state(self, now_us: float, computes: bool, main_runs: bool) -> list[Op]:
        """Begin the next state; returns the units that have ended."""
        costs, ended, before_us = self.costs, [], self.state_us
        self.state_us = now_us
        if self.state == COPY_OUT:
            ended = self.batches.popleft()
        if self.state == SLEEP:
            self.cycle_us = now_us
            self.fuse()
            samples = costs.negotiate_busy_us if computes else costs.negotiate_idle_us
            self.negotiation_us = max(float(samples[int(next(self.draws) * len(samples))]), 1.0)
            self.enter(NEGOTIATE, self.negotiation_us)
        elif self.state == COPY_IN:
            at_saturation = self.size_bytes / machine_constants().host.saturation_bytes
            mean_us = costs.alpha_busy_us + costs.alpha_more_us * (1 - math.exp(-at_saturation))
            latency_us = -mean_us * math.log(1 - next(self.draws)) if main_runs else costs.alpha_tail_us
            self.slower = float(self.job.ratio[np.searchsorted(self.job.ratio_from_bytes, self.size_bytes, side="right") - 1])
            self.latency_us = max(latency_us * self.slower, 1.0)
            self.enter(LATENCY, self.latency_us)
        elif self.state == LATENCY:
            self.sent_by_us = max(self.sent_by_us, now_us - costs.burst_us)
            self.spared_us_per_byte = (now_us - self.sent_by_us) / max(self.size_bytes, 1.0)
            self.enter(TRANSFER, self.size_bytes)
        elif self.state == TRANSFER:
            self.sent_by_us = min(self.sent_by_us + self.size_bytes * costs.beta_tail_us * self.slower, now_us)
            self.enter(COPY_OUT, self.size_bytes * costs.copy_out_us * self.crowd)
        elif self.batches:
            self.size_bytes = float(sum(self.job.unit_bytes[unit] for *_, unit in self.batches[0]))
            self.enter(COPY_IN, (costs.dispatch_us + self.size_bytes * costs.copy_in_us) * self.crowd)
        else:
            rest_us = max(self.cycle_us + self.job.cycle_us - now_us, 0.0)
            self.enter(SLEEP, 1.0 if rest_us == 0.0 and before_us == now_us else rest_us)
        return ended

    def enter(self, state: str, left: float) -> None:
        """Begin a state of so many us, or so many bytes."""
        self.state, self.work = state, Work(left)

    def fuse(self) -> None:
        """Cut what is ready into batches."""
        agreed = sorted(self.queue, key=lambda op: op[3])
        self.queue.clear()
        batch_of = np.full(len(agreed), -1)
        sizes = self.job.unit_bytes[[unit for *_, unit in agreed]] if agreed else np.zeros(0)
        count = machine.fuse(sizes, self.job.fusion_threshold_bytes, self.job.exact_groups, batch_of)
        self.batches = deque([op for op, batch in zip(agreed, batch_of, strict=True) if batch == number] for number in range(count))

    def takes(self, main_runs: bool) -> tuple[float, float]:
        """Set the speed; returns the share of a core that the state takes, of each of its processes and of the core at most."""
        costs = self.costs
        us_per_byte = (costs.beta_busy_us if main_runs else costs.beta_tail_us) * self.slower
        if self.spared_us_per_byte > 0:
            us_per_byte = max(us_per_byte - self.spared_us_per_byte, costs.cpu_us, machine_constants().host.least_us_per_byte)
        self.work.speed = 1 / us_per_byte if self.state == TRANSFER else 1.0
        share = {
            SLEEP: 0.0,
            NEGOTIATE: min(costs.cycle_cpu_us / self.negotiation_us, 0.9),
            COPY_IN: 1.0,
            LATENCY: min(costs.collective_cpu_us / self.latency_us, 0.5),
            TRANSFER: min(costs.cpu_us / us_per_byte, 1.0),
            COPY_OUT: 1.0,
        }[self.state]
        if costs.poll_share > 0 and self.state in (NEGOTIATE, LATENCY, TRANSFER):
            share = costs.poll_share
        return share, 0.9 if self.state == NEGOTIATE else 1.0


def simulate(job: HorovodJob, sample_of: Ints, draws: Floats) -> tuple[Floats, Floats, int]:
    """Replay ``len(sample_of)`` iterations, each with the durations of one sample.

    Returns
    -------
    tuple
        End of each iteration in each class, [iterations, classes]; breakdown of the whole run (compute, contention, exposed),
        [3, classes]; instants at which speeds were set.
    """
    graph, device = Graph(job, sample_of), BatchingDevice(job, draws)
    on_core = np.bincount(job.core, weights=job.on_core)
    end_us, breakdown = np.zeros((len(sample_of), job.classes)), np.zeros((3, job.classes))
    program = [deque(ops) for ops in graph.program]
    updates: list[deque[Op]] = [deque() for _ in range(job.classes)]
    running: dict[tuple[str, int], tuple[Op, Work]] = {}  # by stream
    now_us, events = 0.0, 0

    def ends(op: Op) -> None:
        what, k, c, _ = op
        if what == "end":
            end_us[k, c] = now_us
        for target in graph.successors[op]:
            graph.waits[target] -= 1
            if graph.waits[target] == 0 and target[0] == "unit":
                device.queue.append(target)
            elif graph.waits[target] == 0 and target[0] == "update":
                updates[target[2]].append(target)

    def settle() -> None:
        """Ops of which nothing is left end and free streams take their next ones, until nothing changes."""
        changed = True
        while changed:
            changed = False
            for stream in itertools.product(("main", "update"), range(job.classes)):
                if stream in running and running[stream][1].left <= _EPSILON:
                    ends(running.pop(stream)[0])
                    changed = True
                queue = program[stream[1]] if stream[0] == "main" else updates[stream[1]]
                if stream not in running and queue and graph.waits[queue[0]] == 0:
                    op = queue.popleft()
                    running[stream] = op, Work(graph.work_us[op])
                    changed = True

    settle()
    while any(program) or any(updates) or running:
        while device.work.left <= 1e-9:
            for op in device.leave_state(now_us, bool(running), any(name == "main" for name, _ in running)):
                ends(op)
            settle()
        events += 1
        share, most = device.takes(any(name == "main" for name, _ in running))
        active = {c for _, c in running}
        users = np.bincount(job.core, weights=[job.on_core[c] * (c in active) for c in range(job.classes)])
        for (_, c), (_, work) in running.items():
            used = share if device.state in (COPY_IN, COPY_OUT) else min(share * on_core[job.core[c]], most)
            streams = sum(other == c for _, other in running)
            work.speed = max(1.0 - used, 0.0) / users[job.core[c]] / streams
        step_us = min(work.due_us for work in [device.work, *(work for _, work in running.values())])
        for c in range(job.classes):
            used_us = step_us * sum(work.speed for (_, other), (_, work) in running.items() if other == c)
            goes_on = c in active or bool(program[c])
            breakdown[:, c] += (used_us, step_us - used_us, 0.0) if c in active else (0.0, 0.0, step_us * goes_on)
        now_us += step_us
        for work in [device.work, *(work for _, work in running.values())]:
            work.left -= step_us * work.speed
        settle()
    return end_us, breakdown, events
