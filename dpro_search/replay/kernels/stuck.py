"""Why a replay got stuck: a cycle of dependencies, or ranks that post collectives in different orders."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dpro_search.errors import GraphError
from dpro_search.space.replay_graph import Int32s, OrderPolicy, ReplayGraph

if TYPE_CHECKING:
    import networkx

_SHOWN = 6  # ops that an error names

Bools = npt.NDArray[np.bool_]


def stuck_error(graph: ReplayGraph, order: Int32s) -> GraphError:
    """The error for a replay that stopped before all ops had started.

    Parameters
    ----------
    order
        The ops that did start, in any order, [any].
    """
    import networkx  # here, for replays are seldom stuck

    started = np.zeros(len(graph), np.bool_)
    started[order] = True
    open_ = ~_ended(graph, started)
    waits = networkx.DiGraph()
    source, destination = graph.edges()
    waits.add_edges_from(zip(source[open_[source]].tolist(), destination[open_[source]].tolist(), strict=True))
    cycle, what = _cycle(waits), "the dependencies have a cycle"
    if not cycle:  # then it is the order on the devices
        _add_device_waits(waits, graph, started, open_)
        _add_collective_waits(waits, graph, started, open_)
        cycle, what = _cycle(waits), "the dependencies contradict the program order of the devices"
        if len(graph.collective) and (graph.collective[cycle] >= 0).any():
            return _different_orders(graph, [op for op in cycle if graph.collective[op] >= 0 and started[op]])
    shown = [graph.name(op) for op in cycle[:_SHOWN]]
    more = f" -> ... ({len(cycle)} ops)" if len(cycle) > _SHOWN else f" -> {shown[0]}"
    return GraphError(f"{what}, no op on it can ever start: " + " -> ".join(shown) + more)


def _ended(graph: ReplayGraph, started: Bools) -> Bools:
    """Ops that ended: those that started, but for parts of a collective that waits for others."""
    ended = started.copy()
    if len(graph.collective):
        parts = np.flatnonzero(graph.collective >= 0)
        ended[parts] &= ~np.isin(graph.collective[parts], graph.collective[parts[~started[parts]]])
    return ended


def _cycle(waits: networkx.DiGraph) -> list[int]:
    """Ops of one cycle, each needed by the next; empty if none exists."""
    import networkx

    try:
        return [op for op, _ in networkx.find_cycle(waits)]
    except networkx.NetworkXNoCycle:
        return []


def _add_device_waits(waits: networkx.DiGraph, graph: ReplayGraph, started: Bools, open_: Bools) -> None:
    """An op that has not started waits for the op that holds its device; in program order for the one before it."""
    for device in np.unique(graph.device[open_]):
        ops = np.flatnonzero((graph.device == device) & open_)
        holding, waiting = ops[started[ops]].tolist(), ops[~started[ops]].tolist()
        if graph.policy[device] == OrderPolicy.PROGRAM:
            waits.add_edges_from(pairwise(holding + waiting))
        elif graph.policy[device] != OrderPolicy.UNBOUNDED:
            waits.add_edges_from((held, op) for held in holding for op in waiting)


def _add_collective_waits(waits: networkx.DiGraph, graph: ReplayGraph, started: Bools, open_: Bools) -> None:
    """A part that was posted waits for those that were not."""
    if not len(graph.collective):
        return
    parts = np.flatnonzero(open_ & (graph.collective >= 0))
    for collective in np.unique(graph.collective[parts]):
        of_collective = parts[graph.collective[parts] == collective]
        waits.add_edges_from(
            (late, early)
            for late in of_collective[~started[of_collective]].tolist()
            for early in of_collective[started[of_collective]].tolist()
        )


def _different_orders(graph: ReplayGraph, posted: list[int]) -> GraphError:
    """Each rank on the cycle has posted one collective and could post the next only after it."""
    facts = [f"rank {int(graph.rank_of_op[op])} waits in {graph.name(op)}" for op in posted[:_SHOWN]]
    return GraphError(
        "ranks post collectives in different orders, which is a deadlock in the real job too: "
        + ", ".join(facts)
        + "; post them in one order on all ranks"
    )
