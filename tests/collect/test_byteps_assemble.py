"""Traces of recorded BytePS jobs: a real recording of two workers and two servers, whole and damaged."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from importer_kit import FUZZ, check_trace, plain

from dpro_search.collect.assemble.byteps import assemble_byteps
from dpro_search.collect.trace import EventKind, Trace
from dpro_search.errors import DproSearchError, InputError, TraceFormatError
from dpro_search.space.servers.byteps_job import hash_of
from tests.recordings import DATA

RECORDING = "byteps_mlp"
RAW = DATA / RECORDING
FILES = sorted(path.relative_to(RAW) for path in RAW.rglob("*") if path.is_file() and path.name != "log")
WORKERS, SERVERS, TENSORS, TRACED = 2, 2, 6, (6, 7)


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(RAW, folder / "raw", dirs_exist_ok=True))


def test_the_trace_holds_what_ran(trace):
    check_trace(trace)
    assert (trace.meta.format, trace.meta.comm, trace.meta.ranks) == ("mxnet-byteps", "byteps", WORKERS + SERVERS)
    assert trace.meta.knobs["BYTEPS_PARTITION_BYTES"] == "8192"
    comm = trace.events.select(trace.events.kind == EventKind.COMM)
    assert len(comm) == WORKERS * len(TRACED) * TENSORS
    assert set(comm.step.tolist()) == set(TRACED)
    assert set(trace.steps.index[trace.steps.traced].tolist()) == set(TRACED)
    assert set(trace.steps.rank.tolist()) == set(range(WORKERS + SERVERS))


def test_gradients_have_their_names_sizes_and_declared_keys(trace):
    assert {tensor.name: tensor.size_bytes for tensor in trace.tensors} == {
        "dense0_bias": 384, "dense0_weight": 12_288, "dense1_bias": 384, "dense1_weight": 36_864, "dense2_bias": 40,
        "dense2_weight": 3840,
    }  # fmt: skip
    keys = [int(tensor.node.removeprefix("key")) for tensor in trace.tensors]
    assert keys == sorted(set(keys))


def test_a_tensor_goes_in_partitions_of_the_recorded_size(trace):
    pushes = {trace.names[name] for name in trace.events.name if trace.names[name].endswith(" PUSH")}
    assert sum(name.startswith("dense1_weight[") for name in pushes) == -(-36_864 // 8192)
    assert sum(name.startswith("dense0_weight[") for name in pushes) == -(-12_288 // 8192)


def test_each_server_worked_on_the_keys_that_the_hash_sends_it(trace):
    work = trace.events.select((trace.events.kind == EventKind.SERVER) & (trace.events.tensor >= 0))
    assert set(work.rank.tolist()) == {WORKERS, WORKERS + 1}
    for name, rank, tensor in zip(work.name, work.rank, work.tensor, strict=True):
        part = int(trace.names[name].rpartition("[")[2].partition("]")[0])
        declared = int(trace.tensors[tensor].node.removeprefix("key"))
        assert hash_of((declared << 16) + part, "djb2") % SERVERS == rank - WORKERS


def test_every_operator_belongs_to_a_traced_step_equally_often(trace):
    ops = trace.events.select((trace.events.kind == EventKind.KERNEL) & (trace.events.rank == 0))
    assert set(ops.step.tolist()) == set(TRACED)
    by_step = [np.bincount(ops.name[ops.step == step], minlength=len(trace.names)) for step in TRACED]
    assert (by_step[0] == by_step[1]).all()


def test_the_cpu_time_of_looking_for_work_is_communications(trace):
    servers = trace.steps.rank >= WORKERS
    assert (trace.steps.comm_cpu_us >= 0).all()
    assert (trace.steps.compute_cpu_us[servers] >= 0).all()
    assert trace.steps.comm_cpu_us[servers].sum() > 0


def test_a_trace_survives_saving(trace, tmp_path):
    trace.save(tmp_path / "trace")
    loaded = Trace.load(tmp_path / "trace")
    assert loaded.meta == trace.meta
    assert (loaded.events.tensor == trace.events.tensor).all()


def test_logs_of_messages_and_servers_may_be_missing(tmp_path):
    raw = copied(tmp_path)
    for path in [*raw.rglob("*.log.gz"), *raw.rglob("log")]:
        path.unlink()
    trace = assemble_byteps(raw)
    assert not (trace.events.kind == EventKind.SERVER).any()
    assert trace.meta.ranks == WORKERS + SERVERS


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("job.json", r"job.json: missing: make a raw folder with 'dpro-search collect --keep-raw'"),
        ("rank1/hook.json", r"rank1/hook.json: missing: no step of a DistributedTrainer was seen"),
        ("rank1/0/comm.json.gz", r"comm.json: missing: the job must run at least two steps after the traced ones"),
        ("rank0/worker.json.gz", r"worker.json: cannot be read"),
        ("server0/cpu.json", r"cpu.json: missing"),
    ],
)
def test_a_missing_file_is_named(tmp_path, missing, message):
    raw = copied(tmp_path)
    (raw / missing).unlink()
    with pytest.raises(InputError, match=message):
        assemble_byteps(raw)


def test_files_of_another_kind_of_job_are_refused(tmp_path):
    raw = copied(tmp_path)
    job = json.loads((raw / "job.json").read_text())
    (raw / "job.json").write_text(json.dumps(job | {"format": "mxnet-kvstore"}))
    with pytest.raises(InputError, match="of 'mxnet-kvstore', not of mxnet-byteps"):
        assemble_byteps(raw)


def test_gradients_that_the_trainer_has_not_are_refused(tmp_path):
    raw = copied(tmp_path)
    path = raw / "rank0" / "0" / "comm.json.gz"
    path.write_bytes(gzip.compress(plain(path).replace(b"gradient_5", b"gradient_77")))
    with pytest.raises(TraceFormatError, match="gradients that the Trainer has not"):
        assemble_byteps(raw)


@pytest.mark.parametrize(("compression", "warnings"), [("", 0), ("fp16", 0), ("onebit", 1)])
def test_how_gradients_were_compressed_is_a_knob(tmp_path, compression, warnings):
    raw = copied(tmp_path)
    for path in sorted(raw.glob("rank*/hook.json")):
        hook = json.loads(path.read_text())
        hook["kvstore"]["compression"] = compression
        path.write_text(json.dumps(hook))
    meta = assemble_byteps(raw).meta
    assert meta.knobs.get("compression", "") == compression
    assert sum("replays take them to be sent whole" in warning for warning in meta.warnings) == warnings


def assembled_or_one_line(raw: Path) -> Trace | str:
    try:
        return assemble_byteps(raw)
    except DproSearchError as error:
        return str(error)


@FUZZ
@given(which=st.sampled_from(FILES), data=st.data())
def test_damaged_files_are_read_or_refused_in_one_line(tmp_path_factory, which, data):
    raw = copied(tmp_path_factory.mktemp("damaged"))
    content = bytearray(plain(raw / which))
    if data.draw(st.booleans(), "cut"):
        del content[data.draw(st.integers(0, max(len(content) - 1, 0)), "at") :]
    for _ in range(data.draw(st.integers(0, 3), "flips")):
        if content:
            content[data.draw(st.integers(0, len(content) - 1), "byte")] ^= data.draw(st.integers(1, 255), "bits")
    (raw / which).write_bytes(gzip.compress(bytes(content)) if which.suffix == ".gz" else bytes(content))
    result = assembled_or_one_line(raw)
    if isinstance(result, Trace):
        check_trace(result)
    else:
        assert "\n" not in result
