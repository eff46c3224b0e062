"""XPlane profiles of GPUs: ranks, streams, launches, steps, collectives."""

from pathlib import Path

import numpy as np
import pytest
from importer_kit import ImporterConformance, shared_traces
from xplane_files import Plane

from dpro_search.collect.readers.protos import MESSAGES
from dpro_search.collect.readers.tensorflow import xplane_gpu
from dpro_search.collect.trace import DependencyKind, EventKind, Trace
from dpro_search.errors import TraceFormatError
from tests.profiles import profiled

MODULE = "jit_train_step"
STEP_US = 1000


def add_line(plane: Plane, number: int, events: list[tuple[str, float, float, dict]], name: str = "") -> None:
    """A line of (name, start us, duration us, stats) events."""
    line = plane.line(number, 5_000, name)
    for event in events:
        plane.add(line, *event)


def written(path: Path, *, gpus: int = 2, steps: int = 3) -> Path:
    """Each step launches two fusions and an all-reduce on another stream; GPU 1 is 7 us later; one copy comes before."""
    space = MESSAGES["XSpace"]()
    Plane(space, "/host:metadata")
    host_calls: list[list[tuple[str, float, float, dict]]] = []
    for gpu in range(gpus):
        plane, late = Plane(space, f"/device:GPU:{gpu}"), 7 * gpu
        compute: list[tuple[str, float, float, dict]] = [
            ("MemcpyH2D", 10 + late, 5, {"correlation_id": 9000 + gpu, "memcpy_details": "kind:a size:512 b:1"})
        ]
        reduce, calls = [], []
        for step in range(steps):
            t = 100 + STEP_US * step + late
            for k, (name, start, length) in enumerate(
                (("fusion.kd", 0, 50), ("gemm.kd", 50, 200), ("ncclDevKernel_AllReduce", 260, 90))
            ):
                stats = {
                    "correlation_id": 100 * gpu + 10 * step + k + 1,
                    "hlo_op": ("fusion", "dot", "all-reduce.1")[k],
                    "hlo_module": MODULE,
                }
                (reduce if k == 2 else compute).append((name, t + start, length, stats))
                calls.append(
                    ("hipLaunchKernel", t - 20 + 5 * k, 4, {"correlation_id": stats["correlation_id"], "device_id": 70 + gpu})
                )
        calls.append(("hipStreamSynchronize", 100 + STEP_US * steps, 30, {"correlation_id": 8000 + gpu, "device_id": 70 + gpu}))
        calls.append(("python frame", 0, 500, {}))
        add_line(plane, 16, compute)
        add_line(plane, 17, reduce)
        add_line(plane, 90, [("dot", 100, 200, {})], name="XLA Ops")
        host_calls.append(calls)
    host = Plane(space, "/host:CPU")
    for number, calls in enumerate(host_calls):
        add_line(host, 500 + number, calls)
    path.write_bytes(space.SerializeToString())
    return path


def of_kind(trace: Trace, kind: EventKind, rank: int = 0) -> list[tuple[str, int, int]]:
    """(name, stream, step) of a rank's events of a kind."""
    events = trace.events.select((trace.events.kind == kind) & (trace.events.rank == rank))
    return [(trace.names[n], int(s), int(k)) for n, s, k in zip(events.name, events.stream, events.step, strict=True)]


class TestXPlaneGpu(ImporterConformance):
    importer = xplane_gpu.IMPORTER
    ranks_are_seen = False

    @pytest.fixture
    def files(self, tmp_path):
        return [written(tmp_path / "host.xplane.pb")]


def test_every_gpu_is_a_rank_and_every_stream_a_device(tmp_path):
    trace = xplane_gpu.read([written(tmp_path / "a.pb")])
    assert trace.meta.ranks == 2
    assert of_kind(trace, EventKind.KERNEL)[:2] == [("fusion.kd", 0, 0), ("gemm.kd", 0, 0)]
    assert of_kind(trace, EventKind.COLLECTIVE) == [("ncclDevKernel_AllReduce", 1, step) for step in range(3)]


def test_files_of_several_processes_add_their_gpus(tmp_path):
    trace = xplane_gpu.read([written(tmp_path / name) for name in ("a.pb", "b.pb")])
    assert trace.meta.hosts == ("process 0",) * 2 + ("process 1",) * 2


def test_copies_have_their_sizes(tmp_path):
    trace = xplane_gpu.read([written(tmp_path / "a.pb")])
    assert of_kind(trace, EventKind.COPY) == [("MemcpyH2D", 0, -1)]
    assert trace.events.size_bytes[trace.events.kind == EventKind.COPY].tolist() == [512, 512]


