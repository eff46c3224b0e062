"""Reading a rank's profile: which events are ops, how all-reduce spans are found, where the profile lies in time."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from xplane_files import Plane

from dpro_search.collect.readers.protos import MESSAGES
from dpro_search.collect.readers.tensorflow.graphdef import read_partition_graph
from dpro_search.collect.readers.tensorflow.xplane import epoch_origin, read_xplane
from dpro_search.errors import InputError, TraceFormatError

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces" / "tensorflow_horovod_2"
recorded = pytest.mark.skipif(not TRACES.is_dir(), reason="needs the recorded traces, which are not part of the project")


class PlaneFile:
    """Writes an XSpace with one host plane; events are (line, name, start_us, duration_us, stats)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.space = MESSAGES["XSpace"]()
        self.plane = Plane(self.space, "/host:CPU")
        self._lines: dict[int, object] = {}

    def event(self, line: int, name: str, start_us: float, duration_us: float, /, **stats: str | int) -> None:
        if line not in self._lines:
            self._lines[line] = self.plane.line(line, 1000)
        self.plane.add(self._lines[line], name, start_us, duration_us, stats)

    def write(self) -> Path:
        self.path.write_bytes(self.space.SerializeToString())
        return self.path


@pytest.fixture
def plane(tmp_path: Path) -> PlaneFile:
    return PlaneFile(tmp_path / "rank0.xplane.pb")


def all_reduce(plane: PlaneFile, node: str, step: int, start_us: float, end_us: float) -> None:
    stats = {"name": node, "kernel_type": "HorovodAllreduce", "step_id": step}
    plane.event(1, "ExecutorState::ProcessAsync::Start", start_us, 3, **stats)
    plane.event(2, "ExecutorState::ProcessAsync::Done", end_us, 50, **stats)


def test_an_op_event_is_split_into_node_and_type(plane):
    plane.event(7, "model/dense/MatMul:_MklMatMul", 10, 2.5, shape="(float[2])")
    profile = read_xplane(plane.write())
    assert (profile.nodes, profile.op_types) == (("model/dense/MatMul",), ("_MklMatMul",))
    assert profile.ops.start_us.tolist() == [11.0]  # the line begins 1 us into the profile
    assert profile.ops.end_us.tolist() == [13.5]
    assert profile.ops.line.tolist() == [7]


def test_runtime_events_are_not_ops(plane):
    for name in ("ExecutorState::Process", "EagerLocalExecute: __inference_step_7", "Iterator::Map", "MemoryAllocation"):
        plane.event(1, name, 0, 100)
    plane.event(1, "a:Add", 1, 1)
    assert read_xplane(plane.write()).nodes == ("a",)


def test_ops_come_sorted_by_start_over_all_threads(plane):
    plane.event(1, "late:Add", 30, 1)
    plane.event(2, "early:Mul", 5, 1)
    profile = read_xplane(plane.write())
    assert [profile.nodes[i] for i in profile.ops.node] == ["early", "late"]


def test_an_op_inside_its_own_event_is_dropped_and_counted(plane):
    plane.event(1, "a:Add", 0, 10)
    plane.event(1, "a:Add", 2, 5)
    plane.event(1, "a:Add", 20, 5)
    profile = read_xplane(plane.write())
    assert profile.ops.start_us.tolist() == [1, 21]
    assert profile.dropped == {"nested": 1}


def test_eager_ops_are_dropped_but_not_those_of_a_graph_that_runs_inside_an_eager_call(plane):
    plane.event(1, "EagerKernelExecute", 0, 10)
    plane.event(1, "AddV2:AddV2", 1, 2)
    plane.event(1, "EagerKernelExecute", 20, 50)
    plane.event(1, "ExecutorState::Process", 25, 40)
    plane.event(1, "graph/add:AddV2", 30, 2)
    profile = read_xplane(plane.write())
    assert [profile.nodes[i] for i in profile.ops.node] == ["graph/add"]
    assert profile.dropped == {"eager": 1}


def test_an_all_reduce_runs_from_its_start_to_its_done_on_another_thread(plane):
    all_reduce(plane, "grad", step=4, start_us=10, end_us=500)
    profile = read_xplane(plane.write())
    assert (profile.comm.start_us.tolist(), profile.comm.end_us.tolist()) == ([11], [501])
    assert profile.nodes[profile.comm.node[0]] == "grad"


