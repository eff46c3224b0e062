"""Which ops run again when a plan names ops to recompute, and what they wait for: in the job as in the prediction."""

from types import SimpleNamespace

import pytest

from dpro_search.collect.trace import Trace
from dpro_search.graph import buffers, dataflow
from dpro_search.graph.build import build_graph
from dpro_search.runtime.follow.graph_rewrites import AT_ONCE, VIEWS, computed_again
from dpro_search.runtime.follow.xla import places
from dpro_search.space.plan import Plan
from dpro_search.space.transformations import horovod_facts
from dpro_search.space.transformations.compute import ComputeGraph
from dpro_search.space.transformations.recomputation import Recomputation
from tests.sample import horovod_trace_path

TAPE = "gradient_tape/"
# Two layers; each gradient needs its layer's result. What is behind the first is passed on under other names.
STEP = {
    "x": ("Placeholder", []),
    "a": ("Tanh", ["x"]),
    "same": ("Identity", ["a"]),
    "flat": ("Reshape", ["same:0", "shape"]),
    "shape": ("Const", []),
    "b": ("Tanh", ["flat"]),
    TAPE + "size": ("Shape", ["a"]),
    TAPE + "square": ("Square", ["a"]),
    TAPE + "ones": ("Fill", []),
    TAPE + "b": ("TanhGrad", ["b", TAPE + "ones"]),
    TAPE + "a": ("TanhGrad", ["flat", TAPE + "b", TAPE + "square"]),
    "AddN": ("AddN", [TAPE + "a", TAPE + "b"]),
    "AddN_1": ("AddN", ["AddN", TAPE + "b"]),
    TAPE + "late": ("ReluGrad", ["AddN_1", "a"]),
}


def again(names, *clusters, step=STEP):
    definition = SimpleNamespace(node=[SimpleNamespace(name=name, op=op, input=inputs) for name, (op, inputs) in step.items()])
    inputs = {name: [entry.partition(":")[0] for entry in needed] for name, (_, needed) in step.items()}
    cluster_of = {name: number for number, cluster in enumerate(clusters) for name in cluster}
    return computed_again(definition, names, places(cluster_of, inputs))


def test_views_of_what_runs_again_are_made_again_or_the_first_result_would_be_kept():
    assert list(again(["a"])) == ["a", "same", "flat"]


def test_each_op_waits_for_what_the_first_op_that_needs_it_waits_for():
    assert again(["a"])["a"] == [TAPE + "b", TAPE + "square"]
    assert again(["a", "b"])["a"] == [TAPE + "ones"]  # to compute b again


def test_an_op_that_waits_only_for_sums_of_gradients_needs_the_copy():
    step = {**STEP, TAPE + "a": ("TanhGrad", [TAPE + "b", TAPE + "square"])}
    assert again(["a"], step=step) == {"a": ["AddN_1"]}


def test_what_waits_for_no_gradient_needs_no_copy():
    step = {name: node for name, node in STEP.items() if name not in (TAPE + "a", "AddN", "AddN_1", TAPE + "late")}
    assert again(["a"], step=step) == {}


def test_what_is_fused_waits_for_what_its_cluster_waits_for():
    """A copy that waited for an op of the cluster which needs it would make the cluster wait for itself."""
    fused = [TAPE + "b", TAPE + "a", "AddN"]
    assert again(["a"], fused)["a"] == [TAPE + "ones", TAPE + "square"]


def test_lists_that_the_job_and_the_prediction_both_have_agree():
    assert frozenset(dataflow.AT_ONCE) == AT_ONCE
    assert VIEWS - {"Snapshot"} <= buffers.VIEWS


@pytest.fixture(scope="module")
def sample():
    return Trace.load(horovod_trace_path())


@pytest.mark.parametrize("of_type", ["Relu", "Conv2D", "FusedBatchNorm", ""])
def test_on_a_recorded_step_the_ops_that_run_again_are_those_that_are_priced(sample, of_type):
    graph = build_graph(sample)
    compute = ComputeGraph(graph)
    recomputation = Recomputation(horovod_facts(graph.tensors, sample.horovod_settings), compute)
    able = [name for name in compute.ops if recomputation.legal(Plan(recomputed_ops=(name,))) is None]
    chosen = [name for name in able if of_type in recomputation.type(name)]
    assert chosen
    change = compute.unchanged()
    recomputation.apply(change, Plan(recomputed_ops=tuple(chosen)))
    priced = {graph.op_name[op] for op in range(len(graph)) if change.again_due[op] < len(graph.tensors)}
    nodes = sample.graphs[sample.graph_of_rank[0]]
    step = {
        name: (op, [nodes.name[k] for k in nodes.input_idx[nodes.input_ptr[i] : nodes.input_ptr[i + 1]]])
        for i, (name, op) in enumerate(zip(nodes.name, nodes.op, strict=True))
    }
    assert set(again(chosen, step=step)) == priced
    assert priced
