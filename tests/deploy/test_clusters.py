"""Ops can be fused in clusters exactly if each can run as a whole: that is checked before a plan is exported or followed."""

from types import SimpleNamespace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro_search.runtime.follow.xla import cluster_problem, with_absorbed, with_passed

CHAIN = {"a": [], "b": ["a"], "c": ["b"], "d": ["c"]}


@st.composite
def graphs(draw):
    """A random graph (op -> what it needs) and random clusters in it."""
    count = draw(st.integers(2, 12))
    names = [f"op{i}" for i in range(count)]
    inputs = {
        name: [names[j] for j in sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))] if i else []
        for i, name in enumerate(names)
    }
    numbers = draw(st.lists(st.one_of(st.none(), st.integers(0, 2)), min_size=count, max_size=count))
    return inputs, {name: number for name, number in zip(names, numbers, strict=True) if number is not None}


@given(graphs())
def test_clusters_are_accepted_exactly_if_some_order_runs_each_as_a_whole(graph):
    inputs, cluster_of = graph
    whole = nx.DiGraph()
    for name, needed in inputs.items():
        node = cluster_of.get(name, name)
        whole.add_node(node)
        whole.add_edges_from((cluster_of.get(source, source), node) for source in needed if cluster_of.get(source, source) != node)
    assert (cluster_problem(cluster_of, inputs) is None) == nx.is_directed_acyclic_graph(whole)


def test_a_cluster_with_a_hole_is_refused_and_the_op_in_it_is_named():
    problem = cluster_problem({"a": 0, "c": 0}, CHAIN)
    assert problem is not None
    assert "'b' is not in it" in problem
    assert "not convex" in problem


def test_two_clusters_that_need_each_other_are_refused():
    crossing = {"a": [], "b": [], "c": ["a"], "d": ["b"]}
    assert cluster_problem({"a": 0, "d": 0, "b": 1, "c": 1}, crossing) == (
        "clusters [0, 1] need each other's results: no order runs each as a whole"
    )


def test_an_op_that_does_not_exist_is_named():
    assert "no op is named 'z'" in str(cluster_problem({"a": 0, "z": 0}, CHAIN))


@pytest.mark.parametrize("cluster_of", [{}, {"b": 0, "c": 0}, {"a": 0, "b": 0, "c": 1, "d": 1}])
def test_clusters_along_a_chain_are_fine(cluster_of):
    assert cluster_problem(cluster_of, CHAIN) is None


def graph_def(**ops):
    """As much of a GraphDef as is looked at: name -> (type, inputs)."""
    return SimpleNamespace(node=[SimpleNamespace(name=name, op=op, input=inputs) for name, (op, inputs) in ops.items()])


def test_what_only_passes_a_tensor_on_between_ops_of_a_cluster_is_of_the_cluster():
    step = graph_def(
        x=("Placeholder", []),
        mean=("Mean", ["x"]),
        stop=("StopGradient", ["mean:0"]),
        again=("Identity", ["stop"]),
        difference=("SquaredDifference", ["x", "again"]),
    )
    assert with_passed([["mean", "difference"]], step) == [["mean", "difference", "again", "stop"]]


@pytest.mark.parametrize("between", [("Softmax", ["mean"]), ("Identity", ["mean", "^x"])])
def test_what_computes_or_waits_stays_outside(between):
    step = graph_def(x=("Placeholder", []), mean=("Mean", ["x"]), between=between, sum=("AddV2", ["x", "between"]))
    assert with_passed([["mean", "sum"]], step) == [["mean", "sum"]]


def test_what_passes_a_tensor_from_one_cluster_to_another_stays_outside():
    step = graph_def(a=("Relu", []), passed=("Identity", ["a"]), b=("Relu", ["passed"]))
    assert with_passed([["a"], ["b"]], step) == [["a"], ["b"]]


CONVOLUTION = graph_def(
    x=("Placeholder", []),
    product=("Conv2D", ["x"]),
    biased=("BiasAdd", ["product"]),
    norm=("FusedBatchNormV3", ["biased"]),
    relu=("Relu", ["norm"]),
    variance=("Sub", ["norm:2"]),
)


@pytest.mark.parametrize(
    ("name", "recorded", "ops"),
    [
        ("biased", "_MklNativeFusedConv2D", ["biased", "product"]),
        ("norm", "_MklNativeFusedBatchNormEx", ["norm", "relu"]),
        ("norm", "_MklNativeFusedBatchNormV3", ["norm"]),
        ("biased", "BiasAdd", ["biased"]),
        ("biased", None, ["biased"]),
        ("nobody", "_FusedConv2D", ["nobody"]),
    ],
)
def test_an_op_that_tensorflow_had_fused_stands_for_all_that_it_was_made_of(name, recorded, ops):
    assert with_absorbed([(name, recorded)], CONVOLUTION) == ops


def test_a_product_with_another_user_was_not_fused():
    shared = SimpleNamespace(node=[*CONVOLUTION.node, SimpleNamespace(name="other", op="Relu", input=["product:0"])])
    assert with_absorbed([("biased", "_FusedConv2D")], shared) == ["biased"]
