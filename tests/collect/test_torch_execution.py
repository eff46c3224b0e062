"""The execution trace of a step of a DistributedDataParallel job: a real two-rank recording of a small model."""

import contextlib
import gzip
import json
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from damage import damaged_copies
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro_search.collect.assemble.torch.execution import ExecutionTrace, read_execution_trace
from dpro_search.collect.assemble.torch.host_spans import read_host_spans
from dpro_search.collect.assemble.torch.job import assemble_torch
from dpro_search.collect.trace import EventKind, NodeGraph
from dpro_search.costmodel.collectives.ddp import fit_ddp_costs
from dpro_search.errors import DproSearchError, InputError, TraceFormatError
from dpro_search.graph.ddp import build_ddp_graph
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.programs.ddp_job import apply_ddp
from tests.recordings import DATA

RECORDING = "ddp_mlp"
RAW = DATA / RECORDING
SPANS = read_host_spans(RAW / "rank0" / "kineto.json.gz")
WHOLE = gzip.decompress((RAW / "rank0" / "execution.json.gz").read_bytes())


@pytest.fixture(scope="module", params=[0, 1])
def executed(request: pytest.FixtureRequest) -> ExecutionTrace:
    folder = RAW / f"rank{request.param}"
    return read_execution_trace(folder / "execution.json.gz", read_host_spans(folder / "kineto.json.gz"))


def needs(graph: NodeGraph) -> dict[str, list[str]]:
    rows = np.split(graph.input_idx, graph.input_ptr[1:-1])
    return {name: [graph.name[i] for i in row] for name, row in zip(graph.name, rows, strict=True)}


def test_dependencies_lead_forward_in_time(executed):
    graph = executed.graph
    indices = np.repeat(np.arange(len(graph.name)), np.diff(graph.input_ptr))
    assert len(indices)
    assert (graph.input_idx < indices).all()


def test_every_backward_function_needs_its_forward_operator(executed):
    needed = needs(executed.graph)
    forward = {"AddmmBackward0": "aten::linear", "NativeBatchNormBackward0": "aten::batch_norm", "ReluBackward0": "aten::relu"}
    for backward, operator in forward.items():
        mine = [name for name in needed if name.startswith(backward)]
        assert mine
        # The last layer's backward function comes first.
        for number, name in enumerate(mine):
            assert f"{operator}#{len(mine) - 1 - number}" in needed[name]


def test_the_loss_needs_all_layers_and_every_update_needs_the_loss(executed):
    needed = needs(executed.graph)
    graph = nx.DiGraph((source, name) for name, sources in needed.items() for source in sources)
    updates = {name for name, sources in needed.items() if any("copy_bucket_to_grad" in source for source in sources)}
    loss = "aten::cross_entropy_loss#0"
    assert nx.ancestors(graph, loss) >= {f"aten::linear#{i}" for i in range(4)}
    assert len(updates) == 14
    assert updates <= nx.descendants(graph, loss)
    assert nx.ancestors(graph, "aten::linear#7") >= updates  # the evaluation after it uses the new weights


def test_the_all_reduces_of_the_buckets_follow_the_broadcasts_of_the_forward_pass(executed):
    assert [collective.name for collective in executed.collectives] == ["broadcast", "broadcast", "allreduce", "allreduce"]
    assert [collective.size_bytes for collective in executed.collectives[2:]] == [36904, 17152]


def test_ranks_that_ran_the_same_share_a_graph():
    trace = assemble_torch(RAW)
    assert len(trace.graphs) == 1
    assert trace.graph_of_rank == (0, 0)
    assert "torch::autograd::AccumulateGrad" in trace.graphs[0].op


def test_bytes_are_those_that_moved_where_a_hook_compresses(raw):
    plain = assemble_torch(raw)
    for rank in (0, 1):
        path = raw / f"rank{rank}" / "execution.json.gz"
        content = json.loads(gzip.decompress(path.read_bytes()))
        for node in content["nodes"]:
            if node["name"] == "c10d::allreduce_":
                node["inputs"]["values"][0][0][4] = 2  # bytes of an element
        path.write_bytes(gzip.compress(json.dumps(content).encode()))
    halved = assemble_torch(raw)
    of_bucket = [trace.events.select(trace.events.kind == EventKind.COLLECTIVE).size_bytes.max() for trace in (plain, halved)]
    assert of_bucket == [36904, 18452]
    graph = build_ddp_graph(halved)
    assert graph.compression == 0.5
    job = apply_ddp(graph, fit_ddp_costs(halved, graph), ClusterSpec.of(halved.meta), bucket_limits_bytes=[10**9])
    assert job.size_bytes.tolist() == [1536, 24, 54056 / 2]


def test_a_recording_without_execution_trace_is_whole_but_for_its_graph(raw):
    with_graph = assemble_torch(raw)
    (raw / "rank1" / "execution.json.gz").unlink()
    trace = assemble_torch(raw)
    assert trace.graphs == ()
    np.testing.assert_array_equal(trace.events.size_bytes, with_graph.events.size_bytes)


def test_what_is_left_out_is_counted(executed):
    assert executed.dropped == {"execution nodes of processes and threads": 2}


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"execution\.json\.gz: missing"):
        read_execution_trace(tmp_path / "execution.json.gz", SPANS)


@pytest.mark.parametrize("share", [0, 0.2, 0.5, 0.99])
def test_a_file_that_is_cut_off_is_named(raw, share):
    path = raw / "rank1" / "execution.json.gz"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(TraceFormatError, match=r"execution\.json\.gz"):
        assemble_torch(raw)


def used(path: Path) -> None:
    """Read a file, and all that is made of it."""
    with contextlib.suppress(DproSearchError):
        executed = read_execution_trace(path, SPANS)
        total = len(json.loads(path.read_bytes())["nodes"])
        assert len(executed.nodes) + sum(executed.dropped.values()) == total
        assert (np.diff(executed.graph.input_ptr) >= 0).all()
        assert all(collective.size_bytes >= 0 for collective in executed.collectives)


@settings(deadline=None, max_examples=30)
@given(damaged_copies(WHOLE, largest=127))
def test_flipped_bytes_never_crash_the_reader(tmp_path_factory, damaged):
    path = tmp_path_factory.mktemp("flipped") / "execution.json"
    path.write_bytes(damaged)
    used(path)


values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3), st.just([]))
tensors = st.lists(values | st.integers(0, 99), min_size=5, max_size=7) | st.tuples(*[st.integers(0, 9)] * 5, st.just("cpu"))
nested = st.recursive(values | tensors, lambda inner: st.lists(inner, max_size=2), max_leaves=4)
columns = st.fixed_dictionaries(
    {"values": st.lists(nested, max_size=3) | values},
    optional={
        "shapes": st.lists(nested, max_size=3),
        "strides": st.lists(nested, max_size=3),
        "types": st.lists(st.text(max_size=9)),
    },
)
attributes = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["rf_id", "seq_id", "scope", "op_schema"]), "value": values | st.integers(1, 200)}
    )
)
nodes = st.fixed_dictionaries(
    {"name": st.sampled_from(["c10d::allreduce_", "torch::autograd::AccumulateGrad", "aten::add_"])},
    optional={"inputs": columns, "outputs": columns, "attrs": attributes},
)


@settings(deadline=None, max_examples=100)
@given(st.lists(nodes | st.dictionaries(st.sampled_from(["name", "inputs", "attrs"]), values), max_size=6))
def test_wrong_types_are_refused_or_counted(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("typed") / "execution.json"
    path.write_text(json.dumps({"nodes": records}))
    used(path)
