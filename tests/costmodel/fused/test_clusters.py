"""Clusters of a recorded job's ops: priced as the same cluster would be if it had been measured; missing shapes are reported."""

from pathlib import Path

import numpy as np
import pytest
from costmodel.fused.clusters import clusters, model

from dpro_search.collect.trace import GraphTensors, NodeGraph, TensorType, Trace
from dpro_search.costmodel.fused.clusters import ClusterCosts
from dpro_search.costmodel.fused.features import shaped_features, timed_features
from dpro_search.costmodel.fused.flatten import flatten
from dpro_search.costmodel.fused.timed import leaders, timed_ops
from dpro_search.costmodel.intervals import PredictionOrigin
from dpro_search.errors import InputError
from dpro_search.graph.build import build_graph
from dpro_search.graph.dataflow import DataflowGraph, topological_order

SAMPLE = Path(__file__).resolve().parents[3] / "dpro_search" / "samples" / "resnet50_2ranks_2gbit"


def recorded_alike(cluster):
    """(graph, the rank's graph with shapes, names of the ops): a job that consists of a measured cluster and what surrounds it."""
    names, types, needs = [], [], []  # needs: of each node, (source, port, tensor) of each input
    made = {}

    def add(op_type, inputs=()):
        names.append(f"{op_type}_{len(names)}")
        types.append(op_type)
        needs.append([(*made[number], number) for number in inputs])
        return len(names) - 1

    outer = {"in": "Placeholder", "const": "Const"}
    for number, tensor in enumerate(cluster.tensors):
        if tensor.role in outer:
            made[number] = add(outer[tensor.role]), 0
    members = []
    for op in cluster.ops:
        members.append(add(op.type, op.inputs))
        made |= {number: (members[-1], port) for port, number in enumerate(op.outputs)}
    for number, tensor in enumerate(cluster.tensors):
        if tensor.role == "out":
            add("_Retval", [number])
    ptr = np.cumsum([0, *map(len, needs)])
    edges = [edge for inputs_of_node in needs for edge in inputs_of_node]
    work = np.zeros((3, len(names)))
    work[:, members] = cluster.op_us
    source = np.array([edge[0] for edge in edges], dtype=np.int64)
    graph = DataflowGraph(
        op_name=tuple(names),
        op_type=tuple(types),
        op_rank=np.zeros(len(names), dtype=np.int64),
        op_kind=np.zeros(len(names), dtype=np.int64),
        op_work_us=work,
        pred_ptr=ptr,
        pred_idx=source,
        tensors=(),
        placements=(),
        profiles=(),
        steps=np.arange(3),
        unplaced={},
    )
    tensors = GraphTensors(
        types=tuple(TensorType(tensor.dtype, tensor.shape) for tensor in cluster.tensors),
        input_port=np.array([edge[1] for edge in edges], dtype=np.int64),
        input_type=np.array([edge[2] for edge in edges], dtype=np.int64),
        workspace_bytes=np.zeros(len(names), dtype=np.int64),
    )
    recorded = NodeGraph(name=tuple(names), op=tuple(types), input_ptr=ptr, input_idx=source, tensors=tensors)
    return graph, recorded, [names[member] for member in members]


def told_whole():
    """Measured clusters that a trace can hold as they are: of plain ops without variables, each with one result."""
    return [
        cluster
        for cluster in clusters()
        if leaders(flatten([cluster])).tolist() == list(range(len(cluster.ops)))
        and all(tensor.role != "variable" for tensor in cluster.tensors)
        and all(len(op.outputs) == 1 and "equation" not in op.attributes for op in cluster.ops)
    ]


def test_with_shapes_a_recorded_cluster_is_priced_as_a_measured_one():
    some = told_whole()[:40]
    assert len(some) == 40
    for cluster in some:
        graph, recorded, names = recorded_alike(cluster)
        times = ClusterCosts(model(), graph, recorded=recorded).times([names])
        expected = model().shaped.predict_interval(shaped_features([cluster]))
        assert times.shaped.all()
        np.testing.assert_allclose([times.us, times.low_us, times.high_us], [expected.us, expected.low_us, expected.high_us])


def test_without_shapes_it_is_priced_by_types_times_and_wiring():
    for cluster in told_whole()[:40]:
        graph, _, names = recorded_alike(cluster)
        times = ClusterCosts(model(), graph).times([names])
        expected = model().timed.predict_interval(timed_features(timed_ops(flatten([cluster]))))
        assert not times.shaped.any()
        np.testing.assert_allclose([times.us, times.low_us], [expected.us, expected.low_us])


def test_a_tensor_that_was_not_seen_makes_its_clusters_ones_without_shapes():
    cluster = next(cluster for cluster in told_whole() if any(tensor.role == "in" for tensor in cluster.tensors))
    graph, recorded, names = recorded_alike(cluster)
    recorded.tensors.input_type[:] = np.where(recorded.tensors.input_type == 0, -1, recorded.tensors.input_type)
    assert not ClusterCosts(model(), graph, recorded=recorded).times([names]).shaped[0]


def test_clusters_of_a_real_job():
    graph = build_graph(Trace.load(SAMPLE))
    costs = ClusterCosts(model(), graph)
    chains = chains_of(graph, 30)
    times = costs.times(chains)
    assert len(times) == 30
    predicted = times.origin != PredictionOrigin.REFUSED
    assert predicted.any()
    assert (times.low_us[predicted] < times.us[predicted]).all()
    assert (times.us[predicted] < times.high_us[predicted]).all()
    index = {graph.op_name[i]: i for i in np.flatnonzero(graph.op_rank == 0)}
    members = [sum(np.median(graph.op_work_us[:, index[name]]) for name in chain) for chain in chains]
    np.testing.assert_allclose(times.members_us, members)


def test_many_clusters_at_once_are_priced_as_each_alone():
    graph = build_graph(Trace.load(SAMPLE))
    costs = ClusterCosts(model(), graph)
    chains = chains_of(graph, 20)
    together = costs.times([chains[0], chains[1] + chains[0], *chains])
    alone = [costs.times([chain]) for chain in chains]
    np.testing.assert_allclose(together.us[2:], np.concatenate([one.us for one in alone]))
    assert together.us[0] == together.us[2]


def test_an_op_that_was_not_recorded_is_named():
    graph, _, _ = recorded_alike(told_whole()[0])
    with pytest.raises(InputError, match="no ops"):
        ClusterCosts(model(), graph).times([[]])
    with pytest.raises(InputError, match="nowhere"):
        ClusterCosts(model(), graph).times([["nowhere"]])


def chains_of(graph, count):
    """Pairs of ops of rank 0 that took time, the second of which uses the first one's result."""
    took = np.median(graph.op_work_us, axis=0) > 0
    return [
        (graph.op_name[source], graph.op_name[op])
        for op in topological_order(graph.pred_ptr, graph.pred_idx)
        for source in graph.pred_idx[graph.pred_ptr[op] : graph.pred_ptr[op + 1]]
        if graph.op_rank[op] == graph.op_rank[source] == 0 and took[op] and took[source]
    ][:count]