def test_a_lost_end_does_not_shift_the_pairs_of_later_steps(plane):
    plane.event(1, "ExecutorState::ProcessAsync::Start", 0, 3, name="grad", kernel_type="HorovodAllreduce", step_id=1)
    all_reduce(plane, "grad", step=2, start_us=1000, end_us=1500)
    profile = read_xplane(plane.write())
    assert profile.comm.start_us.tolist() == [1001]
    assert profile.dropped == {"unpaired": 1}


def test_other_asynchronous_kernels_are_no_communication(plane):
    stats = {"name": "next", "kernel_type": "IteratorGetNext", "step_id": 1}
    plane.event(1, "ExecutorState::ProcessAsync::Start", 0, 3, **stats)
    plane.event(1, "ExecutorState::ProcessAsync::Done", 9, 3, **stats)
    assert len(read_xplane(plane.write()).comm.node) == 0


def test_a_profile_that_says_when_it_began_has_an_origin(plane):
    plane.event(1, "a:Add", 0, 1)
    task = plane.space.planes.add(name="Task Environment")
    task.stat_metadata.add(key=1).value.name = "profile_start_time"
    task.stats.add(metadata_id=1, uint64_value=1_790_000_000_123_456_789)
    assert read_xplane(plane.write()).origin_ns == 1_790_000_000_123_456_789


def test_step_times_place_a_profile_that_does_not_say_when_it_began(plane):
    origin = 1_790_000_000_000_000_000
    for step in range(3):
        plane.event(1, "train_fn", 1000 * step, 800, tf_function_call="notTraced")
        all_reduce(plane, "grad", step, 1000 * step + 10, 1000 * step + 600)
    plane.event(1, "eval_fn", 5000, 800, tf_function_call="notTraced")
    timed = [[origin + (1000 * s + 1) * 1000 - 4_000, origin + (1000 * s + 801) * 1000 + 6_000] for s in range(3)]
    profile, half_width_us = epoch_origin(read_xplane(plane.write()), np.array(timed))
    assert half_width_us == pytest.approx(5.0)
    assert abs(profile.origin_ns - origin) <= half_width_us * 1000


def test_another_number_of_steps_than_timed_is_an_error(plane):
    plane.event(1, "train_fn", 0, 800, tf_function_call="notTraced")
    all_reduce(plane, "grad", 1, 10, 600)
    with pytest.raises(InputError, match="1 calls that all-reduce, but 2 were timed"):
        epoch_origin(read_xplane(plane.write()), np.array([[0, 10], [20, 30]]))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.pb: cannot be read"):
        read_xplane(tmp_path / "nothing.pb")


@pytest.mark.parametrize("content", [b"this is text, no profile", b"", b"\x0a\xff\xff\xff\x7f"])
def test_a_file_that_is_no_profile_is_refused(tmp_path, content):
    path = tmp_path / "x.pb"
    path.write_bytes(content)
    with pytest.raises(TraceFormatError, match=r"x\.pb: "):
        read_xplane(path)


def test_a_cut_off_profile_is_refused_compressed_or_not(plane):
    plane.event(1, "a:Add", 0, 1)
    whole = plane.write().read_bytes()
    for cut in (whole[:-3], gzip.compress(whole)[:-12]):
        plane.path.write_bytes(cut)
        with pytest.raises(TraceFormatError):
            read_xplane(plane.path)


@recorded
@pytest.mark.parametrize("rank", [0, 1])
def test_a_recorded_profile_has_the_nodes_of_its_graph_and_an_all_reduce_per_gradient_and_step(rank):
    profile = read_xplane(TRACES / f"rank{rank}.xplane.pb.gz")
    graph, comm = read_partition_graph(TRACES / f"rank{rank}.run_metadata.pb.gz")
    in_graph = dict(zip(graph.name, graph.op, strict=True))
    matched = [i for i, node in enumerate(profile.nodes) if node in in_graph]
    assert len(matched) == 194
    assert all(profile.op_types[i] == in_graph[profile.nodes[i]] for i in matched)
    assert len(profile.ops.node) == 3 * len(profile.nodes)
    assert {profile.nodes[i] for i in profile.comm.node} == {node.name for node in comm}
    assert len(profile.comm.node) + profile.dropped.get("unpaired", 0) == 3 * len(comm)
    assert (profile.comm.end_us > profile.comm.start_us).all()


@recorded
def test_a_recorded_profile_has_its_steps_marked_by_the_script_and_by_the_function_call():
    spans = read_xplane(TRACES / "rank0.xplane.pb.gz").annotations
    assert spans.name == ("train", "train_step") * 3
    assert spans.is_call.tolist() == [False, True] * 3
