"""Transformations of jobs with parameter servers, and such a job under a plan.

How many servers there are and on which hosts; how MXNet's KVStore cuts gradients (tensors above a bound over all servers, or slices
of one size with priorities, P3): `kvstore_under`; BytePS's parts and how many bytes of them may be under way: `byteps_under`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from dpro_search.machine import machine_constants
from dpro_search.space.plan import Plan
from dpro_search.space.schemes import BytepsSettings, KvstoreSettings
from dpro_search.space.servers.byteps_job import PAGE_BYTES, BytepsJob, HalfGradients
from dpro_search.space.servers.kvstore_job import KvstoreJob, PushCompression
from dpro_search.space.servers.placement import hosts_of_workers, on_workers, own_hosts
from dpro_search.space.transformations._base import RECORDED, Choice, Knob, PlanningFacts, geometric, grid

MOST_SERVERS = 1024
_MOST_SERVERS_TRIED = 16
MOST_SLICES = 20_000
_MOST_PARTS_TRIED = 4_000  # slices or parts of what samplers try: a replay takes as long as there are
_SMALLEST_ELEMENTS = 1000
MOST_PARTS = 20_000


class ServerCount(Knob):
    """More servers than recorded take the recorded cores in turn."""

    name = "servers"
    fields = ("servers",)

    def legal(self, plan: Plan) -> str | None:
        if plan.servers is not None and plan.servers > MOST_SERVERS:
            return f"servers={plan.servers}: at most {MOST_SERVERS} are replayed"
        return None

    @cached_property
    def choice(self) -> Choice:
        recorded = int(self.job.values["servers"])
        counts = [count for count in range(1, min(max(2 * recorded, 4), _MOST_SERVERS_TRIED) + 1) if count != recorded]
        return self.chosen_from(counts)


class ServerPlacement(Knob):
    """Servers on the workers' hosts, or on hosts of their own; there is nothing to choose where links have no limit."""

    name = "placement"
    fields = ("servers_on_workers",)

    def __init__(self, job: PlanningFacts, *, limited: bool) -> None:
        self.limited = limited
        super().__init__(job)

    def simplest(self, plan: Plan) -> Plan:
        """Without limits the field has no effect."""
        return super().simplest(plan) if self.limited else plan.changed(servers_on_workers=None)

    @cached_property
    def choice(self) -> Choice | None:
        if not self.limited:
            return None
        other = not self.job.values["servers_on_workers"]
        return self.chosen_from((other,))


def servers_under(plan: Plan, job: KvstoreJob | BytepsJob) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Core and host of each server of a job under a plan.

    On a worker's host a server has the worker's core, if the job's servers have cores of workers.
    """
    workers, recorded = len(job.worker_core), len(job.server_core)
    servers = recorded if plan.servers is None else plan.servers
    together = on_workers(workers, job.server_host)
    chosen = None if job.bytes_per_us is None else plan.servers_on_workers
    on_workers_now = together if chosen is None else chosen
    if servers == recorded and on_workers_now == together:
        return job.server_core, job.server_host
    core = _cores(servers, job.worker_core, job.server_core)
    if not on_workers_now:
        return core, own_hosts(workers, servers)
    host = hosts_of_workers(job.worker_hosts, servers)
    if set(job.server_core) <= set(job.worker_core):
        core = tuple(job.worker_core[at * job.workers_per_host] for at in host)
    return core, host


def _cores(servers: int, worker_core: Sequence[int], server_core: Sequence[int]) -> tuple[int, ...]:
    """The core of each of a number of servers: the recorded ones, and for more the job's cores in turn."""
    if servers == len(server_core):
        return tuple(server_core)
    cores = sorted({*worker_core, *server_core})
    return tuple(cores[server % len(cores)] for server in range(servers))


