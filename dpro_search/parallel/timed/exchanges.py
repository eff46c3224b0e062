"""`timed_exchanges`: what exchanges of groups of ranks take on Gloo, on hosts and links like those of a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from dpro_search._regular_files import read_regular
from dpro_search.collect._files import scratch_folder
from dpro_search.collect.launch.netns import shaped_hosts
from dpro_search.collect.launch.ranks import JobSpec, require_framework
from dpro_search.collect.launch.torch_ranks import run_torch_ranks
from dpro_search.collect.tables.parallel_times import CollectiveTime
from dpro_search.errors import JobError
from dpro_search.runtime import WORKERS

SIZES_BYTES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_SECONDS = 0.25  # for a point
_MESSAGES = {"send_recv": 2}  # that one call is


def timed_exchanges(
    spec: JobSpec,
    *,
    rate_bps: float | None,
    shaped: bool,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
) -> list[CollectiveTime]:
    """Run a job of exchanges only; `spec` is that of the job which is to be predicted, and only its interpreter runs.

    Raises
    ------
    JobError
        A rank failed.
    MissingCapabilityError
        The framework, or a permission for hosts with links, is missing.
    """
    require_framework(spec.interpreter, ("torch",), "torch")
    groups = tuple(_groups(spec.ranks))
    with scratch_folder("exchanges") as work, shaped_hosts(spec.hosts, rate_bps, shaped, spec.limits) as hosts:
        out = work / "times"
        command = (
            *(spec.interpreter, str(WORKERS / "dpro_search_mesh_worker.py"), str(out)),
            *(",".join(f"{stride}x{size}" for stride, size in groups), ",".join(map(str, sizes_bytes)), str(_SECONDS)),
        )
        run_torch_ranks(replace(spec, command=command), work, hosts=hosts)
        files = [Path(f"{out}-{rank}.json") for rank in range(spec.ranks)]
        if not all(file.is_file() for file in files):
            raise JobError("timing exchanges: a rank wrote nothing")
        rows = [msgspec.json.decode(read_regular(file), type=list[_Point]) for file in files]
    per_host = spec.ranks_per_host if shaped else spec.ranks
    return list(_times(rows, spec.ranks, per_host, rate_bps))


def _groups(world: int) -> Iterator[tuple[int, int]]:
    """Strides and sizes of groups that a mesh of so many ranks can have."""
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    for stride in divisors:
        yield from ((stride, size) for size in divisors if size > 1 and world % (stride * size) == 0)


class _Point(NamedTuple):
    """Calls of one exchange in all groups of a stride and size, as one rank saw them."""

    name: str
    stride: int
    size: int
    size_bytes: float
    spans_us: list[tuple[float, float]]  # Begin and end of each call.


def _times(rows: Sequence[Sequence[_Point]], world: int, per_host: int, rate_bps: float | None) -> Iterator[CollectiveTime]:
    """From the last begin of a group's ranks to its last end: means of calls, and over groups that are alike on the hosts.

    A step waits for every exchange, so that means count; the longest call is left out, for now and then a machine stalls.
    """
    times_of: dict[tuple[str, int, int, float], list[float]] = {}
    for points in zip(*rows, strict=True):
        name, stride, size, size_bytes, _ = points[0]
        taking = 2 if name == "send_recv" else size
        for first in (block + start for block in range(0, world, stride * size) for start in range(stride)):
            ranks = range(first, first + stride * taking, stride)
            spans = np.array([points[rank].spans_us for rank in ranks])
            each_us = spans[:, :, 1].max(axis=0) - spans[:, :, 0].max(axis=0)
            usual = each_us < each_us.max() if len(set(each_us)) > 1 else np.ones(len(each_us), bool)
            us = float(each_us[usual].mean())
            hosts = len({rank // per_host for rank in ranks})
            times_of.setdefault((name, taking // hosts, hosts, size_bytes), []).append(us / _MESSAGES.get(name, 1))
    for (name, on_host, hosts, size_bytes), us_of_groups in times_of.items():
        yield CollectiveTime(
            collective=name,
            ranks_per_host=on_host,
            hosts=hosts,
            world=world,
            rate_bps=rate_bps,
            size_bytes=size_bytes,
            us=float(np.mean(us_of_groups)),
        )
