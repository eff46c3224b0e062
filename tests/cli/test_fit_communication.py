"""`dpro-search fit` on recorded jobs and tables of all-reduces."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from dpro_search.collect.tables.all_reduces import AllReduceRow, CommHeader, CommTable, read_comm_table, write_comm_table
from dpro_search.costmodel.collectives.model_file import CommunicationModel
from dpro_search.errors import InputError
from tests.in_process import dpro
from tests.sample import horovod_trace_path

CLUSTERS = Path(__file__).resolve().parents[1] / "data" / "xla_clusters.jsonl.gz"


def fit(*arguments):
    return dpro("fit", *arguments)


def table(path: Path) -> Path:
    header = CommHeader(machine="m", cores=2, versions={}, started_at="2026-01-01")
    rows = tuple(
        AllReduceRow(
            backend="gloo", algorithm="ring", ranks=2, size_bytes=size, rounds_us=(100 + size / 100,), calls=1, sent_bytes=size
        )
        for size in (1024, 4096, 65536, 1 << 20, 1 << 22, 1 << 24)
    )
    write_comm_table(path, CommTable(header=header, rows=rows, dropped={}))
    return path


def test_a_trace_and_a_table_give_a_model_with_a_series_each(tmp_path):
    done = fit(horovod_trace_path(), table(tmp_path / "t.jsonl"), "--out", tmp_path / "model", "--json")
    assert done.returncode == 0, done.stderr
    entries = json.loads(done.stdout)["models"]
    assert [entry["name"] for entry in entries] == ["gloo in a job", "gloo ring"]
    for entry in entries:
        assert entry["rows"] > 0
        assert entry["mape_pct"] >= 0
        assert 0 <= entry["coverage"] <= 1
    loaded = CommunicationModel.load(tmp_path / "model")
    assert [one.mape_pct for one in loaded.info.series] == [entry["mape_pct"] for entry in entries]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """The folder of a model, with what the command printed."""
    folder = tmp_path_factory.mktemp("fitted")
    done = fit(table(folder / "t.jsonl"), "--out", folder / "model")
    assert done.returncode == 0, done.stderr
    return folder / "model", done.stdout


def test_people_get_a_table_of_scores(fitted):
    for word in ("gloo ring", "formula", "ring"):
        assert word in fitted[1]


def noise(path: Path) -> Path:
    """A table whose durations have nothing to do with the sizes."""
    measured = read_comm_table(table(path))
    rows = tuple(
        msgspec.structs.replace(row, algorithm="smoke", backend="mpi", rounds_us=(us,))
        for row, us in zip(measured.rows, (1e6, 100.0, 1e5, 50.0, 3e6, 200.0), strict=True)
    )
    write_comm_table(path, CommTable(header=measured.header, rows=rows, dropped={}))
    return path


def test_a_useless_model_is_a_failure_and_not_written(tmp_path):
    done = fit(noise(tmp_path / "noise.jsonl"), "--out", tmp_path / "model")
    assert done.returncode == 1
    assert "no model was written: 'mpi smoke' is wrong by " in done.stderr
    assert not (tmp_path / "model").exists()


def test_a_useless_series_is_left_out_of_the_model(tmp_path):
    done = fit(noise(tmp_path / "noise.jsonl"), table(tmp_path / "t.jsonl"), "--out", tmp_path / "model", "--json")
    assert done.returncode == 1
    assert "left out of the model: 'mpi smoke' is wrong by " in done.stderr
    assert {one["name"]: one["useful"] for one in json.loads(done.stdout)["models"]} == {"gloo ring": True, "mpi smoke": False}
    assert list(CommunicationModel.load(tmp_path / "model").costs) == ["gloo ring"]


def test_a_useless_model_of_before_is_not_used(fitted, tmp_path):
    path = shutil.copytree(fitted[0], tmp_path / "model") / "communication.json"
    content = json.loads(path.read_bytes())
    content["series"][0]["mape_pct"] = 367.0
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="is wrong by 367 %"):
        CommunicationModel.load(tmp_path / "model")


def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    measured = table(tmp_path / "t.jsonl")
    for arguments in (
        (tmp_path, "--out", tmp_path / "m"),
        (measured, CLUSTERS, "--out", tmp_path / "m"),
        (measured, "--out", tmp_path),
        (measured, "--collect", "comm", "--out", tmp_path / "n"),
        ("--collect", "comm", "--backends", "smoke", "--out", tmp_path / "n"),
        ("--collect", "comm", "--backends", "mpi:smoke", "--out", tmp_path / "n"),
        ("--collect", "comm", "--ranks", "two", "--out", tmp_path / "n"),
        ("--collect", "comm", "--ranks", "1", "--out", tmp_path / "n"),
        ("--collect", "comm", "--rates", "fast", "--out", tmp_path / "n"),
    ):
        done = fit(*arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert len(done.stderr.strip().splitlines()) == 1
        assert not (tmp_path / "m").exists()


def test_collecting_without_an_interpreter_says_how_to_get_one(tmp_path):
    done = fit("--collect", "comm", "--backends", "gloo", "--out", tmp_path / "t", "--python", tmp_path / "nothing")
    assert done.returncode == 1
    assert "make_env.sh torch" in done.stderr