class KeySlicing(Knob):
    """KVStore's bound, or priority slices of a number of elements."""

    name = "slicing"
    fields = ("bigarray_bound", "p3", "slice_threshold")

    def __init__(self, job: PlanningFacts, elements: tuple[int, ...]) -> None:
        self.elements = elements
        super().__init__(job)

    def legal(self, plan: Plan) -> str | None:
        settings = KvstoreSettings.of(plan)
        if settings.p3 is None and settings.slice_threshold is None:
            return None
        threshold = settings.slice_threshold or self.job.values["slice_threshold"]
        slices = sum(math.ceil(count / threshold) for count in self.elements)
        if in_priority_slices(plan, self.job) and slices > MOST_SLICES:
            return f"slice_threshold={threshold} cuts the tensors into {slices} slices; at most {MOST_SLICES} are replayed"
        return None

    def propose(self, plan: Plan, rng: np.random.Generator, hot: Mapping[str, float]) -> Plan:
        """A step on the grids; one to priority slices leaves compression out, for these are never compressed."""
        moved = super().propose(plan, rng, hot)
        return moved.changed(compression=None) if in_priority_slices(moved, self.job) else moved

    def simplest(self, plan: Plan) -> Plan:
        """With priority slices the bound has no effect, and without them their size has none."""
        idle = "bigarray_bound" if in_priority_slices(plan, self.job) else "slice_threshold"
        return super().simplest(plan.changed(**{idle: None}))

    @cached_property
    def choice(self) -> Choice:
        largest, total = max(self.elements), sum(self.elements)
        least = max(_SMALLEST_ELEMENTS, 2 * total // _MOST_PARTS_TRIED)
        bounds = geometric(_SMALLEST_ELEMENTS, largest + 1, 2.0)
        slices = geometric(least, max(largest, least), 2.0)
        plain: tuple[dict[str, object], ...] = grid("bigarray_bound", bounds)
        sliced: tuple[dict[str, object], ...] = grid("slice_threshold", slices)
        priority = self.job.values["p3"]
        return Choice(
            name=self.name,
            fields=self.fields,
            grids={
                RECORDED: ({},),
                "bound": tuple({"p3": False, **point} for point in plain) if priority else plain,
                "priority": sliced if priority else tuple({"p3": True, **point} for point in sliced),
            },
        )


def in_priority_slices(plan: Plan, job: PlanningFacts) -> bool:
    """Whether a job has priority slices under a plan."""
    settings = KvstoreSettings.of(plan)
    return bool(job.values["p3"] if settings.p3 is None else settings.p3)


def kvstore_under(plan: Plan, job: KvstoreJob) -> KvstoreJob:
    """A job with parameter servers as a plan would have it."""
    old, settings = job.slicing, KvstoreSettings.of(plan)
    slicing = replace(
        old,
        servers=old.servers if plan.servers is None else plan.servers,
        bound=old.bound if settings.bigarray_bound is None else settings.bigarray_bound,
        priority=old.priority if settings.p3 is None else settings.p3,
        slice_threshold=old.slice_threshold if settings.slice_threshold is None else settings.slice_threshold,
    )
    compression = job.compression if plan.compression is None else _two_bit()
    core, host = servers_under(plan, job)
    return replace(job, slicing=slicing, compression=compression, server_core=core, server_host=host)


def _two_bit() -> PushCompression:
    known = machine_constants().kvstore
    return PushCompression(
        share=1 / 16, quantize_us_per_byte=known.quantize_us_per_byte, dequantize_us_per_byte=known.dequantize_us_per_byte
    )


class TensorPartition(Knob):
    """BYTEPS_PARTITION_BYTES, which BytePS takes in whole pages."""

    name = "partition"
    fields = ("partition_bytes",)

    def legal(self, plan: Plan) -> str | None:
        size_bytes = BytepsSettings.of(plan).partition_bytes
        if size_bytes is None:
            return None
        pages = math.ceil(size_bytes / PAGE_BYTES)
        parts = sum(math.ceil(tensor.size_bytes / (pages * PAGE_BYTES)) for tensor in self.job.tensors)
        if parts > MOST_PARTS:
            return f"partition_bytes={size_bytes} cuts the tensors into {parts} parts; at most {MOST_PARTS} are replayed"
        return None

    @cached_property
    def choice(self) -> Choice:
        sizes = [tensor.size_bytes for tensor in self.job.tensors]
        least = max(4 * PAGE_BYTES, 2 * sum(sizes) / _MOST_PARTS_TRIED)
        parts = geometric(least, max(*sizes, least), 2**0.5, multiple_of=PAGE_BYTES)
        return self.chosen_from(parts)


class Credit(Knob):
    """BYTEPS_SCHEDULING_CREDIT; 0 is off."""

    name = "credit"
    fields = ("credit",)

    @cached_property
    def choice(self) -> Choice:
        credits = [credit for credit in (0, 1, 2, 4, 8, 16, 32) if credit != self.job.values["credit"]]
        return self.chosen_from(credits)


def byteps_under(plan: Plan, job: BytepsJob) -> BytepsJob:
    """A BytePS job as a plan would have it."""
    core, host = servers_under(plan, job)
    settings = BytepsSettings.of(plan)
    return replace(
        job,
        partition_bytes=job.partition_bytes if settings.partition_bytes is None else settings.partition_bytes,
        credit=job.credit if settings.credit is None else settings.credit,
        server_core=core,
        server_host=host,
        halves=job.halves if plan.compression is None else _halves(),
    )


def _halves() -> HalfGradients:
    known = machine_constants().byteps
    return HalfGradients(call_us=known.cast_call_us, us_per_byte=known.cast_us_per_byte)
