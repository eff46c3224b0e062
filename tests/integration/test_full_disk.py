"""`collect` and `validate` on a full disk: one line of error, no process is left, nothing is lost, the next call works."""

import json
import os

import pytest

from dpro_search.collect.trace import Trace
from tests.faults.disks import fill, small_disk
from tests.faults.hundred import COLLECT
from tests.faults.processes import ROOT, dpro, succeeds

pytestmark = [
    pytest.mark.integration,
    pytest.mark.one_core,
    pytest.mark.skipif(os.geteuid() != 0, reason="shaped hosts and small file systems need root"),
]
ROOM_BYTES = 16_384  # less than raw files need; on a folder without any room Python chooses another for temporary files
DDP = ROOT / "tests" / "integration" / "planned_ddp_job.py"


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "32m") as place:
        yield place


@pytest.fixture(scope="module")
def recorded(torch_python, tmp_path_factory):
    """A trace of a small job, and the search of it."""
    folder = tmp_path_factory.mktemp("recorded")
    succeeds("collect", *COLLECT, "--out", folder / "trace", "--", torch_python, DDP)
    succeeds("run", folder / "trace", "--trials", 30, "--out", folder / "run")
    return folder


def refused(*args, **env):
    """The last line of a command that fails for lack of room; progress may come before it."""
    done = dpro(*args, **env)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr.splitlines()[-1]
    return done.stderr.splitlines()[-1]


def left_of_ours(folder):
    """A framework may leave a cache of its own in a folder for temporary files."""
    return list(folder.glob("*dpro-search*"))


def test_a_recording_that_the_disk_does_not_take(torch_python, disk):
    command = ("collect", *COLLECT, "--out", disk / "trace", "--", torch_python, DDP)
    filler = fill(disk)
    assert str(disk / "trace") in refused(*command)
    assert [path.name for path in disk.iterdir()] == ["filler"]
    filler.unlink()
    succeeds(*command)
    assert Trace.load(disk / "trace").meta.ranks == 2


def test_a_recording_whose_raw_files_the_disk_does_not_take(torch_python, disk, tmp_path):
    command = ("collect", *COLLECT, "--out", tmp_path / "trace", "--", torch_python, DDP)
    filler = fill(disk, but_bytes=ROOM_BYTES)
    refused(*command, TMPDIR=str(disk))
    assert left_of_ours(disk) == []
    assert not (tmp_path / "trace").exists()
    filler.unlink()
    assert dpro(*command, TMPDIR=str(disk)).returncode == 0
    assert left_of_ours(disk) == []


def test_a_validation_that_the_disk_does_not_take(recorded, torch_python, disk):
    succeeds("run", recorded / "trace", "--trials", 30, "--out", disk / "run")
    command = ("validate", disk / "run", "--top", 1, "--warmup", 2, "--", torch_python, DDP)
    before = {path.name: path.read_bytes() for path in (disk / "run").iterdir() if path.is_file()}
    filler = fill(disk)
    assert str(disk / "run") in refused(*command)
    assert {path.name: path.read_bytes() for path in (disk / "run").iterdir() if path.is_file()} == before
    filler.unlink()
    succeeds(*command)
    assert json.loads((disk / "run" / "validation.json").read_bytes())["rounds"] == 2


def test_a_validation_whose_runs_the_disk_does_not_take(recorded, torch_python, disk):
    command = ("validate", recorded / "run", "--top", 1, "--warmup", 2, "--", torch_python, DDP)
    filler = fill(disk, but_bytes=ROOM_BYTES)
    refused(*command, TMPDIR=str(disk))
    assert left_of_ours(disk) == []
    assert not (recorded / "run" / "validation.json").exists()
    filler.unlink()
    assert dpro(*command, TMPDIR=str(disk)).returncode == 0
