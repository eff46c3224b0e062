"""``with_units(edit, ...)``: a recorded fully sharded step that gathers and reduces its units otherwise, as FSDP2 would.

What a unit does to gather its parameters is a stretch of a host thread, with what is launched in it. It is moved (prefetching),
taken out (parameters that are kept), or taken over by another unit's (units that are wrapped together).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dpro_search.collect.trace import CollectiveKind, Trace
from dpro_search.costmodel.collectives.recorded import CollectivePrices
from dpro_search.costmodel.collectives.sharding import Sharding
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.marked_spans import ThreadSpan
from dpro_search.graph.sharded_units import ROOT, Gather, Reduction, ShardedUnits, StepUnits, UnitPasses
from dpro_search.space.recorded.buckets import thread_devices
from dpro_search.space.recorded.step_edit import StepEdit

_AGAIN = "again: "  # before the name of what is computed again


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """Changes of the units.

    Attributes
    ----------
    ahead, backward_ahead
        How many units ahead parameters are gathered in the forward pass (0: as recorded) and in the backward pass (1: as recorded).
    kept
        Names of the units that keep their parameters after the forward pass.
    groups
        Units that are wrapped together, in the order of the forward pass; empty: each by itself.
    reduced_share
        Bytes of a reduction over those that were recorded.
    again
        Names of the units whose forward pass is computed again in the backward pass.
    sharding
        A change of the ranks that share parameters; None: as recorded.
    """

    ahead: int = 0
    backward_ahead: int = 1
    kept: frozenset[str] = frozenset()
    groups: tuple[tuple[str, ...], ...] = ()
    reduced_share: float = 1.0
    again: frozenset[str] = frozenset()
    sharding: Sharding | None = None


def cut_at_units(edit: StepEdit, units: ShardedUnits, step: int) -> None:
    """Cut host threads where units begin and end to gather and to reduce: plans then change whole ops."""
    devices = thread_devices(edit)
    for (rank, number), step_units in units.steps.items():
        if number != step:
            continue
        gathers = (*step_units.forward, *step_units.backward)
        for span in (
            *(span for each in gathers for span in (each.post, each.copy_out)),
            *(each.post for each in step_units.reductions),
        ):
            device = devices.get((rank, f"host thread {-span.thread}"))
            if device is not None:
                edit.cut(device, span.start_us)
                edit.cut(device, span.end_us)


def explain_units(edit: StepEdit, trace: Trace, units: ShardedUnits, step: int) -> None:
    """Let the copy of a unit's parameters to their places need their gather, as FSDP makes the device's stream wait for it."""
    for (_, number), step_units in units.steps.items():
        for each in (*step_units.forward, *step_units.backward) if number == step else ():
            if each.copy_out.events:
                edit.explain_event(trace, each.part, each.copy_out.events[0])


def with_units(edit: StepEdit, units: ShardedUnits, step: int, plan: UnitPlan, prices: CollectivePrices) -> None:
    """Change a step of all ranks, prepared by `cut_at_units`; raises `InputError` if a price is needed and not known."""
    groups = _ResizedGroups(edit)
    for (_, number), step_units in units.steps.items():
        if number == step:
            _RankUnits(edit, step_units, units, prices, groups).change(plan)


class _ResizedGroups:
    """Numbers of collectives whose ranks are no longer those that were recorded together."""

    def __init__(self, edit: StepEdit) -> None:
        self._edit = edit
        self._numbers: dict[tuple[int, int, bool], int] = {}

    def number(self, recorded: int, group: int, *, copies: bool = False) -> int:
        """The number of the collective of a group's part, or of the all-reduce behind it; -1: no other rank was recorded."""
        if recorded < 0:
            return -1
        key = recorded, group, copies
        if key not in self._numbers:
            self._numbers[key] = self._edit.new_collective()
        return self._numbers[key]


