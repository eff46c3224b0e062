"""The table of measured clusters: append-only, resumable, and readable whatever happened to it."""

import contextlib
import functools
import gzip
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro_search.collect.tables.clusters import (
    ClusterOp,
    ClusterTable,
    ClusterTensor,
    FailedCluster,
    OpCluster,
    TableHeader,
    TableWriter,
    compact,
    read_table,
)
from dpro_search.errors import DproSearchError, InputError, TraceFormatError, TraceVersionError
from tests.every_case import every_case

REAL = Path(__file__).resolve().parents[1] / "data" / "xla_clusters.jsonl.gz"
HEADER = TableHeader(machine="m", versions={"tensorflow": "2"}, started_at="2026-01-01")


@functools.cache
def real():
    return read_table(REAL).measured


def rows(count):
    return real()[:count]


def written(path, count):
    writer = TableWriter(path, HEADER)
    for row in rows(count):
        writer.append(row)
    return path


def test_a_real_table_is_read():
    table = read_table(REAL)
    assert len(table.measured) == len(table.rows) > 300
    assert not table.dropped
    assert table.header.versions["tensorflow"].startswith("2.")
    assert len({row.model for row in table.measured}) >= 6


def test_fused_and_unfused_times_are_without_the_call():
    row = read_table(REAL).measured[0]
    assert row.fused_us == pytest.approx(min(row.fused_min_us) - min(row.call_min_us))
    assert row.noise_us >= 0


def updated(*, results, update_us):
    """A cluster whose op updates a variable by what it made; `results`: whether that is needed outside as well."""
    tensors = (
        ClusterTensor("float32", (4,), "in"),
        ClusterTensor("float32", (4,), "out" if results else "inner"),
        ClusterTensor("float32", (4,), "variable"),
        ClusterTensor("float32", (4,), "inner"),
    )
    ops = (ClusterOp("Neg", (0,), (1,)), ClusterOp("Square", (1,), (3,)), ClusterOp("AssignVariableOp", (2, 3), ()))
    return OpCluster(ops=ops, tensors=tensors, op_us=(1.0, update_us, update_us))


@pytest.mark.parametrize(
    ("results", "update_us", "expected"),
    [(True, 0.0, (False, True, True)), (True, 1.0, (False, False, False)), (False, 0.0, (False, False, False))],
    ids=["dead code to the optimizer", "ran", "nothing but updates: asked for"],
)
def test_updates_that_only_the_compiled_cluster_does_are_told(results, update_us, expected):
    assert updated(results=results, update_us=update_us).left_out == expected


def test_whether_it_pays_is_said_of_equal_ops_and_clear_differences_only():
    row = next(row for row in real() if row.pays is not None)
    assert row.pays == (row.fused_us < row.unfused_us)
    assert msgspec.structs.replace(row, unfused_min_us=row.fused_min_us).pays is None
    assert msgspec.structs.replace(row, cluster=updated(results=True, update_us=0.0)).pays is None


def test_a_table_of_the_first_version_is_read_but_not_continued(tmp_path):
    """It lacks what was added since: constants' values, what ops ran as, their times in a step."""
    table = read_table(REAL)
    assert table.header.version == 1
    assert not table.measured[0].cluster.step_op_us
    path = tmp_path / "t.jsonl"
    path.write_bytes(gzip.decompress(REAL.read_bytes()))
    with pytest.raises(InputError, match="version 1 cannot be continued"):
        TableWriter(path, TableHeader(machine=table.header.machine, versions=table.header.versions, started_at=""))


def test_appended_rows_come_back(tmp_path):
    path = written(tmp_path / "t.jsonl", 3)
    assert read_table(path).rows == rows(3)


def test_a_table_goes_on_where_it_stopped(tmp_path):
    path = written(tmp_path / "t.jsonl", 2)
    writer = TableWriter(path, HEADER)
    assert writer.rows == rows(2)
    writer.append(FailedCluster(model="bert", batch=8, index=7, reason="crashed"))
    assert len(read_table(path).rows) == 3
    assert read_table(path).failures == {"crashed": 1}


def test_a_line_cut_off_by_a_kill_is_counted_and_mended(tmp_path):
    path = written(tmp_path / "t.jsonl", 3)
    path.write_bytes(path.read_bytes()[:-50])
    assert read_table(path).dropped == {"cut off at the end": 1}
    TableWriter(path, HEADER).append(rows(3)[2])
    assert read_table(path).rows == rows(3)
    assert not read_table(path).dropped


