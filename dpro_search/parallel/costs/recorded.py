"""`RecordedTimes`: blocks and exchanges at the time that was recorded, where it was, and scaled from what is nearest where not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dpro_search.collect.tables.parallel_times import BlockTime, ParallelTimes
from dpro_search.collect.trace import Floats
from dpro_search.costmodel.collectives.nccl import Placement
from dpro_search.parallel.gpu_ops import expected_largest

_LONGEST = 1.5
"""What takes so many times what is modelled of a GPU waited for the host: nine in ten ops take less, where nothing was measured of
the GPU (experiments/devices)."""


@dataclass(frozen=True)
class RankWork:
    """A rank's own work in a block, for one micro-batch, in us; see `BlockTime`."""

    forward_us: float
    backward_us: float
    reduce_us: float = 0.0
    spread: float = 0.0

    def of_slowest(self, ranks: int) -> RankWork:
        """Time of the slowest of so many ranks that wait for each other in each pass."""
        factor = 1.0 + self.spread * expected_largest(ranks)
        return replace(self, forward_us=self.forward_us * factor, backward_us=self.backward_us * factor)


@dataclass(frozen=True)
class PassWork:
    """Modelled time of a pass on a rank, in us."""

    device_us: float
    host_us: float = 0.0  # Of a GPU's host, which starts kernels meanwhile; a core does both.

    @property
    def us(self) -> float:
        """The longer of both."""
        return max(self.device_us, self.host_us)


@dataclass(frozen=True)
class ModelledWork:
    """Modelled time of a rank's own work in a block; see `RankWork`."""

    forward: PassWork
    backward: PassWork
    reduce_us: float = 0.0


@dataclass(frozen=True)
class BlockCut:
    """How a block is split, as far as it decides a rank's own work."""

    tp: int
    sequence_parallel: bool
    micro_batch: int
    sequence: int
    sharded: bool


class RecordedTimes:
    """Lookups in recorded times of one job's blocks; `rate_bps` is that of its hosts' links, `world` its number of ranks."""

    def __init__(self, times: ParallelTimes, rate_bps: float | None, world: int) -> None:
        self.times, self._rate_bps, self._world = times, rate_bps, world

    def block(self, name: str, cut: BlockCut, modelled: Callable[[BlockCut], ModelledWork]) -> RankWork | None:
        """A rank's own work in a block; None: the block was never timed.

        Where it was timed like that, the time; else that of the nearest cut, times the ratio of what a cost model says of both; of
        a pass that waited for the host, the difference of what the host takes is added, and no device is faster for it.

        Parameters
        ----------
        modelled
            What the cost model says of a cut.
        """
        rows = [row for row in self.times.blocks if row.block == name]
        if not rows:
            return None
        nearest = min(rows, key=lambda row: _distance(_cut(row), cut))
        recorded = RankWork(nearest.forward_us, nearest.backward_us, nearest.reduce_us, nearest.spread)
        if _cut(nearest) == cut:
            return recorded
        timed, modelled_here = modelled(_cut(nearest)), modelled(cut)
        return RankWork(
            _scaled_us(recorded.forward_us, timed.forward, modelled_here.forward),
            _scaled_us(recorded.backward_us, timed.backward, modelled_here.backward),
            recorded.reduce_us * _ratio(modelled_here.reduce_us, timed.reduce_us),
            recorded.spread,
        )

    @property
    def update(self) -> tuple[float, float]:
        """Fixed time of an update and its time per element, by least squares from the recorded points."""
        rows = self.times.updates
        if not rows:
            return 0.0, 0.0
        elements, us = np.array([row.elements for row in rows]), np.array([row.us for row in rows])
        if len(set(elements.tolist())) > 1:
            each, fixed = np.polyfit(elements, us, 1)
            if each > 0 and fixed > 0:
                return float(fixed), float(each)
        return 0.0, float((elements @ us) / (elements @ elements))

    def collective_us(self, collective: str, placement: Placement, size_bytes: float) -> float | None:
        """An exchange of a group that was timed with such links; None: none was."""
        curve = self._curves.get((collective, placement.ranks_per_node, placement.nodes))
        if curve is None:
            return None
        sizes, us = curve
        if size_bytes > sizes[-1] and len(sizes) > 1:
            return float(us[-1] + (size_bytes - sizes[-1]) * max(us[-1] - us[-2], 0.0) / (sizes[-1] - sizes[-2]))
        return float(np.interp(size_bytes, sizes, us))

    @cached_property
    def _curves(self) -> dict[tuple[str, int, int], tuple[Floats, Floats]]:
        """Mean times by size, of jobs with as many ranks, else of those with most.

        Within a host the links' rate does not matter: what was timed at another one serves where nothing was at this.
        """
        rows = [row for row in self.times.collectives if row.rate_bps == self._rate_bps or row.hosts == 1]
        curves: dict[tuple[str, int, int], tuple[Floats, Floats]] = {}
        for key in {(row.collective, row.ranks_per_host, row.hosts) for row in rows}:
            group = [row for row in rows if (row.collective, row.ranks_per_host, row.hosts) == key]
            worlds = {row.world for row in group}
            world = self._world if self._world in worlds else max(worlds)
            group = [row for row in group if row.world == world]
            by_size: dict[float, list[float]] = defaultdict(list)
            for row in [row for row in group if row.rate_bps == self._rate_bps] or group:
                by_size[row.size_bytes].append(row.us)
            curves[key] = np.array(sorted(by_size)), np.array([np.mean(by_size[size]) for size in sorted(by_size)])
        return curves


def _cut(row: BlockTime) -> BlockCut:
    return BlockCut(row.tp, row.sequence_parallel, row.micro_batch, row.sequence, row.sharded)


def _distance(one: BlockCut, other: BlockCut) -> tuple[float, ...]:
    """The degree decides most, then the tokens, then what is copied beside."""
    tokens = abs(np.log(one.micro_batch * one.sequence / (other.micro_batch * other.sequence)))
    return (
        float(abs(np.log2(one.tp / other.tp))),
        float(one.sequence != other.sequence),
        float(tokens),
        float(one.sequence_parallel != other.sequence_parallel),
        float(one.sharded != other.sharded),
    )


def _scaled_us(recorded_us: float, timed: PassWork, target: PassWork) -> float:
    """A pass that was timed under one cut, under another."""
    if timed.host_us and recorded_us > _LONGEST * timed.device_us:
        return max(target.device_us, recorded_us + target.host_us - timed.host_us)
    return max(recorded_us * _ratio(target.device_us, timed.device_us), target.host_us)


def _ratio(target: float, timed: float) -> float:
    return target / timed if timed > 0 else 1.0