class _RankUnits:
    """A rank's step."""

    def __init__(
        self, edit: StepEdit, step_units: StepUnits, units: ShardedUnits, prices: CollectivePrices, groups: _ResizedGroups
    ) -> None:
        self._edit, self._found, self._prices, self._groups = edit, step_units, prices, groups
        self._number = units.numbers[step_units.rank]  # in the job
        self._bytes = {tensor.name: tensor.size_bytes for tensor in units.tensors}
        self._devices = thread_devices(edit)
        self._copies_device = -1  # the stream that copies of gradients are averaged on, once there is one
        self._last_moved: dict[int, int] = {}  # by span: the last op that was moved behind it
        gathers = (*step_units.forward, *step_units.backward)
        spans = [
            *(each.post for each in gathers),
            *(each.copy_out for each in gathers),
            *(each.post for each in step_units.reductions),
        ]
        self._ops = {id(span): edit.within(self._thread(span), span.start_us, span.end_us) for span in spans}

    def change(self, plan: UnitPlan) -> None:
        for passes in self._found.passes:
            if passes.unit in plan.again:
                _compute_again(self._edit, passes, self._found.rank, self._devices)
        gone = [each for each in self._found.backward if each.unit in plan.kept]
        forward, backward = list(self._found.forward), [each for each in self._found.backward if each not in gone]
        for each in gone:
            self._take_out(each)
        reductions = list(self._found.reductions)
        if plan.groups:
            forward = self._joined(forward, plan.groups)
            backward = self._joined(backward, plan.groups)
            reductions = self._joined_reductions(reductions, plan.groups, plan.reduced_share)
        elif plan.reduced_share != 1.0:
            for reduction in reductions:
                self._repriced(reduction, self._bytes[reduction.unit], self._bytes[reduction.unit] * plan.reduced_share)
        if plan.sharding is not None:
            self._share(plan.sharding, (*forward, *backward), reductions)
        if plan.ahead or plan.backward_ahead > 1:
            for each in (*forward, *backward):
                self._await_late(each)
        if plan.ahead:
            places = [each.copy_out for each in forward]
            for number, each in enumerate(forward[1:], start=1):
                self._move(each, forward[max(number - plan.ahead, 0)].copy_out, places[number - 1])
        for number in range(1, len(backward)):
            if plan.backward_ahead > 1:
                self._move(backward[number], backward[max(number - plan.backward_ahead + 1, 0)].post, None)

    def _thread(self, span: ThreadSpan) -> int:
        return self._devices[self._found.rank, f"host thread {-span.thread}"]

    def _device_ops(self, span: ThreadSpan) -> list[int]:
        """Ops that are launched in a span, without the collectives."""
        ops = [self._edit.event_op[event] for event in span.events if event in self._edit.event_op]
        return [op for op in ops if not self._edit.is_out(op) and self._edit.kind[op] != OpKind.COMM]

    def _silence(self, span: ThreadSpan) -> None:
        for op in (*self._ops[id(span)], *self._device_ops(span)):
            self._edit.duration_us[op] = 0.0

    def _take_part_out(self, event: int) -> set[int]:
        """Remove a rank's part of a collective; returns what needed it."""
        edit, part = self._edit, self._edit.event_op[event]
        pause, launch = edit.pause_of(part), edit.launch_of(part)
        users = edit.forget_users(part)
        for op in (part, pause, launch):
            if op >= 0:
                edit.take_out(op)
        return users

    def _take_out(self, each: Gather) -> None:
        """Gather nothing: neither the enqueue nor the copies are there."""
        self._take_part_out(each.part)
        self._silence(each.post)
        self._silence(each.copy_out)

    # Units that are wrapped together.

    def _joined(self, gathers: Sequence[Gather], groups: Sequence[Sequence[str]]) -> list[Gather]:
        """The gathers of groups: the first of each, which then gathers all."""
        group_of = {unit: number for number, group in enumerate(groups) for unit in group}
        leaders: dict[int, Gather] = {}
        for each in gathers:
            leader = leaders.setdefault(group_of[each.unit], each)
            if leader is each:
                continue
            for user in self._take_part_out(each.part):
                if user not in self._ops[id(each.post)]:
                    self._edit.need(self._edit.event_op[leader.part], user)
            self._hand_over(each.post, leader.post)
            self._hand_over(each.copy_out, leader.copy_out)
        for number, leader in leaders.items():
            size = sum(self._bytes[each.unit] for each in gathers if group_of[each.unit] == number)
            self._reprice(leader.part, CollectiveKind.ALL_GATHER, self._bytes[leader.unit], size)
        return [each for each in gathers if leaders[group_of[each.unit]] is each]

    def _joined_reductions(self, reductions: Sequence[Reduction], groups: Sequence[Sequence[str]], share: float) -> list[Reduction]:
        """Likewise, with the last of each group: gradients of all its units are there only then."""
        group_of = {unit: number for number, group in enumerate(groups) for unit in group}
        last = {group_of[each.unit]: each for each in reductions}
        for each in reductions:
            leader = last[group_of[each.unit]]
            if leader is each:
                continue
            for event in each.parts:
                self._take_part_out(event)
            self._hand_over(each.post, leader.post)
        for number, leader in last.items():
            size = sum(self._bytes[each.unit] for each in reductions if group_of[each.unit] == number)
            self._repriced(leader, self._bytes[leader.unit], size * share)
        return list(last.values())

    def _hand_over(self, span: ThreadSpan, leader: ThreadSpan) -> None:
        """Let another unit's span do the copies of one. A host that only launches them does so once."""
        edit, copies, to = self._edit, self._device_ops(span), self._device_ops(leader)
        if copies and to:
            edit.duration_us[to[-1]] += sum(edit.duration_us[op] for op in copies)
        elif ops := self._ops[id(leader)]:
            edit.duration_us[ops[0]] += sum(edit.duration_us[op] for op in self._ops[id(span)])
        self._silence(span)

    def _repriced(self, reduction: Reduction, before_bytes: float, after_bytes: float) -> None:
        kinds = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)
        for event, size, kind in zip(reduction.parts, reduction.sizes_bytes, kinds, strict=False):
            recorded_bytes = size if size > 0 else before_bytes
            self._reprice(event, kind, recorded_bytes, recorded_bytes * after_bytes / before_bytes)

    def _reprice(self, event: int, kind: CollectiveKind, before_bytes: float, after_bytes: float) -> None:
        """Scale a collective as the prices of its sizes differ, so that the recorded size takes the recorded time."""
        if before_bytes != after_bytes:
            op = self._edit.event_op[event]
            self._edit.duration_us[op] *= self._prices.price_us(kind, after_bytes) / self._prices.price_us(kind, before_bytes)

    # Other ranks that share parameters.

    def _share(self, sharding: Sharding, gathers: Sequence[Gather], reductions: Sequence[Reduction]) -> None:
        edit, group = self._edit, self._number // sharding.becomes
        for each in gathers:
            part = edit.event_op[each.part]
            edit.duration_us[part] *= sharding.gather_factor(self._bytes[each.unit])
            edit.collective[part] = self._groups.number(edit.collective[part], group)
        for reduction in reductions:
            part = edit.event_op[reduction.parts[0]]
            size, recorded_us, number = self._bytes[reduction.unit], edit.duration_us[part], edit.collective[part]
            edit.duration_us[part] *= sharding.scatter_factor(size)
            edit.collective[part] = self._groups.number(number, group)
            if len(reduction.parts) > 1:
                self._share_copies(sharding, reduction.parts[1], part, size)
            elif sharding.becomes < sharding.ranks:
                self._add_copies(sharding, reduction, part, recorded_us * sharding.copies_share(size), number)

    def _share_copies(self, sharding: Sharding, event: int, scatter: int, size: float) -> None:
        """The all-reduce of a job that has one already, among other ranks or none."""
        edit, part = self._edit, self._edit.event_op[event]
        if sharding.becomes == sharding.ranks:
            for user in edit.carried_users(part):
                edit.carry(scatter, user)
            for user in self._take_part_out(event):
                edit.need(scatter, user)
            return
        edit.duration_us[part] *= sharding.copies_factor(size)
        edit.collective[part] = self._groups.number(edit.collective[part], self._number % sharding.becomes, copies=True)

    def _add_copies(self, sharding: Sharding, reduction: Reduction, scatter: int, price_us: float, number: int) -> None:
        """An all-reduce behind a reduce-scatter, on a stream of its own; enqueueing it takes what enqueueing that took."""
        edit, rank = self._edit, self._found.rank
        if self._copies_device < 0:
            self._copies_device = edit.new_device(rank, "stream of the all-reduces")
        users = [user for user in edit.forget_users(scatter) if user != edit.after(scatter)]
        launch = edit.launch_of(scatter)
        name = f"all-reduce of {reduction.unit}@{rank}"
        copies = self._groups.number(number, self._number % sharding.becomes, copies=True)
        needs = [scatter]
        if launch >= 0:
            host = next((need for need in edit.needs[launch] if edit.is_host(need)), -1)
            if host >= 0:
                kind = OpKind(edit.kind[host])
                post = edit.insert(edit.device[host], edit.duration_us[host], kind, f"post of {name}", after=host)
                call = edit.insert(edit.device[launch], edit.duration_us[launch], OpKind.HOST, f"launch of {name}")
                edit.need(post, call)
                needs.append(call)
        if copies >= 0:  # the stream waits in it until its own rank takes part
            pause = edit.insert(self._copies_device, 0.0, OpKind.COMM, f"before {name}")
            for need in needs:
                edit.need(need, pause)
            needs = [pause]
        part = edit.insert(self._copies_device, price_us, OpKind.COMM, name, collective=copies)
        for need in needs:
            edit.need(need, part)
        for user in users:
            edit.need(part, user)
        for user in edit.carried_users(scatter):
            edit.carry(part, user)

    # Prefetching.

    def _await_late(self, each: Gather) -> None:
        """Move the wait of a host thread for a gather from right after its enqueue to the place where its parameters are copied."""
        edit, part = self._edit, self._edit.event_op[each.part]
        users = [op for op in edit.users[part] if edit.is_host(op)]
        copies = self._ops[id(each.copy_out)]
        if users and copies:
            for op in users:
                edit.forget(part, op)
            edit.need(part, copies[0])

    def _move(self, each: Gather, behind: ThreadSpan, unless: ThreadSpan | None) -> None:
        """Enqueue a gather at the end of an earlier span of its thread."""
        ops = self._ops[id(each.post)]
        if not ops or behind.thread != each.post.thread or behind.end_us >= each.post.start_us or each.unit == ROOT:
            return
        if unless is not None and unless.end_us > each.post.start_us:
            return  # it is gathered before the unit before it needs its own: so it was recorded
        anchor = self._anchor(behind)
        if anchor >= 0:
            self._keep_waits(ops)
            self._edit.move(ops, anchor)
            self._last_moved[id(behind)] = ops[-1]

    def _keep_waits(self, ops: Sequence[int]) -> None:
        """Let a thread wait for other collectives where it did, though what it did meanwhile is moved away."""
        edit, following = self._edit, self._edit.after(ops[-1])
        for op in ops:
            for need in [need for need in edit.needs[op] if edit.kind[need] == OpKind.COMM]:
                edit.forget(need, op)
                if following >= 0:
                    edit.need(need, following)

    def _anchor(self, behind: ThreadSpan) -> int:
        """The last op of a span, and of what was moved behind it before."""
        ops = self._ops[id(behind)]
        return self._last_moved.get(id(behind), ops[-1] if ops else -1)


