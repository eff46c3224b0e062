"""Tensor partition of BytePS: the size of a tensor's parts, and how many bytes of them may be under way; a job under a plan."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

from dpro_search.machine import machine_constants
from dpro_search.space.plan import Plan
from dpro_search.space.schemes import BytepsSettings
from dpro_search.space.servers.byteps_job import PAGE_BYTES, BytepsJob, HalfGradients
from dpro_search.space.transformations._base import Choice, Knob, geometric
from dpro_search.space.transformations.servers import servers_under

MOST_PARTS = 20_000
_MOST_TRIED = 4_000  # parts of what samplers try: a replay takes as long as there are


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
        least = max(4 * PAGE_BYTES, 2 * sum(sizes) / _MOST_TRIED)
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
