"""Why a replay got stuck: a cycle of dependencies, or ranks that post collectives in different orders."""

from __future__ import annotations

import networkx
import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.errors import GraphError
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph

_SHOWN = 6  # ops that an error names


def stuck_error(graph: ReplayGraph, start_us: Floats, end_us: Floats) -> GraphError:
    """The error for a replay that stopped before all ops had ended; times that never came are infinite or NaN."""
    never_ended = np.flatnonzero(~np.isfinite(end_us))
    waits = networkx.DiGraph()
    waits.add_nodes_from(never_ended.tolist())
    _add_dependencies(waits, graph, end_us)
    if not _cycle(waits):  # the dependencies alone are fine: it is the order on the devices
        _add_device_waits(waits, graph, start_us, end_us)
        _add_collective_waits(waits, graph, start_us, end_us)
        cycle = _cycle(waits)
        if any(len(graph.collective) and graph.collective[op] >= 0 for op in cycle):
            return _different_orders(graph, cycle, start_us)
    else:
        cycle = _cycle(waits)
    if not cycle:
        return GraphError(f"{len(never_ended)} ops can never start, {graph.name(int(never_ended[0]))} first")
    shown = [graph.name(op) for op in cycle[:_SHOWN]]
    more = f" -> ... ({len(cycle)} ops)" if len(cycle) > _SHOWN else f" -> {shown[0]}"
    return GraphError("the dependencies have a cycle, no op on it can ever start: " + " -> ".join(shown) + more)


def _cycle(waits: networkx.DiGraph) -> list[int]:
    """Ops of one cycle, each needed by the next; empty if there is none."""
    try:
        return [op for op, _ in networkx.find_cycle(waits)]
    except networkx.NetworkXNoCycle:
        return []


def _add_dependencies(waits: networkx.DiGraph, graph: ReplayGraph, end_us: Floats) -> None:
    source, destination = graph.edges()
    open_ = ~np.isfinite(end_us[source])
    waits.add_edges_from(zip(source[open_].tolist(), destination[open_].tolist(), strict=True))


def _add_device_waits(waits: networkx.DiGraph, graph: ReplayGraph, start_us: Floats, end_us: Floats) -> None:
    """An op that has not started waits for the op that holds its device; in program order for the one before it."""
    for device in range(graph.devices):
        if graph.policy[device] == OrderPolicy.UNBOUNDED:
            continue
        ops = np.flatnonzero((graph.device == device) & ~np.isfinite(end_us))
        holding = ops[np.isfinite(start_us[ops])]
        waiting = ops[~np.isfinite(start_us[ops])]
        if graph.policy[device] == OrderPolicy.PROGRAM:
            line = [*holding.tolist(), *waiting.tolist()]
            waits.add_edges_from(zip(line[:-1], line[1:], strict=True))
        else:
            waits.add_edges_from((int(held), int(op)) for held in holding for op in waiting)


def _add_collective_waits(waits: networkx.DiGraph, graph: ReplayGraph, start_us: Floats, end_us: Floats) -> None:
    """A part that was posted waits for those that were not."""
    if not len(graph.collective):
        return
    open_ = np.flatnonzero(~np.isfinite(end_us) & (graph.collective >= 0))
    for collective in np.unique(graph.collective[open_]):
        parts = open_[graph.collective[open_] == collective]
        posted = np.isfinite(start_us[parts])
        waits.add_edges_from((int(late), int(early)) for late in parts[~posted] for early in parts[posted])


def _different_orders(graph: ReplayGraph, cycle: list[int], start_us: Floats) -> GraphError:
    """Each rank on the cycle has posted one collective and could post the next only after it."""
    posted = [op for op in cycle if graph.collective[op] >= 0 and np.isfinite(start_us[op])]
    facts = [f"rank {int(graph.rank_of_op[op])} waits in {graph.name(op)}" for op in posted[:_SHOWN]]
    return GraphError(
        "ranks post collectives in different orders, which is a deadlock in the real job too: "
        + ", ".join(facts)
        + "; post them in one order on all ranks"
    )