def test_a_step_is_an_execution_of_the_busiest_module(tmp_path):
    trace = xplane_gpu.read([written(tmp_path / "a.pb")])
    rank_steps = trace.steps.select(trace.steps.rank == 1)
    assert np.diff(rank_steps.start_us) == pytest.approx([STEP_US] * 2)
    assert rank_steps.end_us - rank_steps.start_us == pytest.approx([350] * 3)


def test_without_notes_of_xla_all_is_one_step(tmp_path):
    path = written(tmp_path / "a.pb")
    path.write_bytes(path.read_bytes().replace(b"hlo_module", b"xxx_module"))
    trace = xplane_gpu.read([path])
    assert trace.steps.index.tolist() == [0, 0]
    assert trace.meta.warnings[0] == "rank 0: no kernel names its XLA module, so all is one step"


def test_a_kernel_needs_the_call_that_launched_it(tmp_path):
    trace = xplane_gpu.read([written(tmp_path / "a.pb")])
    needs, events = trace.dependencies, trace.events
    assert set(needs.kind) == {DependencyKind.LAUNCH}
    assert len(needs) == 2 * 3 * 3
    assert (events.rank[needs.source] == events.rank[needs.target]).all()
    assert trace.meta.dropped["kernels without a recorded launch (kept)"] == 2  # the copies


def test_calls_that_await_belong_to_the_gpu_of_their_device(tmp_path):
    trace = xplane_gpu.read([written(tmp_path / "a.pb")])
    assert [len(of_kind(trace, EventKind.SYNC, rank)) for rank in (0, 1)] == [1, 1]


def test_collectives_of_all_ranks_are_matched_in_order(tmp_path):
    trace = xplane_gpu.read([written(tmp_path / "a.pb", gpus=3)])
    moved = trace.events.select(trace.events.kind == EventKind.COLLECTIVE)
    assert np.bincount(moved.collective).tolist() == [3, 3, 3]
    alone = xplane_gpu.read([written(tmp_path / "b.pb", gpus=1)])
    assert set(alone.events.collective) == {-1}


def test_what_is_derived_or_launches_nothing_is_counted(tmp_path):
    dropped = xplane_gpu.read([written(tmp_path / "a.pb")]).meta.dropped
    assert (dropped["events of derived lines"], dropped["host events that launch nothing"]) == (2, 2)


def test_a_profile_without_a_gpu(tmp_path):
    with pytest.raises(TraceFormatError, match=r"a.pb: no GPU plane with events \(planes: '/host:metadata', '/host:CPU'\)"):
        xplane_gpu.read([written(tmp_path / "a.pb", gpus=0)])


def test_a_real_profile_of_eight_gpus():
    trace = xplane_gpu.read([shared_traces() / "other_formats" / "jax_conv_8xMI300X.xplane.pb"])
    kernels = trace.events.select(trace.events.kind == EventKind.KERNEL)
    assert (trace.meta.ranks, np.bincount(kernels.rank).tolist()) == (8, [25] * 8)
    assert len({(int(r), int(s)) for r, s in zip(kernels.rank, kernels.stream, strict=True)}) == 8
    assert np.bincount(trace.steps.rank).tolist() == [5] * 8  # the compiled function ran five times
    launches = trace.dependencies
    assert (trace.events.start_us[launches.source] <= trace.events.start_us[launches.target]).all()
    assert (
        len(launches) + trace.meta.dropped.get("kernels without a recorded launch (kept)", 0) == (trace.events.stream < 100).sum()
    )


def test_copies_between_executions_belong_to_the_step_on_their_side_of_the_idle_time():
    """In the real file, inputs are spread to all GPUs just before an execution: its iteration must contain them."""
    trace = xplane_gpu.read([shared_traces() / "other_formats" / "jax_conv_8xMI300X.xplane.pb"])
    copies = trace.events.select(trace.events.kind == EventKind.COPY)
    assert np.unique(copies.step).tolist() == [-1, 1, 2, 3, 4]
    for step in profiled(trace).compared(None).steps:
        assert step.replayed_us == pytest.approx(step.measured_us, rel=1e-3)


def test_a_profile_of_a_tpu_is_named(tmp_path):
    path = written(tmp_path / "a.pb", gpus=0)
    path.write_bytes(path.read_bytes().replace(b"/host:metadata", b"/device:TPU:00"))
    with pytest.raises(TraceFormatError, match=r"a.pb: a profile of a TPU; only those of GPUs"):
        xplane_gpu.read([path])
