"""Small files that unpack to more than the memory holds: one line of error, and nothing of them is kept."""

import gzip
import zlib
from pathlib import Path

import msgspec
import pytest

from dpro_search.collect.clusters.table import TableHeader
from dpro_search.collect.communication.table import KIND, TABLE_VERSION
from dpro_search.collect.readers._bytes import MOST_TABLE_BYTES, read_whole
from dpro_search.errors import TraceFormatError
from tests.faults.processes import SEARCH, fails_in_one_line, shown

PIECE = bytes([10]) * 2**20
TOO_LARGE = f"more than {MOST_TABLE_BYTES / 2**30:g} GiB when unpacked"


def bomb(path: Path, head: bytes) -> Path:
    """A file of one compressed stream that begins as `head` and goes on with more empty lines than any table may have."""
    packed = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16)
    with path.open("wb") as file:
        file.write(packed.compress(head + b"\n"))
        for _ in range(MOST_TABLE_BYTES // len(PIECE)):
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
    error = fails_in_one_line(2, *SEARCH, 5, "--with", "precision", "--precision-table", all_reduces, "--out", tmp_path / "run")
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
    error = fails_in_one_line(2, *SEARCH, 5, *options, folder, "--out", tmp_path / "run")
    assert str(folder / name) in error
    assert shown(tmp_path) == ["given"]
