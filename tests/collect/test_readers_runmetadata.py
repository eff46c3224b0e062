"""TensorFlow's step statistics: executed nodes, the graph's edges, all-reduces matched across ranks."""

from pathlib import Path

import numpy as np
import pytest
from importer_kit import ImporterConformance, shared_traces

from dpro_search.collect.readers.protos import MESSAGES
from dpro_search.collect.readers.tensorflow import runmetadata
from dpro_search.collect.trace import DependencyKind, EventKind, Trace
from dpro_search.errors import TraceFormatError

EPOCH_US = 1_795_000_000_000_000
GRAPH = (  # name, op, inputs
    ("x", "_Arg", ()),
    ("MatMul", "MatMul", ("x",)),
    ("grad", "MatMul", ("MatMul", "^x")),
    ("Allreduce/grad_0", "HorovodAllreduce", ("grad:0",)),
    ("update", "ResourceApplyMomentum", ("Allreduce/grad_0",)),
)
OP_OF = {name: op for name, op, _ in GRAPH}
TIMES = {"x": (0, 5), "MatMul": (10, 50), "grad": (50, 90), "Allreduce/grad_0": (90, 300), "update": (300, 320)}


def written(path: Path, *, clock_us: int = 0, with_graph: bool = True, devices: tuple[str, ...] = ("/device:CPU:0",)) -> Path:
    metadata = MESSAGES["RunMetadata"]()
    for device in devices:
        stats = metadata.step_stats.dev_stats.add(device=f"/job:localhost/replica:0/task:0{device}")
        for name, (start, end) in TIMES.items():
            node = stats.node_stats.add(node_name=name, timeline_label=f"{name} = {OP_OF[name]}(...)")
            node.all_start_nanos = (EPOCH_US + clock_us + start) * 1000
            node.all_end_rel_nanos = (end - start) * 1000
            output = node.output.add().tensor_description
            output.dtype = 1
            for extent in (8, 4):
                output.shape.dim.add(size=extent)
    if with_graph:
        graph = metadata.partition_graphs.add()
        for name, op, inputs in GRAPH:
            graph.node.add(name=name, op=op, input=inputs)
    path.write_bytes(metadata.SerializeToString())
    return path


def needs(trace: Trace) -> set[tuple[str, str]]:
    names = [trace.names[i] for i in trace.events.name]
    return {(names[s], names[t]) for s, t in zip(trace.dependencies.source, trace.dependencies.target, strict=True)}


class TestRunMetadata(ImporterConformance):
    importer = runmetadata.IMPORTER

    @pytest.fixture
    def files(self, tmp_path):
        return [written(tmp_path / f"rank{rank}.pb", clock_us=3 * rank) for rank in (0, 1)]


def test_every_executed_node_is_an_event_with_its_times(tmp_path):
    trace = runmetadata.read([written(tmp_path / "a.pb")])
    times = {trace.names[n]: (s, e) for n, s, e in zip(trace.events.name, trace.events.start_us, trace.events.end_us, strict=True)}
    assert times == TIMES
    assert (trace.steps.start_us.tolist(), trace.steps.end_us.tolist()) == ([0], [320])


def test_dependencies_are_the_graphs_edges_data_and_control(tmp_path):
    trace = runmetadata.read([written(tmp_path / "a.pb")])
    assert needs(trace) == {
        ("x", "MatMul"), ("MatMul", "grad"), ("x", "grad"), ("grad", "Allreduce/grad_0"), ("Allreduce/grad_0", "update"),
    }  # fmt: skip
    assert set(trace.dependencies.kind) == {DependencyKind.DATA}


def test_an_all_reduce_of_one_name_is_one_collective_of_known_size(tmp_path):
    trace = runmetadata.read([written(tmp_path / f"{rank}.pb", clock_us=3 * rank) for rank in (0, 1)])
    comm = trace.events.select(trace.events.kind == EventKind.COMM)
    assert (comm.rank.tolist(), comm.collective.tolist(), comm.size_bytes.tolist()) == ([0, 1], [0, 0], [128, 128])
    assert (trace.tensors[0].dtype, trace.tensors[0].shape) == ("float32", (8, 4))


def test_ranks_that_run_the_same_graph_share_it(tmp_path):
    trace = runmetadata.read([written(tmp_path / f"{rank}.pb") for rank in (0, 1)])
    assert (len(trace.graphs), trace.graph_of_rank, trace.graphs[0].op[3]) == (1, (0, 0), "HorovodAllreduce")


def test_without_a_graph_types_come_from_the_labels(tmp_path):
    trace = runmetadata.read([written(tmp_path / "a.pb", with_graph=False)])
    assert (trace.events.kind == EventKind.COMM).sum() == 1
    assert trace.meta.warnings == ("no executed graph in the files: dependencies are not known",)


def test_kernels_on_streams_are_counted_once(tmp_path):
    devices = ("/device:GPU:0", "/device:GPU:0/stream:all", "/device:GPU:0/stream:7")
    trace = runmetadata.read([written(tmp_path / "a.pb", devices=devices)])
    assert (trace.events.kind == EventKind.KERNEL).sum() == len(TIMES)
    assert trace.meta.dropped == {"kernels written twice": len(TIMES)}


def test_names_need_not_be_utf_8(tmp_path):
    path = written(tmp_path / "a.pb")
    path.write_bytes(path.read_bytes().replace(b"MatMul", b"Mat\xff\xfel"))
    assert "Mat\ufffd\ufffdl" in runmetadata.read([path]).names


def test_statistics_without_nodes(tmp_path):
    with pytest.raises(TraceFormatError, match=r"a.pb: no executed node in the step statistics"):
        runmetadata.read([written(tmp_path / "a.pb", devices=())])


def test_real_full_traces_of_two_ranks():
    folder = shared_traces() / "tensorflow_horovod_2"
    trace = runmetadata.read([folder / f"rank{rank}.v1_session_full_trace.pb.gz" for rank in (0, 1)])
    assert (trace.meta.ranks, len(trace.events), len(trace.tensors), trace.meta.dropped) == (2, 200, 12, {})
    comm = trace.events.select(trace.events.kind == EventKind.COMM)
    assert np.bincount(comm.collective).tolist() == [2] * 12
    assert sum(tensor.size_bytes for tensor in trace.tensors) == sum(4 * int(np.prod(tensor.shape)) for tensor in trace.tensors) > 0
    edges = sum(len(graph.input_idx) for graph in (trace.graphs[i] for i in trace.graph_of_rank))
    assert len(trace.dependencies) == edges  # every node of the graph has times
