"""Kineto files in all spellings, in pieces, damaged and cut off."""

import gzip
import re
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kineto_files import MAIN, START, distributed, needs, small_job

from dpro_search.collect.readers import _json_records as kineto_json
from dpro_search.collect.readers._json_records import JsonRecords
from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.readers.kineto.columns import read_kineto_file
from dpro_search.collect.readers.kineto.importer import read
from dpro_search.collect.readers.kineto.records import SpanRecord
from dpro_search.collect.trace import DependencyKind
from dpro_search.errors import InputError
from tests.every_case import every_case


@pytest.mark.parametrize("spelling", ["old", "new", "bare", "indented", "zipped"])
def test_all_spellings_of_one_job_give_one_trace(tmp_path, spelling):
    profile = small_job(old=spelling == "old")
    path = tmp_path / ("trace.gz" if spelling == "zipped" else "trace.json")
    trace = read([profile.write(path, bare=spelling == "bare", indent=2 if spelling == "indented" else None)])
    expected = read([small_job().write(tmp_path / "plain.json")])
    for column in ("kind", "stream", "start_us", "end_us", "step"):
        np.testing.assert_array_equal(getattr(trace.events, column), getattr(expected.events, column))
    assert needs(trace, DependencyKind.LAUNCH) == {("cudaLaunchKernel", "gemm"), ("cudaLaunchKernel", "relu")}


def test_nanoseconds_are_told_from_microseconds_record_by_record(tmp_path):
    profile = small_job()
    for record in profile.records[::2]:
        record["ts"], record["dur"] = int(record["ts"]) * 1000, record["dur"] * 1000
    trace = read([profile.write(tmp_path / "trace.json")])
    expected = read([small_job().write(tmp_path / "plain.json")])
    np.testing.assert_allclose(trace.events.start_us, expected.events.start_us, atol=0.001)
    np.testing.assert_allclose(trace.events.end_us, expected.events.end_us, atol=0.01)


def test_files_are_read_in_pieces_of_any_size(tmp_path, monkeypatch):
    path = small_job(steps=30).write(tmp_path / "trace.json", indent=1, header={"deviceProperties": [{"id": 0}, {"id": 1}]})
    whole = read_kineto_file(path)
    for size in (300, 1000, 7777):
        monkeypatch.setattr(kineto_json, "_PIECE", size)
        pieces = read_kineto_file(path)
        assert pieces.header == whole.header
        assert pieces.dropped == whole.dropped
        for column in ("category", "name", "thread", "start_us", "duration_us", "correlation"):
            np.testing.assert_array_equal(getattr(pieces, column), getattr(whole, column))


def test_fields_before_and_after_the_records_are_read(tmp_path):
    path = small_job().write(tmp_path / "trace.json", header=distributed(3, 8))
    assert read_kineto_file(path).header["distributedInfo"]["rank"] == 3
    assert read_kineto_file(path).header["traceName"] == "trace.json"


def test_what_profilers_write_against_the_rules_of_json_is_mended(tmp_path):
    text = small_job().write(tmp_path / "trace.json").read_bytes()
    text = text.replace(b'"schemaVersion": 1', b'"schemaVersion": 1, "path": "C:\\Users\\x"')
    text = text.replace(b'"name": "gemm"', b'"name": "gemm \xff\\s"', 1).replace(
        b'"device": 0', b'"x": NaN, "y": -inf, "device": 0', 2
    )
    (tmp_path / "trace.json").write_bytes(text)
    trace = read([tmp_path / "trace.json"])
    assert len(trace.events) == 15
    assert "gemm \ufffd\\s" in trace.names


def test_records_of_wrong_types_are_counted_and_left_out(tmp_path):
    profile = small_job()
    profile.records[4]["ts"] = "soon"
    profile.records[5]["dur"] = None
    profile.records[9]["dur"] = -1
    profile.records.append({**profile.records[9], "name": "endless", "dur": 1e18})
    profile.records.append({"ph": "X", "cat": "mystery", "name": "x", "ts": 1, "dur": 1})
    dropped = read([profile.write(tmp_path / "trace.json")]).meta.dropped
    expected = {
        f"damaged records of {tmp_path.name}/trace.json": 1,
        "spans without a start or a duration": 1,
        "spans with an impossible start or duration": 2,
        "spans of category 'mystery'": 1,
        "device copies of annotations": 3,
    }
    assert dropped == expected


