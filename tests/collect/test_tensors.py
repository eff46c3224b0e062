"""Types of tensors, workspaces and the allocator's count, from a profile."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample import sample
from test_readers_xplane import PlaneFile

from dpro_search.collect.assemble.tensorflow_horovod import allocator_report, with_tensors
from dpro_search.collect.readers.protos import MESSAGES
from dpro_search.collect.readers.tensorflow.graphdef import read_partition_graph
from dpro_search.collect.readers.tensorflow.xplane import memory_events, read_xplane, tensor_types
from dpro_search.collect.trace import GraphTensors, TensorType, Trace
from dpro_search.errors import TraceFormatError

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces" / "tensorflow_horovod_2"
recorded = pytest.mark.skipif(not TRACES.is_dir(), reason="needs the recorded traces, which are not part of the project")


def piece(plane: PlaneFile, kind: str, at_us: float, address: int, size: int, in_use: int, **stats: str) -> None:
    numbers = {"addr": address, "requested_bytes": size, "allocation_bytes": size + 24, "bytes_allocated": in_use}
    plane.event(1, f"Memory{kind}", at_us, 0, allocator_name="mklcpu", **numbers, **stats)


def graph_file(path: Path) -> Path:
    metadata = MESSAGES["RunMetadata"]()
    graph = metadata.function_graphs.add().partition_graphs.add()
    for name, op, inputs in (("a", "Split", []), ("b", "Conv2D", ["a:1", "a", "^a"]), ("h", "HorovodAllreduce", ["b"])):
        graph.node.add(name=name, op=op, input=inputs)
    path.write_bytes(metadata.SerializeToString())
    return path


@pytest.fixture
def plane(tmp_path: Path) -> PlaneFile:
    return PlaneFile(tmp_path / "xplane.pb")


def test_a_shape_text_says_type_and_size_and_nothing_of_a_handle():
    assert tensor_types("(float[8,64];;int32[];half[2])") == (
        TensorType("float32", (8, 64)), None, TensorType("int32", ()), TensorType("float16", (2,)),
    )  # fmt: skip
    assert TensorType("float16", (2, 3)).size_bytes == 12
    assert tensor_types("") == ()
    assert tensor_types("(float[8,?])") == (None,)


def test_inputs_get_the_types_that_their_op_saw(plane, tmp_path):
    plane.event(1, "b:Conv2D", 0, 5, shape="(float[8,4];int32[2])")
    graph, misfits = with_tensors(read_partition_graph(graph_file(tmp_path / "g.pb"))[0], read_xplane(plane.write()))
    tensors = graph.tensors
    assert tensors.input_port.tolist() == [1, 0, -1, 0]
    assert [tensors.types[i] if i >= 0 else None for i in tensors.input_type] == [
        TensorType("float32", (8, 4)), TensorType("int32", (2,)), None, None,
    ]  # fmt: skip
    assert misfits == 0


def test_an_op_with_other_inputs_than_in_the_graph_is_counted(plane, tmp_path):
    plane.event(1, "b:Conv2D", 0, 5, shape="(float[8,4])")
    graph, misfits = with_tensors(read_partition_graph(graph_file(tmp_path / "g.pb"))[0], read_xplane(plane.write()))
    assert misfits == 1
    assert (graph.tensors.input_type == -1).all()


def test_workspace_is_what_an_op_takes_and_gives_back_while_it_runs(plane, tmp_path):
    plane.event(1, "b:Conv2D", 10, 10, shape="(float[8,4];int32[2])")
    piece(plane, "Allocation", 11, 1, 1000, 5000, tf_op="b")  # its result: stays
    piece(plane, "Allocation", 12, 2, 300, 5324, tf_op="b")
    piece(plane, "Allocation", 13, 3, 200, 5548, tf_op="b")
    piece(plane, "Deallocation", 14, 2, 300, 5224)
    piece(plane, "Deallocation", 15, 3, 200, 5000)
    piece(plane, "Deallocation", 40, 1, 1000, 3976)
    profile = read_xplane(plane.write())
    graph, _ = with_tensors(read_partition_graph(graph_file(tmp_path / "g.pb"))[0], profile)
    assert graph.tensors.workspace_bytes.tolist() == [0, 500, 0]
    report = allocator_report([profile.memory])
    assert (report.name, report.peak_bytes, report.least_bytes) == ("mklcpu", 5548, 3976)
    assert report.requested_peak_bytes == 5548 - 3 * 24


def test_events_without_numbers_or_of_another_allocator_are_left_out():
    whole = {"addr": 1, "requested_bytes": 2, "allocation_bytes": 3, "bytes_allocated": 4, "allocator_name": "a"}
    rows = [
        (1.0, True, whole),
        (2.0, True, whole | {"addr": "?"}),
        (0.0, False, whole),
        (3.0, True, whole | {"allocator_name": "b"}),
    ]
    memory_rows, left_out = memory_events(rows)
    assert (memory_rows.allocator, len(memory_rows.time_us), left_out) == ("a", 2, 2)
    assert memory_rows.is_allocation.tolist() == [False, True]
    assert allocator_report([memory_events([])[0]]) is None


stats = st.dictionaries(
    st.sampled_from(["addr", "requested_bytes", "allocation_bytes", "bytes_allocated", "allocator_name", "tf_op"]),
    st.one_of(st.integers(-(2**64), 2**64), st.text(max_size=3), st.none()),
)


@given(st.lists(st.tuples(st.floats(0, 1e9), st.booleans(), stats), max_size=8))
def test_damaged_events_never_stop_the_reader(rows):
    memory_rows, left_out = memory_events(rows)
    assert len(memory_rows.time_us) + left_out == len(rows)
    assert len(memory_rows.releases()) == len(memory_rows.time_us)


@given(st.text(alphabet="(float[8,2];)x", max_size=20))
def test_damaged_shapes_never_stop_the_reader(written):
    assert all(kind is None or kind.size_bytes >= 0 for kind in tensor_types(written))


@recorded
@pytest.mark.parametrize("rank", [0, 1])
def test_a_recorded_step_has_types_for_every_gradient_and_almost_every_input(rank):
    graph, comm = read_partition_graph(TRACES / f"rank{rank}.run_metadata.pb.gz")
    profile = read_xplane(TRACES / f"rank{rank}.xplane.pb.gz")
    typed_graph, misfits = with_tensors(graph, profile)
    assert misfits == 0
    tensors = typed_graph.tensors
    known = np.zeros(len(graph.name), dtype=int)
    node_of_edge = np.repeat(np.arange(len(graph.name)), np.diff(graph.input_ptr))
    np.add.at(known, node_of_edge[tensors.input_type >= 0], 1)
    assert all(known[graph.name.index(node.name)] == len(node.inputs) for node in comm)
    handles = np.isin(np.array(graph.op)[graph.input_idx], ["_Arg"]) & (tensors.input_type < 0)
    assert ((tensors.input_type >= 0) | (tensors.input_port < 0) | handles).mean() > 0.95


def with_types(types: tuple[TensorType, ...]) -> Trace:
    trace = sample()
    edges, nodes = len(trace.graphs[0].input_idx), len(trace.graphs[0].name)
    tensors = GraphTensors(
        types=types,
        input_port=np.arange(edges) % 3 - 1,
        input_type=np.arange(edges) % 2 - 1,
        workspace_bytes=np.arange(nodes),
    )
    return replace(trace, graphs=(replace(trace.graphs[0], tensors=tensors), *trace.graphs[1:]))


def test_types_and_workspaces_are_saved_with_their_graph(tmp_path):
    trace = with_types((TensorType("float32", (8, 64)),))
    trace.save(tmp_path / "t")
    ours, theirs = trace.graphs[0].tensors, Trace.load(tmp_path / "t").graphs[0].tensors
    assert theirs.types == ours.types
    for column in ("input_port", "input_type", "workspace_bytes"):
        assert getattr(theirs, column).tolist() == getattr(ours, column).tolist()


def test_types_that_do_not_fit_their_graph_are_refused(tmp_path):
    with_types(()).save(tmp_path / "t")
    with pytest.raises(TraceFormatError, match="do not fit their graph"):
        Trace.load(tmp_path / "t")
