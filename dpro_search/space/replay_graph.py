"""`ReplayGraph`: what the replay engine eats. Arrays only; times in microseconds, sizes in bytes.

An **op** runs on one **device**, after the ops that it needs. A device (a stream, a thread, a link's send queue) belongs to a rank
and runs one op at a time, in the order that its policy says. `replay/reference.py` is the specification of what an engine makes of
it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats
from dpro_search.errors import GraphError
from dpro_search.graph.dataflow import OpKind

Int32s = npt.NDArray[np.int32]
Int8s = npt.NDArray[np.int8]


class OrderPolicy(enum.IntEnum):
    """Which of its ready ops a free device takes."""

    PROGRAM = 0  # the next in the recorded order (the order of op numbers), and it waits for that one
    FIFO = 1  # the first by (ready time, priority, op number)
    PRIORITY = 2  # the first by (priority, ready time, op number)
    UNBOUNDED = 3  # all of them at once


def _no_int8s() -> Int8s:
    return np.zeros(0, np.int8)


def _no_int32s() -> Int32s:
    return np.zeros(0, np.int32)


def _no_floats() -> Floats:
    return np.zeros(0)


@dataclass(frozen=True, kw_only=True)
class SharedCores:
    """Cores on which processes compute and communicate; d devices, n ops, l links of the graph that it belongs to.

    Each device with a core is a process. The ops that run on a core share it equally, after what communication takes of it. An op
    is a *message* if it has an `idle_us`: its latency depends on whether any core computes, for its threads then wait for a core.
    """

    core: Int32s  # Core of each device, numbered from 0, -1 for a device that needs none, [d].
    # Latency of each message while no core computes, 0 for an op that is no message, [n]; `duration_us` is its latency while one
    # does.
    idle_us: Floats
    core_us: Floats  # Core time that the latency takes of every process, [n].
    # Core time that every process spends on a message after its last byte, [n]. It shares the cores, and the slowest counts.
    finish_us: Floats
    idle_bytes_per_us: Floats  # Rate of each link while no core computes, [l]; `link_bytes_per_us` is that while one does.
    core_us_per_byte: Floats  # Core time that bytes on each link take of every process, [l].
    # How many times its `duration_us` the latency of a message is that begins while a core computes: in turn, and again from the
    # first, [any]; empty: once.
    latency_factors: Floats = field(default_factory=_no_floats)


@dataclass(frozen=True, kw_only=True)
class ReplayGraph:
    """One iteration of a job; n ops, d devices, m dependencies.

    Attributes
    ----------
    duration_us
        Work of each op, [n]: how long it takes alone. Of a flow: its latency, before the bytes move.
    device, kind, priority
        Of each op, [n]; kind is an `OpKind`, a lower priority value is served first.
    pred_ptr, pred_idx
        Dependencies in CSR form, [n + 1] and [m]: op i needs ``pred_idx[pred_ptr[i] : pred_ptr[i + 1]]``.
    policy, rank_of_device
        `OrderPolicy` and rank of each device, [d].
    collective
        Collective that each op is a rank's part of, -1 for none; empty: no op is. Its parts are posted when their devices take
        them; once all are posted data move, for the longest duration of the parts, and all parts end together.
    flow_bytes, link_ptr, link_idx, link_bytes_per_us
        Bytes that an op moves after its latency, [n], over which links, CSR; and each link's rate. Flows share links max-min
        fairly. Empty: none. A full-duplex link is two links, one for each direction.
    slowdown
        ``slowdown[a, b] >= 1``: an op of kind a takes that many times longer while one of kind b runs on its rank, [kinds, kinds];
        the largest factor counts; empty: none. Flows and collectives are not slowed.
    servers
        How many ops each device runs at a time, [d]; empty: one.
    cores
        Cores that devices share; None: no device shares one.
    carry_src, carry_dst
        Dependencies of one iteration's ops on the iteration before: ``carry_dst`` needs the previous ``carry_src``.
    samples_us
        Recorded durations of each op, [samples, n], float32; empty: `duration_us` is all that is known.
    buffer_op, buffer_bytes, buffer_ptr, buffer_use
        Memory: op that allocates each buffer, its size, and the ops after which it is free (the last to end counts), CSR. A buffer
        lives on the rank of the op that allocates it; one without uses lives until the end.
    names, device_names, buffer_names
        For people; empty: numbers are shown.
    """

    duration_us: Floats
    device: Int32s
    pred_ptr: Int32s
    pred_idx: Int32s
    policy: Int8s
    rank_of_device: Int32s
    kind: Int8s = field(default_factory=_no_int8s)
    priority: Int32s = field(default_factory=_no_int32s)
    collective: Int32s = field(default_factory=_no_int32s)
    flow_bytes: Floats = field(default_factory=_no_floats)
    link_ptr: Int32s = field(default_factory=_no_int32s)
    link_idx: Int32s = field(default_factory=_no_int32s)
    link_bytes_per_us: Floats = field(default_factory=_no_floats)
    slowdown: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    servers: Int32s = field(default_factory=_no_int32s)
    cores: SharedCores | None = None
    carry_src: Int32s = field(default_factory=_no_int32s)
    carry_dst: Int32s = field(default_factory=_no_int32s)
    samples_us: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    buffer_op: Int32s = field(default_factory=_no_int32s)
    buffer_bytes: Floats = field(default_factory=_no_floats)
    buffer_ptr: Int32s = field(default_factory=_no_int32s)
    buffer_use: Int32s = field(default_factory=_no_int32s)
    names: Sequence[str] = ()
    device_names: Sequence[str] = ()
    buffer_names: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.duration_us)

    def __repr__(self) -> str:
        return f"ReplayGraph(ops={len(self)}, devices={self.devices}, ranks={self.ranks})"

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.policy)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self.rank_of_device.max()) + 1 if len(self.rank_of_device) else 0

    @cached_property
    def op_kind(self) -> Int8s:
        """`OpKind` of every op; FORWARD where the graph says nothing, [n]."""
        return self.kind if len(self.kind) else np.full(len(self), int(OpKind.FORWARD), np.int8)

    @cached_property
    def rank_of_op(self) -> Int32s:
        """Rank of every op, [n]."""
        return self.rank_of_device[self.device]

    @cached_property
    def serves_in_no_line(self) -> npt.NDArray[np.bool_]:
        """Whether a device runs several ops at a time, so that none follows another, [d]."""
        unbounded: npt.NDArray[np.bool_] = self.policy == OrderPolicy.UNBOUNDED
        return unbounded | (self.servers > 1) if len(self.servers) else unbounded

    @property
    def is_fluid(self) -> bool:
        """Whether times do not follow from orders on devices: flows, slow-downs, shared cores, devices of several servers."""
        slowed = self.slowdown.size and self.slowdown.max() > 1
        return bool(self.flow_bytes.any() or slowed or self.cores is not None or (self.servers > 1).any())

    def name(self, op: int) -> str:
        """Name of an op for people."""
        return self.names[op] if len(self.names) else f"op {op}"

    def device_name(self, device: int) -> str:
        """Name of a device for people."""
        return self.device_names[device] if len(self.device_names) else f"device {device}"

    def with_durations(self, duration_us: Floats) -> ReplayGraph:
        """The graph with other durations, [n], samples scaled alike; those of an op that took no time become the new one."""
        samples_us = self.samples_us
        changed = np.flatnonzero(duration_us != self.duration_us)
        if samples_us.size and len(changed):
            old_us, new_us = self.duration_us[changed], duration_us[changed]
            samples_us = samples_us.copy()
            factor = np.divide(new_us, old_us, out=np.zeros_like(old_us), where=old_us > 0)
            samples_us[:, changed] = np.where(old_us > 0, samples_us[:, changed] * factor, new_us)
        return replace(self, duration_us=duration_us, samples_us=samples_us)

    def edges(self) -> tuple[Int32s, Int32s]:
        """Dependencies as (source, destination) arrays, [m] each."""
        return self.pred_idx, np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.pred_ptr))

    def validate(self) -> None:
        """Raise `GraphError`, with the op or field to blame, for anything that no engine can replay but a deadlock.

        A deadlock (a cycle, collectives posted in different orders) shows when the graph is replayed.
        """
        count = len(self)
        if count == 0:
            raise GraphError("the graph has no ops: nothing to replay")
        for field_name in ("device", "kind", "priority", "collective", "flow_bytes", "names"):
            length = len(getattr(self, field_name))
            if length != count and (length or field_name == "device"):
                raise GraphError(f"{field_name} has {length} entries for {count} ops")
        for owner, ptr, idx, rows in (
            ("pred", self.pred_ptr, self.pred_idx, count),
            ("link", self.link_ptr, self.link_idx, count if len(self.flow_bytes) else 0),
            ("buffer", self.buffer_ptr, self.buffer_use, len(self.buffer_op)),
        ):
            if rows and (len(ptr) != rows + 1 or ptr[0] != 0 or ptr[-1] != len(idx) or (np.diff(ptr) < 0).any()):
                raise GraphError(f"{owner}_ptr does not divide its {len(idx)} indices among {rows} rows")
        self._check_values()

    def _check_values(self) -> None:
        count = len(self)
        self._refuse(~((self.duration_us >= 0) & np.isfinite(self.duration_us)), "duration_us", "must be a number >= 0")
        self._refuse((self.device < 0) | (self.device >= self.devices), "device", f"must be one of the {self.devices} devices")
        for field_name in ("pred_idx", "carry_src", "carry_dst", "buffer_op", "buffer_use"):
            values = getattr(self, field_name)
            if len(values) and (values.min() < 0 or values.max() >= count):
                raise GraphError(f"{field_name} names op {int(values[(values < 0) | (values >= count)][0])} of {count}")
        if self.samples_us.size:
            if self.samples_us.shape[1] != count:
                raise GraphError(f"samples_us has {self.samples_us.shape[1]} columns for {count} ops")
            bad = ~((self.samples_us >= 0) & np.isfinite(self.samples_us)).all(axis=0)
            self._refuse(bad, "samples_us", "must be numbers >= 0", self.samples_us.min(axis=0))
        if len(self.policy) and not np.isin(self.policy, list(OrderPolicy)).all():
            raise GraphError("policy holds a value that is no OrderPolicy")
        if len(self.rank_of_device) != self.devices:
            raise GraphError(f"rank_of_device has {len(self.rank_of_device)} entries for {self.devices} devices")
        if len(self.flow_bytes):
            self._refuse(~((self.flow_bytes >= 0) & np.isfinite(self.flow_bytes)), "flow_bytes", "must be a number >= 0")
            self._refuse((self.flow_bytes > 0) & (np.diff(self.link_ptr) == 0), "flow_bytes", "needs a link to move over")
            if len(self.link_idx) and (self.link_idx.min() < 0 or self.link_idx.max() >= len(self.link_bytes_per_us)):
                raise GraphError(f"link_idx must be one of the {len(self.link_bytes_per_us)} links")
            if not (self.link_bytes_per_us > 0).all():
                raise GraphError(f"link {int(np.argmin(self.link_bytes_per_us > 0))} has no rate above 0")
            if len(self.collective) and ((self.collective >= 0) & (self.flow_bytes > 0)).any():
                raise GraphError("an op is both a flow and a part of a collective")
        if self.slowdown.size and (self.slowdown.shape != (len(OpKind), len(OpKind)) or not (self.slowdown >= 1).all()):
            raise GraphError(f"slowdown must be {len(OpKind)} x {len(OpKind)} factors >= 1")
        if len(self.servers) and (len(self.servers) != self.devices or self.servers.min() < 1):
            raise GraphError(f"servers must be a number >= 1 for each of the {self.devices} devices")
        if self.cores is not None:
            self._check_cores(self.cores)
        if len(self.collective):
            parts = np.flatnonzero(self.collective >= 0)
            pairs = np.stack((self.collective[parts], self.device[parts]))
            _, first, counts = np.unique(pairs, axis=1, return_index=True, return_counts=True)
            unbounded = self.policy[self.device[parts[first]]] == OrderPolicy.UNBOUNDED
            twice = np.flatnonzero((counts > 1) & ~unbounded)
            if len(twice):
                op = int(parts[first[twice[0]]])
                device = self.device_name(int(self.device[op]))
                raise GraphError(f"collective {int(self.collective[op])} has two parts on {device}: it can never start")

    def _check_cores(self, cores: SharedCores) -> None:
        count, links = len(self), len(self.link_bytes_per_us)
        lengths = {"core": self.devices, "idle_us": count, "core_us": count, "finish_us": count}
        lengths |= {"idle_bytes_per_us": links, "core_us_per_byte": links}
        for field_name, length in lengths.items():
            values = getattr(cores, field_name)
            if len(values) != length:
                raise GraphError(f"cores.{field_name} has {len(values)} entries, not {length}")
            if field_name != "core" and not ((values >= 0) & np.isfinite(values)).all():
                raise GraphError(f"cores.{field_name} must be numbers >= 0")
        if not (cores.idle_bytes_per_us > 0).all() or not (cores.latency_factors > 0).all():
            raise GraphError("cores.idle_bytes_per_us and cores.latency_factors must be above 0")
        message, computes = cores.idle_us > 0, cores.core[self.device] >= 0
        part = self.collective >= 0 if len(self.collective) else np.zeros(count, np.bool_)
        flow = self.flow_bytes > 0 if len(self.flow_bytes) else np.zeros(count, np.bool_)
        self._refuse(message & (self.duration_us <= 0), "duration_us", "must be above 0, for it is a message", self.duration_us)
        self._refuse((message | flow | part) & computes, "device", "has a core: it takes no message, flow or part of a collective")
        self._refuse((message | (cores.finish_us > 0)) & part, "collective", "has no messages")
        self._refuse(~message & ((cores.core_us > 0) | (cores.finish_us > 0)), "duration_us", "needs an idle_us to be a message")

    def _refuse(self, bad: Any, field_name: str, must: str, values: npt.NDArray[Any] | None = None) -> None:
        ops = np.flatnonzero(bad)
        if len(ops):
            shown = (getattr(self, field_name) if values is None else values)[ops[0]]
            more = f" (and {len(ops) - 1} more)" if len(ops) > 1 else ""
            raise GraphError(f"{field_name} of {self.name(int(ops[0]))} is {shown}{more}: it {must}")


def csr(owner: npt.NDArray[Any], value: npt.NDArray[Any], rows: int) -> tuple[Int32s, Int32s]:
    """Pairs (owner, value) as CSR rows, each row in the order of the pairs."""
    ptr = np.zeros(rows + 1, np.int32)
    np.cumsum(np.bincount(owner, minlength=rows), out=ptr[1:])
    return ptr, value[np.argsort(owner, kind="stable")].astype(np.int32)
