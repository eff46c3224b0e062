"""The graph of a real recording, and what is refused."""

from dataclasses import replace

import networkx
import numpy as np
import pytest
from sample import measured, sample

from dpro_search.collect.trace import EventKind
from dpro_search.errors import GraphError
from dpro_search.graph.build import build_graph
from dpro_search.graph.dataflow import OpKind, topological_order


def test_every_gradient_has_producer_communication_and_consumer_on_every_rank():
    graph = measured().graph
    assert len(graph.tensors) == len(sample().tensors)
    for placement in graph.placements:
        for rank in range(graph.ranks):
            assert graph.op_kind[placement.comm[rank]] == OpKind.COMM
            assert graph.op_rank[placement.producer[rank]] == rank
            assert placement.consumers[rank]


def test_the_graph_is_acyclic_and_a_collective_waits_for_all_ranks():
    graph = measured().graph
    assert len(topological_order(graph.pred_ptr, graph.pred_idx)) == len(graph)
    for placement in graph.placements:
        for op in placement.comm:
            needs = graph.pred_idx[graph.pred_ptr[op] : graph.pred_ptr[op + 1]]
            assert set(placement.producer) <= set(needs.tolist())


def test_sums_of_gradients_are_of_the_backward_pass():
    """They are made outside of the gradients' scope."""
    graph = measured().graph
    sums = [op for op in range(len(graph)) if graph.op_type[op] == "AddN" and "gradient_tape/" not in graph.op_name[op]]
    assert sums
    assert {int(graph.op_kind[op]) for op in sums} <= {OpKind.BACKWARD, OpKind.UPDATE}


def test_core_time_adds_up_to_the_measured_cpu_time():
    graph, steps = measured().graph, sample().steps
    for rank, profile in enumerate(graph.profiles):
        untraced = steps.compute_cpu_us[(steps.rank == rank) & ~steps.traced & (steps.index >= 4)]
        divided = profile.main_us + sum(release.work_us for release in profile.releases) + profile.host_us
        assert np.mean(divided) == pytest.approx(np.median(untraced), rel=0.05)


def test_gradients_are_posted_within_the_main_stream_and_in_order():
    for profile in measured().graph.profiles:
        assert (profile.post_us <= profile.main_us[:, None] + 1e-6).all()
        assert (profile.post_us > 0).all()
    mean = np.mean([profile.post_us for profile in measured().graph.profiles], axis=(0, 1))
    assert np.corrcoef(mean, np.arange(len(mean)))[0, 1] > 0.95


def test_what_has_no_place_is_reported():
    graph = measured().graph
    nodes = {f"{name}@{rank}" for name, rank in zip(graph.op_name, graph.op_rank, strict=True)}
    for key, reason in graph.unplaced.items():
        assert reason
        assert ("not in the executed graph" in reason) == (key not in nodes)


def test_the_networkx_view_has_the_same_ops_and_edges():
    graph = measured().graph
    view = graph.to_networkx()
    assert networkx.is_directed_acyclic_graph(view)
    assert view.number_of_nodes() == len(graph)
    assert view.number_of_edges() == len(set(zip(*(side.tolist() for side in graph.edges()), strict=True)))


def without_rank(rank):
    trace = sample()
    return replace(trace, events=trace.events.select(trace.events.rank != rank), steps=trace.steps.select(trace.steps.rank != rank))


def test_a_missing_rank_is_named():
    with pytest.raises(GraphError, match="rank 1"):
        build_graph(without_rank(1))


def test_a_trace_without_gradients_is_refused():
    with pytest.raises(GraphError, match="no gradient"):
        build_graph(replace(sample(), tensors=()))


def test_a_gradient_that_was_not_communicated_is_named():
    trace = sample()
    lost = (trace.events.kind == EventKind.COMM) & (trace.events.tensor == 3) & (trace.events.rank == 1)
    with pytest.raises(GraphError, match=r"not communicated on rank 1") as error:
        build_graph(replace(trace, events=trace.events.select(~lost)))
    assert trace.tensors[3].name in str(error.value)


def test_a_step_that_was_not_profiled_is_refused():
    with pytest.raises(GraphError, match="none of the requested steps"):
        build_graph(sample(), (0,))


def test_names_that_no_node_of_the_graph_has_are_refused():
    trace = sample()
    nodes = {name for graph in trace.graphs for name in graph.name}
    names = tuple(f"other {name}" if name in nodes else name for name in trace.names)
    with pytest.raises(GraphError, match=r"^rank 0, step \d+: no op ran that waits for no communication"):
        build_graph(replace(trace, names=names))
