"""Small files that unpack to more than the memory holds: one line of error, and nothing of them is kept."""

import gzip
import shutil
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import msgspec
import pytest

from dpro_search.cli import main
from dpro_search.collect.readers._bytes import MOST_TABLE_BYTES, read_whole
from dpro_search.collect.readers.importers import import_trace
from dpro_search.collect.tables.all_reduces import KIND, TABLE_VERSION
from dpro_search.collect.tables.clusters import TableHeader
from dpro_search.collect.trace import Trace
from dpro_search.errors import TraceFormatError
from tests.every_case import every_case
from tests.faults.processes import SEARCH, shown
from tests.in_process import fails_in_one_line
from tests.sample import HOROVOD_SAMPLE, horovod_trace_path

PIECE = bytes([10]) * 2**20
TOO_LARGE = f"more than {MOST_TABLE_BYTES / 2**30:g} GiB when unpacked"


def bomb(path: Path, head: bytes, size: int = MOST_TABLE_BYTES) -> Path:
    """A file of one compressed stream that begins as `head` and goes on with empty lines, more than any table may have."""
    packed = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16)
    with path.open("wb") as file:
        file.write(packed.compress(head + b"\n"))
        for _ in range(size // len(PIECE)):
            file.write(packed.compress(PIECE))
        file.write(packed.flush())
    return path


@pytest.fixture(scope="module")
def all_reduces(tmp_path_factory) -> Path:
    """One that begins as a table of all-reduces does."""
    head = msgspec.json.encode(
        {"version": TABLE_VERSION, "kind": KIND, "machine": "", "cores": 2, "versions": {}, "started_at": ""}
    )
    return bomb(tmp_path_factory.mktemp("bomb") / "table.jsonl.gz", head)


@pytest.fixture(scope="module")
def clusters(tmp_path_factory) -> Path:
    """One that begins as a table of clusters does."""
    head = msgspec.json.encode(TableHeader(machine="", versions={}, started_at=""))
    return bomb(tmp_path_factory.mktemp("bomb") / "clusters.jsonl.gz", head)


def test_many_compressed_pieces_in_a_row_are_counted_together(tmp_path):
    piece = gzip.compress(PIECE)
    (tmp_path / "t.gz").write_bytes(piece * 4)
    assert read_whole(tmp_path / "t.gz", 5 * len(PIECE)) == PIECE * 4
    with pytest.raises(TraceFormatError, match="when unpacked"):
        read_whole(tmp_path / "t.gz", 3 * len(PIECE))


@pytest.mark.parametrize("name", ["all_reduces", "clusters"])
def test_fit_unpacks_no_table_of_any_size(name, tmp_path, request):
    table = request.getfixturevalue(name)
    assert table.stat().st_size < MOST_TABLE_BYTES / 100
    error = fails_in_one_line(2, "fit", table, "--out", tmp_path / "model")
    assert error.startswith(f"dpro-search: error: {table}: {TOO_LARGE}")
    assert shown(tmp_path) == []


def test_a_search_unpacks_no_precision_table_of_any_size(all_reduces, tmp_path):
    error = fails_in_one_line(
        2,
        *SEARCH,
        5,
        "--sample",
        HOROVOD_SAMPLE,
        "--with",
        "precision",
        "--precision-table",
        all_reduces,
        "--out",
        tmp_path / "run",
    )
    assert f"{all_reduces}: {TOO_LARGE}" in error
    assert shown(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "options"),
    [("model.json", ("--with", "op-fusion", "--cluster-model")), ("calibration.json", ("--calibrate",))],
)
def test_what_is_never_compressed_is_not_unpacked(name, options, all_reduces, tmp_path):
    folder = tmp_path / "given"
    folder.mkdir()
    (folder / name).write_bytes(all_reduces.read_bytes())
    error = fails_in_one_line(2, *SEARCH, 5, "--sample", HOROVOD_SAMPLE, *options, folder, "--out", tmp_path / "run")
    assert str(folder / name) in error
    assert shown(tmp_path) == ["given"]


HEADS = {
    "kineto": b'{"schemaVersion": 1, "traceEvents": [{"ph": "X", "cat": "kernel"},',
    "mxnet": b'{"traceEvents": [{"ph": "B", "cat": "MXNET_C_API"},',
    "byteps": b'{"traceEvents": [{"ph": "X", "name": "Comm.a", "cat": "Comm"},',
    "horovod": b'[{"ph": "M", "name": "process_name", "args": {"start_time_since_epoch_in_micros": 1}},',
    "chakra": b"\x08\n\x060.0.01\x05\x08\x01\x12\x01a",
    "xplane": b"\x0a\x10\x12\x0b/device:GPU:0",
    "runmetadata": b"\x0a\x20\x0a\x1e\x0a\x0b/device:CPU",
    "straggler-analysis": b"PAR1",
}


@every_case("name", HEADS)
def test_an_import_unpacks_no_more_than_a_traces_ratio(name, tmp_path):
    file = bomb(tmp_path / "trace.gz", HEADS[name], 128 * len(PIECE))
    with pytest.raises(TraceFormatError, match=rf"{file}: unpacks to more than 100 times its size, as no trace does"):
        import_trace([file])


def test_a_file_that_the_memory_does_not_hold_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "xplane.pb"
    path.write_bytes(bytes(10 * 2**20))
    monkeypatch.setattr("dpro_search.collect.readers._bytes.available_bytes", lambda: 32 * 2**20)
    with pytest.raises(TraceFormatError, match=r"xplane.pb: larger than the 4.0 MiB that can be read with the memory"):
        read_whole(path)


def test_the_limit_of_the_process_is_that_of_the_memory():
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31));"
    code += "from dpro_search.collect._memory import available_bytes; print(available_bytes())"
    available = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0 < available < 2**31


def test_a_trace_with_a_column_that_no_trace_has_is_read_without_it(tmp_path):
    """An unused column of 2 GB took 2 GB."""
    shutil.copytree(horovod_trace_path(), tmp_path / "trace")
    with zipfile.ZipFile(tmp_path / "trace" / "trace.npz", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("events.unused.npy", b"what no reader of arrays takes")
        with archive.open("unused.npy", "w", force_zip64=True) as entry:
            for _ in range(512):
                entry.write(bytes(2**20))
    tracemalloc.start()
    Trace.load(tmp_path / "trace")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 256 * 2**20


def test_lack_of_memory_is_one_line(monkeypatch, capsys):
    def fail(verb):
        raise MemoryError

    monkeypatch.setattr("dpro_search.cli._command_of", fail)
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert (ended.value.code, capsys.readouterr().err) == (
        1,
        "dpro-search: error: not enough memory; free some, or give a smaller input\n",
    )
