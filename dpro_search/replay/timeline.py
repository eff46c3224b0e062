"""`Timeline`: the result of a replay, op by op."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.replay.kernels.times import OpTimes, device_order
from dpro_search.space.replay_graph import Int32s, ReplayGraph


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Times of every op; of several iterations where they were asked for."""

    graph: ReplayGraph  # What was replayed: n ops an iteration.
    times: OpTimes  # Of all iterations, [iterations * n]: op i of iteration k is at ``k * n + i``.
    iterations: int = 1  # Iterations that were replayed.
    iteration_us: float  # Settled distance between the ends of two iterations; the makespan where there is one iteration only.
    settled: bool = True  # Whether the distance stopped changing (see `steady.py`); True where there is one iteration only.
    # Iteration time of each Monte-Carlo replay, [samples]; empty where none were asked for.
    sampled_us: Floats = field(default_factory=lambda: np.zeros(0))

    def __repr__(self) -> str:
        ops = len(self.graph)
        return f"Timeline(iteration_us={self.iteration_us:.6g}, ops={ops}, iterations={self.iterations}, settled={self.settled})"

    @property
    def makespan_us(self) -> float:
        """The latest end of all ops."""
        return float(self.times.end_us.max())

    @cached_property
    def previous_on_device(self) -> Int32s:
        """The op that each op's device served just before it, -1 where none exists, [iterations * n].

        None on devices that run several ops at a time.
        """
        device = np.tile(self.graph.device.astype(np.int32, copy=False), self.iterations)
        before: Int32s = device_order(device, self.times.order, self.graph.serves_in_no_line)[0]
        return before

    def iteration_end_us(self) -> Floats:
        """Latest end of each iteration's ops, [iterations]."""
        ends: Floats = self.times.end_us.reshape(self.iterations, -1).max(axis=1)
        return ends

    def with_samples(self, sampled_us: Floats) -> Timeline:
        """The same with the iteration times of Monte-Carlo replays."""
        return replace(self, sampled_us=sampled_us)

    def quantile_us(self, q: float) -> float:
        """A quantile of the iteration time over the Monte-Carlo replays."""
        return float(np.quantile(self.sampled_us, q))
