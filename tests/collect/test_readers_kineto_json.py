"""Kineto files in all spellings, in pieces, damaged and cut off."""

import gzip

import numpy as np
import pytest
from kineto_files import distributed, needs, small_job

from dpro_search.collect.readers import kineto_json
from dpro_search.collect.readers.kineto import read
from dpro_search.collect.readers.kineto_events import read_kineto_file
from dpro_search.collect.trace import DependencyKind
from dpro_search.errors import InputError


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
    profile.records.append({"ph": "X", "cat": "mystery", "name": "x", "ts": 1, "dur": 1})
    dropped = read([profile.write(tmp_path / "trace.json")]).meta.dropped
    expected = {
        "damaged records": 1,
        "spans without a start or a duration": 1,
        "spans with an impossible start or duration": 1,
        "spans of category 'mystery'": 1,
        "device copies of annotations": 3,
    }
    assert dropped == expected


def test_a_file_that_ends_in_the_middle_keeps_its_whole_records(tmp_path):
    data = small_job().write(tmp_path / "trace.json").read_bytes()
    (tmp_path / "trace.json").write_bytes(data[: int(len(data) * 0.7)])
    trace = read([tmp_path / "trace.json"])
    assert 5 < len(trace.events) < 15
    assert trace.meta.dropped["records cut off at the end of the file"] == 1


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
    assert trace.meta.dropped["damaged records"] == 1


def test_a_long_text_that_is_no_list_of_records_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(kineto_json, "_PIECE", 100)
    (tmp_path / "trace.json").write_bytes(b'{"schemaVersion": 1, "traceEvents": [' + b'"cat": "kernel" ' * 5000)
    with pytest.raises(InputError, match=r"has no events \(left out: "):
        read([tmp_path / "trace.json"])
