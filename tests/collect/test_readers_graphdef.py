"""Reading the executed graph from run metadata."""

import gzip
from pathlib import Path

import pytest

from dpro_search.collect.readers.protos import MESSAGES
from dpro_search.collect.readers.tensorflow.graphdef import read_partition_graph
from dpro_search.errors import InputError, TraceFormatError

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces" / "tensorflow_horovod_2"
recorded = pytest.mark.skipif(not TRACES.is_dir(), reason="needs the recorded traces, which are not part of the project")


def add_node(graph, name, op, *inputs, **attributes):
    node = graph.node.add(name=name, op=op, input=inputs)
    for key, value in attributes.items():
        field = "type" if key == "T" else "b" if isinstance(value, bool) else "i"
        setattr(node.attr.add(key=key).value, field, value)


def written(metadata, tmp_path, compress=False):
    path = tmp_path / "run_metadata.pb"
    data = metadata.SerializeToString()
    path.write_bytes(gzip.compress(data) if compress else data)
    return path


@pytest.fixture
def metadata():
    return MESSAGES["RunMetadata"]()


@pytest.fixture
def graph(metadata):
    return metadata.function_graphs.add().partition_graphs.add()


def sources(graph, name):
    v = graph.name.index(name)
    return [graph.name[i] for i in graph.input_idx[graph.input_ptr[v] : graph.input_ptr[v + 1]]]


@pytest.mark.parametrize("compress", [False, True])
def test_data_control_and_port_inputs_all_become_edges(graph, metadata, tmp_path, compress):
    add_node(graph, "a", "Split")
    add_node(graph, "b", "NoOp")
    add_node(graph, "h", "HorovodAllreduce", "a:1", "^b", T=1)
    nodes, _ = read_partition_graph(written(metadata, tmp_path, compress))
    assert nodes.op == ("Split", "NoOp", "HorovodAllreduce")
    assert sources(nodes, "h") == ["a", "b"]


def test_a_node_may_come_before_its_input(graph, metadata, tmp_path):
    add_node(graph, "h", "HorovodAllreduce", "a", T=1)
    add_node(graph, "a", "Const")
    assert sources(read_partition_graph(written(metadata, tmp_path))[0], "h") == ["a"]


def test_an_input_that_names_no_node_is_an_error_that_says_so(graph, metadata, tmp_path):
    add_node(graph, "h", "HorovodAllreduce", "gone:0", T=1)
    with pytest.raises(TraceFormatError, match="node 'h' has the input 'gone:0', which names no node"):
        read_partition_graph(written(metadata, tmp_path))


def test_an_all_reduce_is_known_by_its_nodes_name(graph, metadata, tmp_path):
    add_node(graph, "a", "Neg")
    add_node(graph, "scope/h", "HorovodAllreduce", "a", "^a", T=19)
    (comm,) = read_partition_graph(written(metadata, tmp_path))[1]
    assert (comm.tensor_names, comm.dtype, comm.inputs) == (("scope/h",), "float16", ("a",))


def test_a_grouped_all_reduce_has_a_name_per_tensor(graph, metadata, tmp_path):
    add_node(graph, "a", "Neg")
    add_node(graph, "s/h", "HorovodGroupedAllreduce", "a", "a:1", T=1, num_tensors=2, ignore_name_scope=False)
    (comm,) = read_partition_graph(written(metadata, tmp_path))[1]
    assert comm.tensor_names == ("s/h_1of2", "s/h_2of2")
    assert comm.inputs == ("a", "a")


def test_an_all_reduce_that_ignores_its_scope_is_known_without_it(graph, metadata, tmp_path):
    add_node(graph, "outer/inner/h", "HorovodAllreduce", T=1, ignore_name_scope=True)
    assert read_partition_graph(written(metadata, tmp_path))[1][0].tensor_names == ("h",)


def test_partitions_of_one_function_are_merged(graph, metadata, tmp_path):
    add_node(graph, "h", "HorovodAllreduce", T=1)
    add_node(metadata.function_graphs[0].partition_graphs.add(), "b", "Const")
    assert read_partition_graph(written(metadata, tmp_path))[0].name == ("h", "b")


def test_functions_without_all_reduce_are_left_out_and_the_last_trace_of_a_step_counts(graph, metadata, tmp_path):
    add_node(graph, "first", "HorovodAllreduce", T=1)
    add_node(metadata.function_graphs.add().partition_graphs.add(), "second", "HorovodAllreduce", T=1)
    add_node(metadata.function_graphs.add().partition_graphs.add(), "evaluation", "MatMul")
    assert read_partition_graph(written(metadata, tmp_path))[0].name == ("second",)


def test_a_job_without_all_reduce_is_refused(graph, metadata, tmp_path):
    add_node(graph, "a", "MatMul")
    with pytest.raises(TraceFormatError, match="no partition graph with a HorovodAllreduce"):
        read_partition_graph(written(metadata, tmp_path))


def test_two_nodes_of_one_name_are_refused(graph, metadata, tmp_path):
    add_node(graph, "h", "HorovodAllreduce", T=1)
    add_node(graph, "h", "HorovodAllreduce", T=1)
    with pytest.raises(TraceFormatError, match="two nodes are named 'h'"):
        read_partition_graph(written(metadata, tmp_path))


def test_missing_and_foreign_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"gone\.pb"):
        read_partition_graph(tmp_path / "gone.pb")
    (tmp_path / "text.pb").write_text("hello, world")
    with pytest.raises(TraceFormatError, match=r"text\.pb"):
        read_partition_graph(tmp_path / "text.pb")


@recorded
@pytest.mark.parametrize(("file", "nodes"), [("rank0.run_metadata", 200), ("rank0.v1_session_full_trace", 99)])
def test_recorded_graphs_have_every_node_once_and_an_all_reduce_per_gradient(file, nodes):
    graph, comm = read_partition_graph(TRACES / f"{file}.pb.gz")
    assert len(graph.name) == len(set(graph.name)) == nodes
    assert len(comm) == 12
    assert {node.dtype for node in comm} == {"float32"}
    assert all(len(node.inputs) == 1 for node in comm)


@recorded
def test_both_ranks_run_one_graph():
    first, second = (read_partition_graph(TRACES / f"rank{rank}.run_metadata.pb.gz") for rank in (0, 1))
    assert set(first[0].name) == set(second[0].name)
    assert {node.tensor_names for node in first[1]} == {node.tensor_names for node in second[1]}
