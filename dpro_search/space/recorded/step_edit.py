"""`StepEdit`: the op graph of a recorded step, changed op by op: host threads are cut, ops taken out, moved and added.

Without a change, `StepEdit.graph` is the graph that it was made of, with the ops in another order.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from dpro_search.collect.trace import Floats, Trace
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.recorded.ops import RecordedOps
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph, csr

_CLOCK_US = 5.0  # by which clocks of host and device may disagree
_LISTS = (
    *("duration_us", "device", "kind", "collective", "name", "policy", "rank_of_device", "device_names"),
    *("_begin_us", "_end_us", "_carried", "_out"),
)


class StepEdit:
    """Ops are known by numbers that stay theirs; those of `graph_of_step` begin with their place there.

    Attributes
    ----------
    duration_us, device, kind, collective, name
        Of each op, also of those taken out.
    event_op
        The op that each event of the trace is, by event.
    """

    def __init__(self, ops: RecordedOps, step: int, base: ReplayGraph) -> None:
        """`base` is what `graph_of_step` made of the step, perhaps with other durations."""
        rows = np.flatnonzero(ops.step == step)
        self._base = base
        self.duration_us: list[float] = base.duration_us.tolist()
        self.device: list[int] = base.device.tolist()
        self.kind: list[int] = base.op_kind.tolist()
        self.collective: list[int] = base.collective.tolist() if len(base.collective) else [-1] * len(base)
        self.name: list[str] = list(base.names)
        self.policy: list[int] = base.policy.tolist()
        self.rank_of_device: list[int] = base.rank_of_device.tolist()
        self.device_names: list[str] = list(base.device_names)
        self._begin_us: list[float] = (ops.end_us[rows] - ops.duration_us[rows]).tolist()
        self._end_us: list[float] = ops.end_us[rows].tolist()
        self._unexplained_us: list[float] = ops.unexplained_us[rows].tolist()
        self.event_op: dict[int, int] = {event: op for op, event in enumerate(ops.event[rows].tolist()) if event >= 0}
        self._order: dict[int, list[int]] = defaultdict(list)
        for op, device in enumerate(self.device):
            self._order[device].append(op)
        self.needs: list[set[int]] = [set() for _ in self.duration_us]
        self.users: list[set[int]] = [set() for _ in self.duration_us]
        source, target = base.edges()
        for one, other in zip(source.tolist(), target.tolist(), strict=True):
            self.need(one, other)
        repeats = {(order[-1], order[0]) for device, order in self._order.items() if self.policy[device] == OrderPolicy.PROGRAM}
        carried = zip(base.carry_src.tolist(), base.carry_dst.tolist(), strict=True)
        self._carried: list[tuple[int, int]] = [pair for pair in carried if pair not in repeats]
        self._out: set[int] = set()
        self._collectives = max(self.collective, default=-1) + 1

    def copy(self) -> StepEdit:
        """The same ops, to be changed on their own."""
        duplicate = copy.copy(self)
        for name in _LISTS:
            setattr(duplicate, name, getattr(self, name).copy())
        duplicate.needs, duplicate.users = [set(row) for row in self.needs], [set(row) for row in self.users]
        duplicate._order = defaultdict(list, {device: order.copy() for device, order in self._order.items()})
        return duplicate

    # Looking.

    def is_out(self, op: int) -> bool:
        """Whether an op was taken out."""
        return op in self._out

    def rank(self, op: int) -> int:
        """Rank of an op."""
        return self.rank_of_device[self.device[op]]

    def launch_of(self, op: int) -> int:
        """The op that is the launch of a device op, through a pause before it too; -1: none."""
        for need in self.needs[op]:
            if self.policy[self.device[need]] == OrderPolicy.UNBOUNDED and self.kind[need] == OpKind.HOST:
                return need
        pause = self.pause_of(op)
        return self.launch_of(pause) if pause >= 0 else -1

    def pause_of(self, op: int) -> int:
        """The op in which the stream is idle before another of its ops, for a reason that is not known; -1: none."""
        return next((need for need in self.needs[op] if self.name[need] == f"before {self.name[op]}"), -1)

    # Host threads.

    def cut(self, device: int, time_us: float) -> int:
        """The op of a host thread that ends at a recorded instant, cut there if it goes on; -1: the thread begins later."""
        order = self._order[device]
        place = bisect_right(order, time_us, key=self._end_us.__getitem__)
        if place == len(order) or self._begin_us[order[place]] >= time_us:
            return order[place - 1] if place else -1
        return self._split(device, place, order[place], time_us)

    def _split(self, device: int, place: int, op: int, time_us: float) -> int:
        """Cut off the part of an op before an instant, as a new op that needs what it needed."""
        span_us = self._end_us[op] - self._begin_us[op]
        share = (time_us - self._begin_us[op]) / span_us if span_us > 0 else 0.0
        first = self._new(device, self.duration_us[op] * share, self.kind[op], self.name[op])
        self._begin_us[first], self._end_us[first] = self._begin_us[op], time_us
        self._begin_us[op] = time_us
        self.duration_us[op] *= 1 - share
        self._order[device].insert(place, first)
        for need in list(self.needs[op]):
            self.forget(need, op)
            self.need(need, first)
        self._carried = [(one, first if other == op else other) for one, other in self._carried]
        return first

    def within(self, device: int, begin_us: float, end_us: float) -> list[int]:
        """The ops of a host thread between two recorded instants, which it is cut at."""
        self.cut(device, begin_us)
        self.cut(device, end_us)
        order = self._order[device]
        first = bisect_left(order, begin_us, key=self._begin_us.__getitem__)
        last = bisect_right(order, end_us, key=self._end_us.__getitem__)
        return order[first:last]

    def leave_out_time(self, device: int, begin_us: float, end_us: float) -> None:
        """Take the time of a host thread between two instants away; what it launches there, it launches at once."""
        for op in self.within(device, begin_us, end_us):
            self.duration_us[op] = 0.0

    def after(self, op: int) -> int:
        """The op behind another on its device; -1: none."""
        order = self._order[self.device[op]]
        place = order.index(op) + 1
        return order[place] if place < len(order) else -1

    def is_host(self, op: int) -> bool:
        """Whether an op is a stretch of a host thread."""
        return not np.isnan(self._end_us[op])

    def decided_us(self, op: int) -> float:
        """When the host was done with what an op needs of it, in the recording: its end, or that of its launch; inf: not known."""
        if self.is_host(op):
            return self._end_us[op]
        launch = self.launch_of(op)
        hosts = [self._end_us[need] for need in self.needs[launch] if self.is_host(need)] if launch >= 0 else []
        return max(hosts, default=np.inf)

    def first_decided(self, device: int, time_us: float) -> int | None:
        """The first op of a device that the host launched at a recorded instant or later; None without one."""
        return next((op for op in self._order[device] if time_us <= self.decided_us(op) < np.inf), None)

    def previous(self, op: int) -> int:
        """The op before another on its device; -1: none."""
        order = self._order[self.device[op]]
        place = order.index(op)
        return order[place - 1] if place else -1

    def first_of(self, part: int) -> int:
        """The first op of a device's event on its stream: the pause before it, where one exists."""
        pause = self.pause_of(part)
        return part if pause < 0 else pause

    def recorded_us(self, op: int) -> float:
        """Duration of an op before all changes; 0 of one that was added."""
        return float(self._base.duration_us[op]) if op < len(self._base) else 0.0

    # Changing.

    def need(self, source: int, target: int) -> None:
        """Let an op need another."""
        self.needs[target].add(source)
        self.users[source].add(target)

    def forget(self, source: int, target: int) -> None:
        """Let an op no longer need another."""
        self.needs[target].discard(source)
        self.users[source].discard(target)

    def explain(self, source: int, target: int, waited_us: float) -> None:
        """Let a device op need another that it is known to have waited for, where the trace does not show that.

        `waited_us` is from the end of what it waited for to its start. Idle time before that, which nothing explained and which was
        taken for a part of the op or of its launch, no longer is.
        """
        if source in self.needs[target]:
            return
        self.need(source, target)
        first = self.first_of(target)
        self.duration_us[first] -= max(self._unexplained_us[first] - max(waited_us, 0.0), 0.0)
        launch = self.launch_of(target)
        if launch >= 0:
            device = self._order[self.device[launch]]
            self.duration_us[launch] = min(self.duration_us[launch], float(np.median([self.duration_us[op] for op in device])))

    def explain_event(self, trace: Trace, source: int, target: int) -> None:
        """The same of two events of the trace, if the target began after the source ended."""
        waited_us = float(trace.events.start_us[target] - trace.events.end_us[source])
        if waited_us >= -_CLOCK_US:
            self.explain(self.event_op[source], self.event_op[target], waited_us)

    def forget_users(self, op: int) -> set[int]:
        """Let no op need this one; returns those that did."""
        users = set(self.users[op])
        for target in users:
            self.forget(op, target)
        return users

    def carried_users(self, op: int) -> list[int]:
        """Ops that need an op of the previous iteration."""
        return [target for source, target in self._carried if source == op]

    def carry(self, source: int, target: int) -> None:
        """Let an op need another of the iteration before."""
        self._carried.append((source, target))

    def take_out(self, op: int) -> None:
        """Remove an op; what needed it no longer does."""
        self.forget_users(op)
        for need in list(self.needs[op]):
            self.forget(need, op)
        self._carried = [pair for pair in self._carried if op not in pair]
        self._order[self.device[op]].remove(op)
        self._out.add(op)

    def insert(
        self,
        device: int,
        duration_us: float,
        kind: OpKind,
        name: str,
        *,
        after: int | None = None,
        before: int | None = None,
        collective: int = -1,
    ) -> int:
        """Add an op on a device: behind one of its ops (-1: first of all), before one, or last."""  # fmt: skip
        op = self._new(device, duration_us, int(kind), name)
        self.collective[op] = collective
        order = self._order[device]
        place = len(order)
        if after is not None:
            place = order.index(after) + 1 if after >= 0 else 0
        elif before is not None:
            place = order.index(before)
        if place and not np.isnan(self._end_us[order[place - 1]]):  # a host thread, whose ops stay sorted by time
            self._begin_us[op] = self._end_us[op] = self._end_us[order[place - 1]]
        order.insert(place, op)
        return op

    def move(self, moved: Iterable[int], after: int) -> None:
        """Put ops of a program-ordered device, in their order, behind another of its ops (-1: first of all)."""
        chosen = list(moved)
        order = self._order[self.device[chosen[0]]]
        for op in chosen:
            order.remove(op)
        place = order.index(after) + 1 if after >= 0 else 0
        order[place:place] = chosen

    def new_device(self, rank: int, name: str, policy: OrderPolicy = OrderPolicy.PROGRAM) -> int:
        """Add a device of a rank."""
        self.policy.append(int(policy))
        self.rank_of_device.append(rank)
        self.device_names.append(f"{name} of rank {rank}")
        return len(self.policy) - 1

    def new_collective(self) -> int:
        """A number for the parts of a collective of several ranks."""
        self._collectives += 1
        return self._collectives - 1

    def _new(self, device: int, duration_us: float, kind: int, name: str) -> int:
        self.duration_us.append(max(duration_us, 0.0))
        self.device.append(device)
        self.kind.append(kind)
        self.collective.append(-1)
        self.name.append(name)
        self._begin_us.append(np.nan)
        self._end_us.append(np.nan)
        self.needs.append(set())
        self.users.append(set())
        return len(self.duration_us) - 1

    # The result.

    def graph(self) -> ReplayGraph:
        """The changed step."""
        kept = [op for device in sorted(self._order) for op in self._order[device]]
        number = {op: place for place, op in enumerate(kept)}
        pairs = [(number[need], place) for place, op in enumerate(kept) for need in self.needs[op]]
        edges = np.array(pairs, np.int64).reshape(-1, 2)
        pred_ptr, pred_idx = csr(edges[:, 1], edges[:, 0], len(kept))
        carried = np.array([*self._own_carried(number), *self._moved(number, self._carried)], np.int32).reshape(-1, 2)
        collective = np.array([self.collective[op] for op in kept], np.int64)
        return replace(
            self._base,
            duration_us=_floats(self.duration_us, kept),
            device=np.array([self.device[op] for op in kept], np.int32),
            kind=np.array([self.kind[op] for op in kept], np.int8),
            pred_ptr=pred_ptr,
            pred_idx=pred_idx,
            policy=np.array(self.policy, np.int8),
            rank_of_device=np.array(self.rank_of_device, np.int32),
            collective=_numbered(collective),
            carry_src=carried[:, 0],
            carry_dst=carried[:, 1],
            samples_us=np.zeros((0, 0), np.float32),
            names=tuple(self.name[op] for op in kept),
            device_names=tuple(self.device_names),
        )

    def _own_carried(self, number: dict[int, int]) -> Iterator[tuple[int, int]]:
        for device, order in self._order.items():
            if order and self.policy[device] == OrderPolicy.PROGRAM:
                yield number[order[-1]], number[order[0]]

    @staticmethod
    def _moved(number: dict[int, int], pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        return ((number[one], number[other]) for one, other in pairs)


def _floats(values: list[float], kept: list[int]) -> Floats:
    return np.array([values[op] for op in kept])


def _numbered(collective: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Numbers of collectives from 0 on; none where there are no collectives."""
    if not (collective >= 0).any():
        return np.zeros(0, np.int32)
    numbers, index = np.unique(collective, return_inverse=True)
    return (index - int(numbers[0] < 0)).astype(np.int32)
