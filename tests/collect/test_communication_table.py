"""The table of measured all-reduces: written whole, readable whatever happened to it."""

import contextlib
import math

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpro_search.collect.tables.all_reduces import (
    AllReduceRow,
    CommHeader,
    CommTable,
    is_comm_table,
    read_comm_table,
    write_comm_table,
)
from dpro_search.errors import DproSearchError, InputError, TraceFormatError, TraceVersionError

HEADER = CommHeader(machine="m", cores=2, versions={"gloo": "torch 2"}, started_at="2026-01-01")


def row(size_bytes: int, **fields) -> AllReduceRow:
    usual = {"backend": "gloo", "algorithm": "ring", "ranks": 2, "rounds_us": (10.0, 12.0), "calls": 4, "sent_bytes": size_bytes}
    return AllReduceRow(size_bytes=size_bytes, **(usual | fields))


ROWS = (row(1024), row(4096, rate_bps=5e8, busy_us=(3.0,)), row(4096))


def written(path, rows=ROWS):
    write_comm_table(path, CommTable(header=HEADER, rows=rows, dropped={}))
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_rows_come_back(tmp_path, name):
    comm_table = read_comm_table(written(tmp_path / name))
    assert comm_table.header == HEADER
    assert set(comm_table.rows) == set(ROWS)
    assert is_comm_table(tmp_path / name)


@pytest.mark.parametrize(
    ("rounds", "duration"), [([7], 7), ([6, 8], 7), ([5, 90, 7], 7), ([90, 6, 8, 1], 7), ([6, 8, 90, 7, 7, 7, 1], 7)]
)
def test_a_disturbed_round_does_not_move_a_duration(rounds, duration):
    assert row(4096, rounds_us=tuple(map(float, rounds))).duration_us == duration


def test_rounds_that_agree_are_settled_and_one_round_never_is():
    assert row(4096, rounds_us=(10.0,)).standard_error == float("inf")
    alike, apart = row(4096, rounds_us=(10.0, 10.1, 9.9)), row(4096, rounds_us=(10.0, 20.0, 15.0))
    assert alike.standard_error < 0.01 < 0.1 < apart.standard_error


def test_a_processors_time_is_known_where_rounds_tell_it():
    assert row(4096, busy_us=(3.0, 5.0)).mean_busy_us == 4.0
    assert math.isnan(row(4096).mean_busy_us)


def test_the_same_rows_give_the_same_bytes(tmp_path):
    one, other = written(tmp_path / "a.gz"), written(tmp_path / "b.gz", ROWS[::-1])
    assert one.read_bytes() == other.read_bytes()


def test_damaged_lines_are_counted(tmp_path):
    path = written(tmp_path / "t")
    path.write_bytes(path.read_bytes().replace(b'"rounds_us":[10.0,12.0]', b'"rounds_us":[-1.0]', 1))
    comm_table = read_comm_table(path)
    assert (len(comm_table.rows), comm_table.dropped) == (2, {"not a row": 1})


def test_other_files_are_no_such_table(tmp_path):
    (tmp_path / "text").write_text("hello\n")
    assert not is_comm_table(tmp_path / "text")
    with pytest.raises(TraceFormatError, match="not a table"):
        read_comm_table(tmp_path / "text")
    with pytest.raises(InputError, match="cannot be read"):
        is_comm_table(tmp_path / "nothing")
    newer = msgspec.json.encode(msgspec.structs.replace(HEADER, version=9)) + b"\n"
    (tmp_path / "newer").write_bytes(newer)
    with pytest.raises(TraceVersionError, match="version 9"):
        read_comm_table(tmp_path / "newer")


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_table_is_an_error_in_one_line_or_fewer_rows(tmp_path, data):
    path = written(tmp_path / data.draw(st.sampled_from(["t.jsonl", "t.jsonl.gz"])))
    raw = bytearray(path.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    with contextlib.suppress(DproSearchError):
        assert len(read_comm_table(path).rows) <= len(ROWS)


def test_rows_of_before_there_were_ranks_on_a_host_have_one(tmp_path):
    path = written(tmp_path / "t.jsonl", (row(1024, ranks=4), row(1024, ranks=4, ranks_per_host=2)))
    assert [read_row.ranks_per_host for read_row in read_comm_table(path).rows] == [1, 2], "and are rows of their own"
    path.write_text(path.read_text().replace('"ranks_per_host":1,', ""))
    assert [read_row.ranks_per_host for read_row in read_comm_table(path).rows] == [1, 2]


def test_ranks_that_hosts_cannot_share_are_no_row(tmp_path):
    path = written(tmp_path / "t.jsonl", (row(1024, ranks=4, ranks_per_host=2),))
    path.write_text(path.read_text().replace('"ranks_per_host":2', '"ranks_per_host":3'))
    assert read_comm_table(path).dropped == {"not a row": 1}
