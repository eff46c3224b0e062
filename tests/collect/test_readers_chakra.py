"""Chakra execution traces: nodes, dependencies, laid-out starts, collectives across ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from importer_kit import ImporterConformance, shared_traces

from dpro_search.collect.readers import chakra
from dpro_search.collect.readers._wire import Frames
from dpro_search.collect.readers.protos import MESSAGES
from dpro_search.collect.trace import DependencyKind, EventKind, Trace
from dpro_search.errors import TraceFormatError

COMP, COLL = 4, 7


def message(schema: str, **fields: Any) -> bytes:
    """One message after its length."""
    attributes = fields.pop("attr", {})
    content = MESSAGES[schema](**fields)
    for key, value in attributes.items():
        field = "bool_val" if isinstance(value, bool) else "int64_val" if isinstance(value, int) else "string_val"
        content.attr.add(name=key, **{field: value})
    data = content.SerializeToString()
    length, prefix = len(data), b""
    while length >= 0x80:
        prefix += bytes([length & 0x7F | 0x80])
        length >>= 7
    return prefix + bytes([length]) + data


def host(number: int, name: str, length_us: int, **more: Any) -> bytes:
    return message(
        "ChakraNode", id=number, name=name, type=COMP, duration_micros=length_us, attr={"is_cpu_op": True, "tid": 1}, **more
    )


def device(number: int, name: str, length_us: int, *, type: int = COMP, attr: dict | None = None, **more: Any) -> bytes:
    attributes = {"is_cpu_op": False, "tid": 7} | (attr or {})
    return message("ChakraNode", id=number, name=name, type=type, duration_micros=length_us, attr=attributes, **more)


def nodes(all_reduce_us: int = 80, **more: Any) -> list[bytes]:
    """A host op launches a kernel, a second host op the all-reduce of its result; a third waits for it."""
    return [
        host(1, "aten::mm", 10),
        device(2, "sgemm", 50, ctrl_deps=[1], data_deps=[1]),
        host(3, "c10d::allreduce_", 10, data_deps=[1]),
        device(
            4,
            "ncclKernel_AllReduce",
            all_reduce_us,
            type=COLL,
            attr={"comm_type": 0, "comm_size": 4096},
            ctrl_deps=[3],
            data_deps=[2],
        ),
        host(5, "wait", 5, data_deps=[3, 4]),
    ]


def written(path: Path, rows: list[bytes]) -> Path:
    path.write_bytes(message("ChakraMetadata", attr={"schema": "1.0.1", "pid": 7}) + b"".join(rows))
    return path


def times(trace: Trace, rank: int = 0) -> dict[str, tuple[float, float]]:
    events = trace.events.select(trace.events.rank == rank)
    return {trace.names[n]: (s, e) for n, s, e in zip(events.name, events.start_us, events.end_us, strict=True)}


class TestChakra(ImporterConformance):
    importer = chakra.IMPORTER

    @pytest.fixture
    def files(self, tmp_path):
        return [written(tmp_path / f"trace.{rank}.et", nodes(80 + rank)) for rank in (0, 1)]


def test_nodes_without_starts_are_laid_out_by_their_dependencies(tmp_path):
    trace = chakra.read([written(tmp_path / "a.et", nodes())])
    assert times(trace) == {
        "aten::mm": (0, 10), "c10d::allreduce_": (10, 20), "sgemm": (10, 60), "ncclKernel_AllReduce": (60, 140), "wait": (140, 145),
    }  # fmt: skip
    assert "starts are not in the files: nodes are laid out by their dependencies and lengths" in trace.meta.warnings


def test_recorded_starts_are_kept_and_dependencies_that_they_contradict_counted(tmp_path):
    rows = [host(1, "a", 10, start_time_micros=100), host(2, "b", 5, start_time_micros=105, data_deps=[1])]
    trace = chakra.read([written(tmp_path / "a.et", rows)])
    assert times(trace) == {"a": (0, 10), "b": (5, 10)}
    assert trace.meta.dropped == {"dependencies that the times contradict": 1}


def test_kinds_streams_and_sizes(tmp_path):
    rows = [*nodes(), device(6, "Memcpy HtoD", 3)]
    events = chakra.read([written(tmp_path / "a.et", rows)])
    kinds = {events.names[n]: EventKind(k) for n, k in zip(events.events.name, events.events.kind, strict=True)}
    assert kinds == {
        "aten::mm": EventKind.OP, "sgemm": EventKind.KERNEL, "c10d::allreduce_": EventKind.OP,
        "ncclKernel_AllReduce": EventKind.COLLECTIVE, "wait": EventKind.OP, "Memcpy HtoD": EventKind.COPY,
    }  # fmt: skip
    assert events.events.size_bytes.max() == 4096


def test_data_dependencies_and_the_launching_call(tmp_path):
    trace = chakra.read([written(tmp_path / "a.et", nodes())])
    names = [trace.names[i] for i in trace.events.name]
    needs = trace.dependencies
    pairs = {(names[s], names[t], DependencyKind(k)) for s, t, k in zip(needs.source, needs.target, needs.kind, strict=True)}
    assert ("aten::mm", "sgemm", DependencyKind.LAUNCH) in pairs
    assert ("sgemm", "ncclKernel_AllReduce", DependencyKind.DATA) in pairs
    assert len(pairs) == 7


def test_collectives_are_matched_across_ranks_in_order(tmp_path):
    paths = [written(tmp_path / f"x.{rank}.et", nodes(80 + rank)) for rank in (0, 1, 10, 2)]
    trace = chakra.read(sorted(paths))
    moved = trace.events.select(trace.events.kind == EventKind.COLLECTIVE)
    assert len(set(moved.collective)) == 1
    assert (moved.end_us - moved.start_us).tolist() == [80, 81, 82, 90]  # rank 10's file is the last rank


def test_a_single_ranks_collectives_have_no_peers(tmp_path):
    trace = chakra.read([written(tmp_path / "a.et", nodes())])
    assert trace.events.collective.tolist() == [-1] * 5
    assert "one rank: its collectives have no peers, and hold their wait" in trace.meta.warnings


def test_a_cycle_is_left_out_and_counted(tmp_path):
    rows = [host(1, "a", 1), host(2, "b", 1, data_deps=[3]), host(3, "c", 1, data_deps=[2])]
    trace = chakra.read([written(tmp_path / "a.et", rows)])
    assert trace.names == ("a",)
    assert trace.meta.dropped == {"nodes in a cycle of dependencies": 2}


def test_a_file_that_is_cut_off_keeps_its_whole_nodes(tmp_path):
    path = written(tmp_path / "a.et", nodes())
    path.write_bytes(path.read_bytes()[:-3])
    trace = chakra.read([path])
    assert len(trace.events) == 4
    assert trace.meta.dropped == {f"records cut off at the end of {tmp_path.name}/a.et": 1}


@given(at=st.integers(0, 10**6), value=st.integers(0, 255))
@example(at=0, value=104)  # a length that ends where a later node does
@example(at=0, value=106)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_wrong_byte_costs_the_node_that_it_is_in(tmp_path, at, value):
    """Also one in a length, behind which nothing was found again."""
    rows = [
        node
        for number in range(0, 60, 3)
        for node in (host(number, "a", 10), device(number + 1, "b", 50), host(number + 2, "c", 5))
    ]
    path = written(tmp_path / "a.et", rows)
    data = bytearray(path.read_bytes())
    head = len(data) - sum(map(len, rows))
    data[head + at % (len(data) - head)] = value
    path.write_bytes(data)
    trace = chakra.read([path])
    assert len(rows) - len(trace.events) <= 2
    if len(trace.events) < len(rows):
        assert sum(trace.meta.dropped.values()) >= 1


def test_a_file_of_zeros_is_looked_through_at_once(tmp_path):
    path = written(tmp_path / "a.et", nodes())
    path.write_bytes(path.read_bytes() + bytes(2**22) + b"".join(nodes()[:1]))
    decoded = 0

    def counted(data: bytes) -> Any:
        nonlocal decoded
        decoded += 1
        return MESSAGES["ChakraNode"].FromString(data)

    frames = Frames(path.read_bytes(), counted, b"\x08\x12")
    assert len(list(frames)) == 7  # the metadata look like a node
    assert (decoded, frames.lost, frames.lost_bytes) == (8, 1, 2**22)  # the one behind the zeros twice


def test_a_file_without_a_node(tmp_path):
    with pytest.raises(TraceFormatError, match=r"a.et: no usable node"):
        chakra.read([written(tmp_path / "a.et", [])])


def test_a_real_trace_is_read_whole():
    trace = chakra.read([shared_traces() / "other_formats" / "chakra.0.et.gz"])
    events, needs = trace.events, trace.dependencies
    assert len(events) == 3664
    moved = events.select(events.kind == EventKind.COLLECTIVE)
    assert (len(moved), int(moved.size_bytes.min())) == (7, 424)
    data = needs.kind == DependencyKind.DATA
    assert (events.start_us[needs.target] >= events.end_us[needs.source])[data].all()
    assert (events.start_us[needs.target] >= events.start_us[needs.source]).all()
    for stream in np.unique(events.stream):  # a stream runs one thing at a time
        selected = events.select(events.stream == stream)
        order = np.argsort(selected.start_us, kind="stable")
        assert (selected.start_us[order][1:] >= selected.end_us[order][:-1]).all()
