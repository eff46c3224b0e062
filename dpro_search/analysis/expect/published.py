"""`comparable_runs`: published runs that are most like a job, by source, with their MFU (``published.toml``)."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files

import msgspec

from dpro_search.analysis.expect.answer import ComparableRuns
from dpro_search.parallel.model import parameters_of
from dpro_search.parallel.workload import Workload

_MOST = 4
_ALIKE = math.log(4.0)  # Parameters, and devices, that differ by more do not make runs comparable.


class _PublishedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one source with one device, precision and size of models."""

    source: str
    device: str
    precision: str
    parameters: tuple[float, float]
    devices: tuple[int, int]
    runs: int
    mfu_pct: tuple[float, float, float]


@lru_cache(maxsize=1)
def _published() -> Sequence[_PublishedRuns]:
    table = tomllib.loads((files("dpro_search.analysis.expect") / "published.toml").read_text("utf-8"))
    return msgspec.convert(table["runs"], list[_PublishedRuns])


def comparable_runs(workload: Workload) -> tuple[ComparableRuns, ...]:
    """Runs on the same device in the same precision whose models have about as many parameters, the most alike first."""
    parameters, devices = parameters_of(workload.model), workload.strategy.devices
    device = workload.cluster.groups[0].host.device.name
    ranked = []
    for each in _published():
        if each.device == device and each.precision == workload.precision:
            larger, more = _outside(parameters, each.parameters), _outside(devices, each.devices)
            if larger <= _ALIKE:
                ranked.append((larger + more / 2, each))
    ranked.sort(key=lambda pair: pair[0])
    return tuple(
        ComparableRuns(source=each.source, runs=each.runs, parameters=each.parameters, devices=each.devices, mfu_pct=each.mfu_pct)
        for _, each in ranked[:_MOST]
    )


def _outside(value: float, ends: tuple[float, float]) -> float:
    """By how much a value is outside of a range, as a logarithm; 0 within it."""
    return max(math.log(value / ends[1]), math.log(ends[0] / value), 0.0)
