"""Which compiled replay a graph needs, and what it wants beside a layout's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.replay.kernels.fixed import simulate
from dpro_search.replay.kernels.fluid import Fluid, simulate_fluid
from dpro_search.replay.kernels.layout import Layout
from dpro_search.replay.kernels.stuck import stuck_error
from dpro_search.replay.kernels.times import Filled
from dpro_search.space.replay_graph import Int8s, Int32s, ReplayGraph, SharedCores

_CORE_COLUMNS = "idle_us", "core_us", "finish_us", "idle_bytes_per_us", "core_us_per_byte", "latency_factors"  # of `SharedCores`


class Kernel(NamedTuple):
    """A compiled replay, and what it wants beside the layout."""

    simulate: Callable[..., int]
    own: tuple[Fluid, ...]


def kernel_of(graph: ReplayGraph, layout: Layout) -> Kernel:
    """The fastest that can replay a graph."""
    if not graph.is_fluid:
        return Kernel(simulate, ())
    return fluid_kernel(graph.op_kind[layout.op_of], graph, _flows(graph, layout.op_of), layout.op_of)


def fluid_kernel(kind: Int8s, graph: ReplayGraph, flows: tuple[Floats, Int32s, Int32s, Floats], row: Int32s) -> Kernel:
    """The one that can replay every graph.

    Parameters
    ----------
    kind
        Of each op, by label.
    flows
        Bytes of each op and the links that it crosses, by label, and the rates of the links.
    row
        Where each op's entries in the columns of `SharedCores` stand, by label.
    """
    servers = graph.servers if len(graph.servers) else np.ones(graph.devices, np.int32)
    ranks = graph.rank_of_device.astype(np.int32, copy=False)
    return Kernel(simulate_fluid, (Fluid(kind, ranks, *flows, graph.slowdown, servers, **_cores(graph.cores, row)),))


def simulated(graph: ReplayGraph, layout: Layout, kernel: Kernel, duration_us: Floats) -> Filled:
    """Replay with durations by label, [n]. Raises `GraphError` for a deadlock."""
    count = len(graph)
    ready, start, end = (np.empty(count + 1) for _ in range(3))
    filled = Filled(ready, start, end, np.empty(layout.collectives), np.empty(count, np.int32))
    started = kernel.simulate(layout, *kernel.own, duration_us, filled)
    if started < count:
        raise stuck_error(graph, layout.op_of[filled.order[:started]])
    return filled._replace(ready_us=ready[:-1], start_us=start[:-1], end_us=end[:-1])


def _cores(cores: SharedCores | None, row: Int32s) -> dict[str, Any]:
    if cores is None:
        nothing, none = np.zeros(0), np.zeros(0, np.int32)
        return {"core": none, "row": none} | dict.fromkeys(_CORE_COLUMNS, nothing)
    return {"core": cores.core, "row": row} | {name: getattr(cores, name) for name in _CORE_COLUMNS}


def _flows(graph: ReplayGraph, op_of: Int32s) -> tuple[Floats, Int32s, Int32s, Floats]:
    flows = graph.flow_bytes[op_of] if len(graph.flow_bytes) else graph.flow_bytes
    link_ptr, link_idx = graph.link_ptr, graph.link_idx
    if len(flows):
        lengths = np.diff(graph.link_ptr)[op_of]
        link_ptr = np.zeros(len(op_of) + 1, np.int32)
        np.cumsum(lengths, out=link_ptr[1:])
        link_idx = graph.link_idx[np.repeat(graph.link_ptr[:-1][op_of] - link_ptr[:-1], lengths) + np.arange(link_ptr[-1])]
    return flows, link_ptr, link_idx, graph.link_bytes_per_us