def _compute_again(edit: StepEdit, passes: UnitPasses, rank: int, devices: Mapping[tuple[int, str], int]) -> None:
    """Insert a unit's recorded forward pass once more before its backward pass (activation checkpointing).

    The thread of the backward pass launches again what the forward pass launched, in the same times; the device does it again
    before anything else of the backward pass. What the forward pass communicated it does not repeat.

    Parameters
    ----------
    devices
        The devices of the edit by rank and name.
    """
    forward = devices[rank, f"host thread {-passes.forward.thread}"]
    backward = devices[rank, f"host thread {-passes.backward_thread}"]
    last = edit.cut(backward, passes.backward_us)
    stretches = edit.within(forward, passes.forward.start_us, passes.forward.end_us)
    copy_of: dict[int, int] = {}
    for op in stretches:
        last = edit.insert(backward, edit.duration_us[op], _backward(edit.kind[op]), _AGAIN + edit.name[op], after=last)
        copy_of[op] = last
    launched = [edit.event_op[event] for event in passes.forward.events if event in edit.event_op]
    for op in launched:
        launch = edit.launch_of(op)
        if edit.kind[op] == OpKind.COMM or launch < 0 or edit.is_out(op):
            continue
        place = edit.first_decided(edit.device[op], passes.backward_us)
        again = edit.insert(edit.device[op], edit.duration_us[op], _backward(edit.kind[op]), _AGAIN + edit.name[op], before=place)
        call = edit.insert(edit.device[launch], edit.duration_us[launch], OpKind.HOST, _AGAIN + edit.name[launch])
        edit.need(call, again)
        for host in (need for need in edit.needs[launch] if need in copy_of):
            edit.need(copy_of[host], call)


def _backward(kind: int) -> OpKind:
    """The kind of an op of the forward pass when it runs in the backward pass."""
    return OpKind.BACKWARD if kind == OpKind.FORWARD else OpKind(kind)
