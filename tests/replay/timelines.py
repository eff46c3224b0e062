"""Timelines to analyse: of random graphs, and of a small job written down by hand."""

from dataclasses import replace

import numpy as np
from graphs import replay_graphs
from hypothesis import assume
from hypothesis import strategies as st

from dpro_search.errors import GraphError
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay import Timeline
from dpro_search.replay.reference import replay_reference
from dpro_search.replay.steady import unrolled
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph, csr


def timeline_of(graph, iterations=1):
    """The replay by the specification."""
    times = replay_reference(unrolled(graph, iterations))
    return Timeline(graph=graph, times=times, iterations=iterations, iteration_us=float(times.end_us.max()) / iterations)


@st.composite
def timelines(draw, *, buffers=False, **kwargs):
    """A random graph's timeline; deadlocks are left out."""
    repeated = draw(st.sampled_from([1, 1, 1, 2, 3]))
    graph = draw(replay_graphs(carry=repeated > 1, max_ops=24 // repeated, **kwargs))
    if buffers:
        graph = draw(with_buffers(graph))
    try:
        return timeline_of(graph, repeated)
    except GraphError:
        assume(False)


@st.composite
def with_buffers(draw, graph):
    """The graph with up to six buffers, some persistent."""
    op = st.integers(0, len(graph) - 1)
    buffers = draw(st.lists(st.tuples(op, st.integers(0, 50), st.lists(op, max_size=3)), max_size=6))
    use = [(number, op) for number, (_, _, uses) in enumerate(buffers) for op in uses]
    owner, user = (np.array([pair[i] for pair in use], np.int32) for i in (0, 1))
    ptr, idx = csr(owner, user, len(buffers))
    return replace(
        graph,
        buffer_op=np.array([op for op, _, _ in buffers], np.int32),
        buffer_bytes=np.array([size for _, size, _ in buffers], float),
        buffer_ptr=ptr,
        buffer_use=idx,
    )


def data_parallel(forward_us=(10.0, 30.0), backward_us=20.0, reduce_us=40.0, update_us=5.0, **fields):
    """Each rank computes forward and backward, reduces its gradient with the others, then updates: four ops a rank, two devices."""
    ranks = len(forward_us)
    first = 4 * np.arange(ranks)
    kinds = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.COMM, OpKind.UPDATE)
    source, destination = np.concatenate([np.stack((first + i, first + i + 1)) for i in range(3)], axis=1)
    ptr, idx = csr(destination, source, 4 * ranks)
    return ReplayGraph(
        **{
            "duration_us": np.array([us for own_us in forward_us for us in (own_us, backward_us, reduce_us, update_us)]),
            "device": np.array([2 * rank + queue for rank in range(ranks) for queue in (0, 0, 1, 0)], np.int32),
            "policy": np.full(2 * ranks, int(OrderPolicy.PROGRAM), np.int8),
            "rank_of_device": np.repeat(np.arange(ranks, dtype=np.int32), 2),
            "kind": np.tile(np.array(kinds, np.int8), ranks),
            "collective": np.tile(np.array([-1, -1, 0, -1], np.int32), ranks),
            "pred_ptr": ptr,
            "pred_idx": idx,
            "names": tuple(f"{name}@{rank}" for rank in range(ranks) for name in ("forward", "backward", "all-reduce", "update")),
            "device_names": tuple(f"{name}@{rank}" for rank in range(ranks) for name in ("compute", "network")),
        }
        | fields
    )