def test_a_table_of_another_machine_is_not_continued(tmp_path):
    path = written(tmp_path / "t.jsonl", 1)
    with pytest.raises(InputError, match="another machine"):
        TableWriter(path, TableHeader(machine="other", versions=HEADER.versions, started_at=""))


def test_a_compact_table_holds_the_same_and_is_reproducible(tmp_path):
    table = ClusterTable(header=HEADER, rows=rows(20), dropped={})
    compact(table, tmp_path / "a.jsonl.gz")
    compact(table, tmp_path / "b.jsonl.gz")
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert read_table(tmp_path / "a.jsonl.gz").rows == rows(20)


def test_another_version_is_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(HEADER), "version": 9}))
    with pytest.raises(TraceVersionError, match="table version 9"):
        read_table(path)


def test_another_file_is_refused(tmp_path):
    (tmp_path / "t").write_text("hello\n")
    with pytest.raises(TraceFormatError, match="line 1"):
        read_table(tmp_path / "t")
    with pytest.raises(InputError, match="cannot be read"):
        read_table(tmp_path / "missing")


@every_case(
    "damage",
    [
        {"op_us": [1.0, 2.0]},
        {"op_us": [-1.0]},
        {"ops": [["Mul", [5], [0]]]},
        {"tensors": [["float32", [-2], "in"]]},
        {"tensors": [["float32", [2], "nowhere"]]},
        {"step_op_us": [1.0, 2.0]},
        {"ops": []},
    ],
)
def test_a_cluster_that_contradicts_itself_is_refused(damage):
    good = {"ops": [["Mul", [0], [0]]], "tensors": [["float32", [2], "in"]], "op_us": [1.0]}
    assert msgspec.convert(good, OpCluster)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(good | damage, OpCluster)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_costs_the_rows_that_it_hit_and_is_counted(tmp_path_factory, data):
    path = written(tmp_path_factory.mktemp("t") / "t.jsonl", 5)
    raw = bytearray(path.read_bytes())
    start = raw.index(b"\n") + 1
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(start, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(start, len(raw)))])
    table = read_table(path)
    lines = [line for line in path.read_bytes().split(b"\n")[1:] if line.strip()]
    assert len(table.rows) + sum(table.dropped.values()) == len(lines)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1), at=st.floats(0, 1), value=st.integers(0, 255))
def test_a_damaged_compressed_table_never_crashes(tmp_path_factory, cut, at, value):
    path = tmp_path_factory.mktemp("t") / "t.jsonl.gz"
    compact(ClusterTable(header=HEADER, rows=rows(5), dropped={}), path)
    raw = bytearray(path.read_bytes())
    raw[int(at * (len(raw) - 1))] = value
    path.write_bytes(raw[: int(cut * len(raw))])
    with contextlib.suppress(DproSearchError):
        read_table(path)


def test_a_compressed_table_that_ends_early_says_so(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(gzip.decompress(REAL.read_bytes()))[:-2000])
    table = read_table(path)
    assert table.dropped["the compressed file is cut off or damaged"] == 1
    assert table.measured


def chain(*, times=(1.0, 2.0), shape=(4,), second="Neg", inner="inner", attributes=None, axis=(1,)):
    tensors = (
        ClusterTensor("float32", shape, "in"),
        ClusterTensor("float32", shape, inner),
        ClusterTensor("float32", shape, "out"),
        ClusterTensor("int32", (1,), "const", axis),
    )
    ops = (ClusterOp("Exp", (0,), (1,), attributes or {}), ClusterOp(second, (1, 3), (2,)))
    return OpCluster(ops=ops, tensors=tensors, op_us=times)


def test_equal_clusters_have_equal_fingerprints_whatever_their_times():
    assert chain().fingerprint == chain(times=(7.0, 7.0)).fingerprint


@pytest.mark.parametrize(
    "change",
    [{"shape": (5,)}, {"second": "Abs"}, {"inner": "out"}, {"attributes": {"transpose_a": "1"}}, {"axis": (0,)}],
)
def test_another_shape_type_use_attribute_or_constant_is_another_cluster(change):
    assert chain(**change).fingerprint != chain().fingerprint
