"""How MXNet's KVStore cuts gradients: tensors above a bound over all servers, or slices of one size with priorities (P3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from dpro_search.machine import machine_constants
from dpro_search.space.plan import Plan
from dpro_search.space.schemes import KvstoreSettings
from dpro_search.space.servers.kvstore_job import KvstoreJob, PushCompression
from dpro_search.space.transformations._base import RECORDED, Choice, JobFacts, Knob, geometric, grid
from dpro_search.space.transformations.servers import servers_under

MOST_SLICES = 20_000
_MOST_TRIED = 4_000  # slices of what samplers try: a replay takes as long as there are
_SMALLEST_ELEMENTS = 1000


class KeySlicing(Knob):
    """KVStore's bound, or priority slices of a number of elements."""

    name = "slicing"
    fields = ("bigarray_bound", "p3", "slice_threshold")

    def __init__(self, job: JobFacts, elements: tuple[int, ...]) -> None:
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
        least = max(_SMALLEST_ELEMENTS, 2 * total // _MOST_TRIED)
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


def in_priority_slices(plan: Plan, job: JobFacts) -> bool:
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
