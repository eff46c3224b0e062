"""The executed graph of a timeline for networkx: what each op waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpro_search.replay.kernels.executed import dependencies, executed
from dpro_search.replay.outputs.table import table
from dpro_search.replay.timeline import Timeline

if TYPE_CHECKING:
    import networkx


def to_networkx(timeline: Timeline) -> networkx.DiGraph:
    """Nodes are the numbers of the ops in `Timeline.times`, with the columns of `table` and the ``collective`` (-1: none).

    An edge leads from an op to one that could not start before its end; ``cause`` is "dependency", or "device" where only the
    device's order makes it wait. That parts of a collective wait for each other is not an edge.
    """
    import networkx

    columns = table(timeline)
    del columns["op"]
    count = len(timeline.times.end_us)
    collective = timeline.graph.collective if len(timeline.graph.collective) else np.full(len(timeline.graph), -1)
    columns["collective"] = np.tile(collective, timeline.iterations)
    graph = networkx.DiGraph()
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    graph.add_nodes_from((op, dict(zip(columns, row, strict=True))) for op, row in zip(range(count), rows, strict=True))
    previous = executed(timeline).previous
    served = np.flatnonzero(previous >= 0)
    graph.add_edges_from(zip(previous[served].tolist(), served.tolist(), strict=True), cause="device")
    source, destination = dependencies(timeline)
    graph.add_edges_from(zip(source.tolist(), destination.tolist(), strict=True), cause="dependency")
    return graph
