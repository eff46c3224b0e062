"""The specification of a replay, in plain Python. Slow; `replay/engine.py` must give the same times to the last bit.

Everything happens at instants. At an instant, in this order, again and again until nothing changes:

1. Ops that are due end (a flow whose latency is over begins to move its bytes). An op whose last predecessor has ended is ready;
   on an unbounded device it starts at once.
2. Each device with a free server takes, of its ready ops, the one that its policy puts first; that op starts.

Then speeds are set for the time until the next instant:

* an op runs at speed 1 over the largest slow-down by another op on its rank;
* flows get the max-min fair share of their links (progressive filling: Bertsekas & Gallager, Data Networks, 6.5.2);
* the parts of a collective hold their devices from their start, but move data only once all parts have started;
* where processes share cores (`SharedCores`), the ops on a core have equal parts of what communication leaves of it. Latencies and
  links have other speeds while any core computes; messages that begin then draw how long their latency is, at one instant by
  (priority, op number). After its last byte every process has work with a message, which goes as fast as on the fullest core.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dpro_search.replay.kernels.fluid import LATENCY_TAKES_MOST, TAKEN_MOST
from dpro_search.replay.kernels.stuck import stuck_error
from dpro_search.replay.kernels.times import OpTimes
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph, SharedCores


def replay_reference(graph: ReplayGraph) -> OpTimes:
    """Times of every op of one iteration. Raises `GraphError` for what cannot be replayed, a deadlock included."""
    graph.validate()
    simulation = _Simulation(graph)
    simulation.run()
    if len(simulation.order) < len(graph):
        raise stuck_error(graph, np.array(simulation.order, np.int32))
    ready, start, moved, end = map(np.array, (simulation.ready, simulation.start, simulation.moved, simulation.end))
    return OpTimes(ready_us=ready, start_us=start, moved_us=moved, end_us=end, order=np.array(simulation.order, np.int32))


@dataclass
class _IterationRun:
    """An op that runs: from `since` on it does `speed` of its `left` work per us."""

    left: float
    speed: float
    since: float
    moves_bytes: bool = False
    finishes: bool = False

    @property
    def due(self) -> float:
        return self.since + self.left / self.speed if self.speed > 0 else math.inf


class _Simulation:
    def __init__(self, graph: ReplayGraph) -> None:
        count = len(graph)
        self.graph = graph
        self.now = 0.0
        self.ready, self.start, self.moved, self.end = ([math.inf] * count for _ in range(4))
        self.order: list[int] = []
        self.device = graph.device.tolist()
        self.rank = graph.rank_of_op.tolist()
        self.kind = graph.op_kind.tolist()
        self.priority = graph.priority.tolist() or [0] * count
        self.collective = graph.collective.tolist() or [-1] * count
        self.bytes = graph.flow_bytes.tolist() or [0.0] * count
        self.waits_for = np.diff(graph.pred_ptr).tolist()
        self.successors: list[list[int]] = [[] for _ in range(count)]
        for source, destination in zip(*graph.edges(), strict=True):
            self.successors[source].append(int(destination))
        self.parts: dict[int, list[int]] = {}
        for op, collective in enumerate(self.collective):
            if collective >= 0:
                self.parts.setdefault(collective, []).append(op)
        self.program = [
            [op for op in range(count) if self.device[op] == device and self.policy(op) == OrderPolicy.PROGRAM]
            for device in range(graph.devices)
        ]
        self.queue: list[list[int]] = [[] for _ in range(graph.devices)]
        self.free = graph.servers.tolist() or [1] * graph.devices
        self.cores = None if graph.cores is None else _Cores(graph, graph.cores)
        self.running: dict[int, _IterationRun] = {}

    def policy(self, op: int) -> OrderPolicy:
        return OrderPolicy(self.graph.policy[self.device[op]])

    def run(self) -> None:
        for op, waits in enumerate(self.waits_for):
            if waits == 0:
                self.becomes_ready(op)
        while True:
            while self.end_what_is_due() or self.devices_take():
                pass
            self.set_speeds()
            if not self.running:
                return
            self.now = min(run.due for run in self.running.values())

    def becomes_ready(self, op: int) -> None:
        self.ready[op] = self.now
        if self.policy(op) == OrderPolicy.UNBOUNDED:
            self.starts(op)
        else:
            self.queue[self.device[op]].append(op)

    def starts(self, op: int) -> None:
        self.start[op] = self.now
        self.order.append(op)
        collective = self.collective[op]
        parts = self.parts[collective] if collective >= 0 else [op]
        if all(self.start[part] <= self.now for part in parts):
            work = max(float(self.graph.duration_us[part]) for part in parts)
            for part in parts:
                self.moved[part] = self.now
                begins = 0.0 if self.cores is not None and self.cores.is_message(part) else 1.0
                self.running[part] = _IterationRun(left=work, speed=begins, since=self.now)

    def end_what_is_due(self) -> bool:
        due = [op for op, run in self.running.items() if run.due <= self.now]
        for op in due:
            run = self.running[op]
            if self.bytes[op] > 0 and not run.moves_bytes and not run.finishes:
                self.running[op] = _IterationRun(left=self.bytes[op], speed=0.0, since=self.now, moves_bytes=True)
                continue
            if self.cores is not None and self.cores.finish_us[op] > 0 and not run.finishes:
                self.running[op] = _IterationRun(left=self.cores.finish_us[op], speed=0.0, since=self.now, finishes=True)
                continue
            del self.running[op]
            self.end[op] = self.now
            self.free[self.device[op]] += 1
            for successor in self.successors[op]:
                self.waits_for[successor] -= 1
                if self.waits_for[successor] == 0:
                    self.becomes_ready(successor)
        return bool(due)

    def devices_take(self) -> bool:
        taken = False
        for device, queue in enumerate(self.queue):
            while queue and self.free[device] and (op := self.first(device)) is not None:
                queue.remove(op)
                self.free[device] -= 1
                self.starts(op)
                taken = True
        return taken

    def first(self, device: int) -> int | None:
        """The op that a free device takes now."""
        policy, queue = self.graph.policy[device], self.queue[device]
        if policy == OrderPolicy.PROGRAM:
            next_op = next(op for op in self.program[device] if math.isinf(self.start[op]))
            return next_op if next_op in queue else None
        if policy == OrderPolicy.PRIORITY:
            return min(queue, key=lambda op: (self.priority[op], self.ready[op], op))
        return min(queue, key=lambda op: (self.ready[op], self.priority[op], op))

    def set_speeds(self) -> None:
        rate_of_link = self.graph.link_bytes_per_us.tolist()
        if self.cores is not None:
            rate_of_link = self.cores.share(self.running)
        flows = sorted(op for op, run in self.running.items() if run.moves_bytes)
        ptr, idx = self.graph.link_ptr, self.graph.link_idx
        rates = max_min_rates([idx[ptr[op] : ptr[op + 1]].tolist() for op in flows], rate_of_link)
        speeds = dict(zip(flows, rates, strict=True))
        for op, run in self.running.items():
            alone = 1.0 if self.cores is None else self.cores.speed(op, run)
            speed = speeds.get(op, alone / self.slowdown(op))
            if speed != run.speed:
                run.left = max(run.left - (self.now - run.since) * run.speed, 0.0)
                run.since = self.now
                run.speed = speed

    def slowdown(self, op: int) -> float:
        """The largest factor by which another op on its rank slows an op."""
        factors = self.graph.slowdown
        is_message = self.cores is not None and self.cores.is_message(op)
        if not factors.size or self.bytes[op] > 0 or self.collective[op] >= 0 or is_message:
            return 1.0
        others = (other for other in self.running if other != op and self.rank[other] == self.rank[op])
        return max((float(factors[self.kind[op], self.kind[other]]) for other in others), default=1.0)


class _Cores:
    """Who uses the cores of a graph, and how fast everything on them goes."""

    def __init__(self, graph: ReplayGraph, cores: SharedCores) -> None:
        self.graph = graph
        self.priority = graph.priority.tolist() or [0] * len(graph)
        self.core_of_device = cores.core.tolist()
        self.core = cores.core[graph.device].tolist()
        self.idle_us, self.core_us, self.finish_us = cores.idle_us.tolist(), cores.core_us.tolist(), cores.finish_us.tolist()
        self.rates: dict[bool, list[float]] = {True: graph.link_bytes_per_us.tolist(), False: cores.idle_bytes_per_us.tolist()}
        self.core_us_per_byte = cores.core_us_per_byte.tolist()
        self.factors = itertools.cycle(cores.latency_factors.tolist() or [1.0])
        self.busy = True
        self.speed_on: list[float] = []

    def is_message(self, op: int) -> bool:
        return bool(self.idle_us[op] > 0)

    def latency_us(self, op: int) -> float:
        """Current rate of a message."""
        return float(self.graph.duration_us[op]) if self.busy else float(self.idle_us[op])

    def share(self, running: Mapping[int, _IterationRun]) -> list[float]:
        """Find the speeds for the time until the next instant; returns the links' rates."""
        self.busy = any(self.core[op] >= 0 for op in running)
        links = self.rates[self.busy]
        by_latencies = by_links = 0.0
        for op in sorted(running, key=lambda op: (self.priority[op], op)):
            run = running[op]
            if self.is_message(op) and not run.moves_bytes and not run.finishes:
                if self.busy and run.speed == 0.0:
                    run.left *= next(self.factors)
                by_latencies += min(self.core_us[op] / self.latency_us(op), LATENCY_TAKES_MOST)
        ptr, idx = self.graph.link_ptr, self.graph.link_idx
        for link in sorted({int(link) for op, run in running.items() if run.moves_bytes for link in idx[ptr[op] : ptr[op + 1]]}):
            by_links += min(self.core_us_per_byte[link] * links[link], 1.0)
        taken = by_latencies + by_links
        finishing = sum(run.finishes for run in running.values())
        self.speed_on = []
        for core in range(max(self.core_of_device) + 1):
            processes = self.core_of_device.count(core)
            users = sum(self.core[op] == core for op in running) + finishing * processes
            self.speed_on.append((1.0 - min(taken * processes, TAKEN_MOST)) / max(users, 1.0))
        return links

    def speed(self, op: int, run: _IterationRun) -> float:
        """Rate of an op that moves no bytes."""
        if run.finishes:
            return min([1.0, *self.speed_on])
        if self.is_message(op):
            return float(self.graph.duration_us[op]) / self.latency_us(op)
        return self.speed_on[self.core[op]] if self.core[op] >= 0 else 1.0


def max_min_rates(flows: Sequence[Sequence[int]], capacity: Sequence[float]) -> list[float]:
    """Max-min fair rate of each flow, given the links that each uses and the links' capacities.

    The link that leaves its flows the least (of equals the first) fixes their rate; then the same with what is left.
    """
    left = list(capacity)
    users = [0] * len(capacity)
    for links in flows:
        for link in links:
            users[link] += 1
    rates = [0.0] * len(flows)
    while any(users):
        bottleneck = min((link for link, count in enumerate(users) if count), key=lambda link: (left[link] / users[link], link))
        share = left[bottleneck] / users[bottleneck]
        for flow, links in enumerate(flows):
            if rates[flow] == 0.0 and bottleneck in links:
                rates[flow] = share
                for link in links:
                    left[link] -= share
                    users[link] -= 1
    return rates