def test_a_file_that_ends_in_the_middle_keeps_its_whole_records(tmp_path):
    data = small_job().write(tmp_path / "trace.json").read_bytes()
    (tmp_path / "trace.json").write_bytes(data[: int(len(data) * 0.7)])
    trace = read([tmp_path / "trace.json"])
    assert 5 < len(trace.events) < 15
    assert trace.meta.dropped[f"records cut off at the end of {tmp_path.name}/trace.json"] == 1


def test_a_compressed_file_that_ends_in_the_middle_keeps_what_can_be_unpacked(tmp_path):
    data = gzip.compress(small_job(steps=300).write(tmp_path / "trace.json").read_bytes())
    (tmp_path / "trace.json").write_bytes(data[: len(data) // 2])
    assert 100 < len(read([tmp_path / "trace.json"]).events) < 1500


def test_a_damaged_record_among_records_with_lists_costs_itself_only(tmp_path):
    profile = small_job()
    for record in profile.records:
        record["args"]["shapes"] = [{"dims": [1]}, {"dims": [2]}]
    data = profile.write(tmp_path / "trace.json").read_bytes().replace(b'"name": "gemm"', b'"name": gemm', 1)
    (tmp_path / "trace.json").write_bytes(data)
    trace = read([tmp_path / "trace.json"])
    assert len(trace.events) == 14
    assert trace.meta.dropped[f"damaged records of {tmp_path.name}/trace.json"] == 1


def test_a_long_text_that_is_no_list_of_records_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(kineto_json, "_PIECE", 100)
    (tmp_path / "trace.json").write_bytes(b'{"schemaVersion": 1, "traceEvents": [' + b'"cat": "kernel" ' * 5000)
    with pytest.raises(InputError, match=r"has no events \(left out: "):
        read([tmp_path / "trace.json"])


def records_lost(path: Path, data: bytes, whole: int) -> int:
    path.write_bytes(data)
    kineto_file = read_kineto_file(path)
    lost = whole - len(kineto_file)
    counted = sum(number for reason, number in kineto_file.dropped.items() if reason != "device copies of annotations")
    assert counted >= lost
    return lost


@given(at=st.integers(0, 10**6), value=st.integers(0, 255))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_wrong_byte_costs_the_record_that_it_is_in(tmp_path, at, value):
    path = small_job(steps=5).write(tmp_path / "trace.json", header=distributed(3, 8))
    data, whole = path.read_bytes(), len(read_kineto_file(path))
    first, last = data.index(b'"traceEvents"') + 20, data.rindex(b"]")
    at = first + at % (last - first)
    assert records_lost(path, data[:at] + bytes([value]) + data[at + 1 :], whole) <= 2


@every_case("mark", ['{"ph": "X", "cat": "cpu_op"', '}, {"ph": "X", "cat": "cuda_runtime"', '"ph": "X", "cat": "cpu_op"'])
@every_case("wrong", ["x", "]", "[", "{", "}", '"', "\\", "\0"])
def test_a_wrong_brace_comma_or_quote_costs_its_record(tmp_path, mark, wrong):
    """Marks of the text between two records: it looked like one record to the end of the file, or like the end of the list."""
    path = small_job(steps=20).write(tmp_path / "trace.json")
    data, whole = path.read_bytes(), len(read_kineto_file(path))
    for shift in range(3):
        at = data.index(mark.encode(), len(data) // 3) + shift
        assert records_lost(path, data[:at] + wrong.encode() + data[at + 1 :], whole) <= 2


def test_a_block_of_zeros_that_joins_two_records_is_told(tmp_path):
    """From one's time to another's: with blanks in place of zeros it would be one record of valid JSON."""
    path = small_job(steps=20).write(tmp_path / "trace.json")
    data, whole = path.read_bytes(), len(read_kineto_file(path))
    times = [match.start() for match in re.finditer(b'"ts"', data)]
    first, last = times[len(times) // 2], times[len(times) // 2 + 4]
    path.write_bytes(data[:first] + bytes(last - first) + data[last:])
    kineto_file = read_kineto_file(path)
    assert whole - 5 <= len(kineto_file) < whole
    assert any("damaged" in reason for reason in kineto_file.dropped)


def test_a_damaged_name_of_the_list_costs_the_fields_beside_it_only(tmp_path):
    path = small_job().write(tmp_path / "trace.json")
    path.write_bytes(path.read_bytes().replace(b'"traceEvents"', b'"traceEvent\x07"'))
    assert len(read_kineto_file(path)) == len(read_kineto_file(small_job().write(tmp_path / "whole.json")))


def test_a_wrong_byte_in_a_compressed_file_keeps_what_came_before_and_estimates_the_rest(tmp_path):
    path = small_job(steps=300).write(tmp_path / "trace.json")
    whole = len(read_kineto_file(path))
    data = path.read_bytes()
    first, second = gzip.compress(data[: len(data) // 2]), gzip.compress(data[len(data) // 2 :])
    path.write_bytes(first + second[:10] + b"\x07" + second[11:])  # no such type of block
    kineto_file = read_kineto_file(path)
    estimated = kineto_file.dropped[f"records after the damage of {tmp_path.name}/trace.json (estimated)"]
    assert len(kineto_file) == pytest.approx(whole / 2, rel=0.1)
    assert estimated == pytest.approx(whole * 6 / 5 / 2, rel=0.2)  # of all records, of which 5 of 6 are spans that are used


def test_a_compressed_file_whose_checksum_does_not_match_is_told(tmp_path):
    """A wrong byte in it often unpacks to other text without an error."""
    packed = bytearray(gzip.compress(small_job().write(tmp_path / "trace.json").read_bytes()))
    packed[-6] ^= 1
    (tmp_path / "trace.json").write_bytes(packed)
    *_, warning = import_trace([tmp_path / "trace.json"]).meta.warnings
    assert warning == f"left out: 1 damaged checksum of {tmp_path.name}/trace.json: any of its records may be wrong"


@pytest.mark.parametrize("text", ['{"a":[', '{"a":[{},', '{"a":[{},{"b":', '{"},{"', '}],"a":[{}', '{"ph":"X","args":[{"ph":1},'])
def test_the_work_on_a_crafted_record_grows_as_its_length(tmp_path, text):
    """Text that looks like the beginning or the end of a record at every place."""
    path = tmp_path / "trace.json"

    def decoded_bytes(repeated: int) -> int:
        path.write_bytes(b'{"schemaVersion": 1, "traceEvents": [{"ph": "M"}, ' + text.encode() * repeated)
        records = JsonRecords(path, SpanRecord)
        work = 0

        def counted(data: bytes) -> list[SpanRecord]:
            nonlocal work
            work += len(data)
            return msgspec.json.decode(data, type=list[SpanRecord])

        records._decoder = SimpleNamespace(decode=counted)
        list(records)
        return work

    assert decoded_bytes(8000) < 60 * len(text) * 8000


def test_a_loss_is_a_warning_of_the_import_that_names_the_file(tmp_path):
    path = small_job().write(tmp_path / "trace.json")
    path.write_bytes(path.read_bytes().replace(b'"name": "gemm"', b'"name": gemm', 1))
    assert import_trace([path]).meta.warnings[-1] == f"left out: 1 damaged records of {tmp_path.name}/trace.json"


def test_a_type_that_is_no_text_leaves_the_size_of_a_collective_unknown(tmp_path):
    """A wrong byte in it was a traceback."""
    profile = small_job()
    profile.add("user_annotation", "nccl:all_reduce", START + 85, 20, MAIN, {"Input Dims": [[394, 2]], "Input type": ["Scalar"]})
    path = profile.write(tmp_path / "trace.json")
    path.write_bytes(path.read_bytes().replace(b"Scalar", b"Scal\xddr"))
    assert len(read([path]).events) == 16
