"""`Repeated`: replays of several iterations of graphs that differ in numbers only, for their iteration time."""

from __future__ import annotations

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.replay.kernels.compiled import fluid_kernel, simulated
from dpro_search.replay.kernels.layout import lay_out
from dpro_search.replay.kernels.times import Filled
from dpro_search.replay.steady import unrolled
from dpro_search.space.replay_graph import ReplayGraph


class Repeated:
    """Ops, devices and dependencies of several iterations, laid out once.

    Attributes
    ----------
    iterations
        How many are replayed.
    """

    def __init__(self, pattern: ReplayGraph, iterations: int) -> None:
        """Lay out a graph of one iteration, whose own numbers do not count. Raises `GraphError` for what cannot be replayed."""
        pattern.validate()
        self.iterations = iterations
        self._whole = unrolled(pattern, iterations)
        self._layout = lay_out(self._whole)
        self._row = np.tile(np.arange(len(pattern), dtype=np.int32), iterations)

    def replay(self, graph: ReplayGraph, duration_us: Floats) -> Filled:
        """Times of all ops, [iterations * n]: op i of iteration k is at ``k * n + i``.

        Parameters
        ----------
        graph
            One iteration; equal to the pattern but for bytes, rates, slow-downs and shared cores.
        duration_us
            Of each op in each iteration, [iterations, n].

        Raises
        ------
        GraphError
            A deadlock.
        """
        whole = self._whole
        flows = np.tile(graph.flow_bytes, self.iterations), whole.link_ptr, whole.link_idx, graph.link_bytes_per_us
        return simulated(whole, self._layout, fluid_kernel(whole.op_kind, graph, flows, self._row), duration_us.ravel())
