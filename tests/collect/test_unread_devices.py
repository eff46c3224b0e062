"""Devices whose records have no known category are read, and devices without records are not taken for the host."""

import json

import pytest
from kineto_files import START, Profile

from dpro_search.collect.readers.kineto.importer import read
from dpro_search.collect.trace import EventKind
from tests.in_process import fails_in_one_line, succeeds


def profile(cat: str | None = "kernel", *, launched: bool = True) -> Profile:
    """Steps of 1000 us: two products of 300 us, whose records have a category or none; the host waits for their end."""
    made = Profile()
    for number in range(4):
        begin = START + 1000 * number
        made.step(number, begin - 20, 990)
        made.op("aten::mm", begin - 18, 12)
        for part in range(2):
            at = begin + 302 * part
            made.kernel("sm90_xmma_gemm", at, 300, launched=begin - 15 + 5 * part if launched else None, cat=cat or "", call_us=4.0)
        made.call("cudaDeviceSynchronize", begin - 2, 980)
    if cat is None:
        for record in made.records:
            if record["cat"] == "":
                del record["cat"]
    return made


def described(made: Profile, name: str, text: dict[str, str]) -> Profile:
    made.records.insert(0, {"ph": "M", "name": name, "pid": made.device, "tid": 0, "ts": 0, "args": text})
    return made


def kernels(made: Profile, tmp_path) -> int:
    trace = read([made.write(tmp_path / "rank0.json")])
    return int((trace.events.kind == EventKind.KERNEL).sum())


@pytest.mark.parametrize("cat", [None, "hpu_op", "npu_kernel_record"])
def test_records_with_a_stream_and_the_id_of_a_launch_are_kernels(tmp_path, cat):
    assert kernels(profile(cat), tmp_path) == 8


@pytest.mark.parametrize(
    "what",
    [("process_labels", {"labels": "NPU"}), ("process_name", {"name": "Ascend Hardware"}), ("process_labels", {"labels": "GPU 0"})],
)
def test_records_of_a_process_that_is_described_as_a_device_are_kernels(tmp_path, what):
    assert kernels(described(profile(None, launched=False), *what), tmp_path) == 8


def test_rows_that_sum_up_what_a_device_did_are_left_out(tmp_path):
    made = described(profile(None, launched=False), "process_name", {"name": "Overlap Analysis"})
    trace = read([described(made, "process_labels", {"labels": "NPU"}).write(tmp_path / "rank0.json")])
    assert not (trace.events.kind == EventKind.KERNEL).any()
    assert trace.meta.dropped["spans of category ''"] == 8


def test_annotations_of_a_device_are_no_kernels(tmp_path):
    made = profile()
    made.add("npu_user_annotation", "forward", START, 600, 7, {"stream": 7, "correlation": 2}, pid=made.device)
    assert kernels(made, tmp_path) == 8


def test_a_device_without_records_is_unknown_and_what_needs_it_is_refused(tmp_path):
    made = profile()
    made.records = [record for record in made.records if record["cat"] != "kernel"]
    read([made.write(tmp_path / "rank0.json")]).save(tmp_path / "T")
    facts = json.loads(succeeds("replay", tmp_path / "T", "--json"))
    assert facts["breakdown_us"]["unknown"] == pytest.approx(facts["predicted_iteration_us"])
    assert facts["breakdown_us"]["compute"] == 0
    for change in ("compute=0.5", "communication=0", "host=0.5", "launch=0"):
        assert "no record of the device" in fails_in_one_line(2, "replay", tmp_path / "T", "--what-if", change)
    assert "no record of the device" in fails_in_one_line(2, "run", tmp_path / "T", "--out", tmp_path / "RUN")
    diagnosis = json.loads(succeeds("diagnose", tmp_path / "T", "--json"))
    assert diagnosis["gains"] == []
    assert "8 launches of kernels, but no record of the device" in diagnosis["warnings"][0]


def test_a_job_on_processors_computes_on_its_threads(tmp_path):
    """Calls of the profiler itself at its end are no launches."""
    made = Profile()
    for number in range(4):
        begin = START + 1000 * number
        made.step(number, begin, 990)
        made.op("aten::mm", begin + 5, 900)
    made.call("cudaDeviceSynchronize", START + 3991, 5)
    read([made.write(tmp_path / "rank0.json")]).save(tmp_path / "T")
    assert json.loads(succeeds("replay", tmp_path / "T", "--json"))["breakdown_us"]["compute"] > 900


def test_lost_records_of_a_device_are_counted(tmp_path):
    made = Profile()
    for number in range(5):
        begin = START + 1000 * number
        made.step(number, begin, 990)
        for place in range(4):
            made.kernel("gemm", begin + 20 + 200 * place, 180, launched=begin + 5 + place)
    kernels = [record for record in made.records if record["cat"] == "kernel"]
    whole = read([made.write(tmp_path / "whole.json")])
    made.records = [record for record in made.records if record is not kernels[6]]
    lossy = read([made.write(tmp_path / "lossy.json")])
    assert not any("have no record of the device" in warning for warning in whole.meta.warnings)
    assert any("1 of 20 launches of kernels have no record" in warning for warning in lossy.meta.warnings)
