"""Which compiled replay a graph needs, and what it wants beside a layout's arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.replay.kernels.fixed import simulate
from dpro_search.replay.kernels.fluid import simulate_fluid
from dpro_search.replay.layout import Layout
from dpro_search.replay.stuck import stuck_error
from dpro_search.space.replay_graph import Int32s, ReplayGraph, SharedCores


class Kernel(NamedTuple):
    """A compiled replay, and what it wants between a layout's arrays and those that it fills."""

    simulate: Callable[..., int]
    own: tuple[Any, ...]


class Filled(NamedTuple):
    """Times by label: ready, start and end, [n]; when each collective began to move data; labels in the order of their starts."""

    ready_us: Floats
    start_us: Floats
    end_us: Floats
    moved_us: Floats
    order: Int32s


def kernel_of(graph: ReplayGraph, layout: Layout) -> Kernel:
    """The fastest that can replay a graph."""
    if not graph.is_fluid:
        return Kernel(simulate, ())
    return fluid_kernel(graph.op_kind[layout.op_of], graph, _flows(graph, layout.op_of), layout.op_of)


def fluid_kernel(kind: Any, graph: ReplayGraph, flows: tuple[Any, ...], row: Int32s) -> Kernel:
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
    return Kernel(simulate_fluid, (kind, ranks, *flows, graph.slowdown, servers, *_cores(graph.cores, row)))


def simulated(graph: ReplayGraph, layout: Layout, kernel: Kernel, duration_us: Floats) -> Filled:
    """Replay with durations by label, [n]. Raises `GraphError` for a deadlock."""
    count = len(graph)
    ready, start, end = (np.empty(count + 1) for _ in range(3))
    moved, order = np.empty(layout.collectives), np.empty(count, np.int32)
    started = kernel.simulate(
        duration_us,
        layout.device,
        layout.key,
        layout.priority,
        layout.succ_ptr,
        layout.succ_idx,
        layout.needs,
        layout.policy,
        layout.slot_ptr,
        layout.program,
        layout.collective,
        layout.part_ptr,
        layout.part,
        *kernel.own,
        *(ready, start, end, moved, order),
    )
    if started < count:
        raise stuck_error(graph, layout.op_of[order[:started]])
    return Filled(ready[:-1], start[:-1], end[:-1], moved, order)


def _cores(cores: SharedCores | None, row: Int32s) -> tuple[Any, ...]:
    if cores is None:
        nothing, none = np.zeros(0), np.zeros(0, np.int32)
        return (none, none, *(nothing,) * 6)
    columns = cores.idle_us, cores.core_us, cores.finish_us, cores.idle_bytes_per_us, cores.core_us_per_byte, cores.latency_factors
    return (cores.core, row, *columns)


def _flows(graph: ReplayGraph, op_of: Int32s) -> tuple[Any, ...]:
    flows = graph.flow_bytes[op_of] if len(graph.flow_bytes) else graph.flow_bytes
    link_ptr, link_idx = graph.link_ptr, graph.link_idx
    if len(flows):
        lengths = np.diff(graph.link_ptr)[op_of]
        link_ptr = np.zeros(len(op_of) + 1, np.int32)
        np.cumsum(lengths, out=link_ptr[1:])
        link_idx = graph.link_idx[np.repeat(graph.link_ptr[:-1][op_of] - link_ptr[:-1], lengths) + np.arange(link_ptr[-1])]
    return flows, link_ptr, link_idx, graph.link_bytes_per_us
