"""A disk that is full, fills up, or is read-only: one line of error, nothing half-written, and the next call works."""

import pytest

from dpro_search.search import SearchResult
from dpro_search.space.plan import Plan
from tests.faults.disks import fill, mount, small_disk
from tests.faults.processes import RAW, SEARCH, fails_in_one_line, shown, succeeds
from tests.recordings import FEW_CLUSTERS

pytestmark = [pytest.mark.integration, pytest.mark.one_core]  # needs root, for a file system of its own

TRIALS = 300
COMMANDS = {
    "fit": (("fit", FEW_CLUSTERS, "--out"), "model"),
    "import": (("import", RAW, "--out"), "trace"),
    "replay": (("replay", "--perfetto"), "timeline.json"),
    "report": (("report", "--out"), "page.html"),
    "run": ((*SEARCH, TRIALS, "--out"), "run"),
}


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk") as place:
        yield place


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_full_disk(verb, disk):
    args, name = COMMANDS[verb]
    filler = fill(disk)
    error = fails_in_one_line(1, *args, disk / name)
    assert str(disk / name) in error
    assert "No space left on device" in error
    assert [path.name for path in disk.iterdir() if path.is_file()] == ["filler"]
    filler.unlink()
    succeeds(*args, disk / name)
    assert name in shown(disk)


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_read_only_disk(verb, disk):
    args, name = COMMANDS[verb]
    assert mount("-o", "remount,ro", disk).returncode == 0
    error = fails_in_one_line(1, *args, disk / name)
    assert str(disk / name) in error
    assert "Read-only file system" in error
    assert mount("-o", "remount,rw", disk).returncode == 0
    assert list(disk.iterdir()) == []
    succeeds(*args, disk / name)


def test_a_search_on_a_disk_that_fills_up_keeps_what_it_had_and_goes_on_when_there_is_room(disk):
    succeeds(*SEARCH, TRIALS, "--out", disk.parent / "whole")
    filler = fill(disk, but_bytes=40_000)
    error = fails_in_one_line(1, *SEARCH, TRIALS, "--out", disk / "run")
    assert "run the same command to continue" in error
    kept = (disk / "run" / "trials.jsonl").read_bytes()
    whole = (disk.parent / "whole" / "trials.jsonl").read_bytes()
    assert kept
    assert whole.startswith(kept[: kept.rfind(b"\n") + 1])
    filler.unlink()
    succeeds(*SEARCH, TRIALS, "--out", disk / "run")
    assert (disk / "run" / "trials.jsonl").read_bytes() == whole
    assert SearchResult.load(disk / "run").plans == SearchResult.load(disk.parent / "whole").plans


def test_an_export_to_a_full_disk_leaves_nothing(disk, tmp_path):
    (tmp_path / "plan.json").write_bytes(Plan(tensor_groups=(("a#0", "b#1"),)).to_json())
    filler = fill(disk)
    error = fails_in_one_line(1, "export", tmp_path / "plan.json", "--out", disk / "tuned")
    assert str(disk / "tuned") in error
    assert [path.name for path in disk.iterdir()] == ["filler"]
    filler.unlink()
    succeeds("export", tmp_path / "plan.json", "--out", disk / "tuned")


def test_a_study_on_a_full_disk_is_one_line_and_the_search_goes_on_when_there_is_room(disk, tmp_path):
    search = (*SEARCH, 5, "--out", tmp_path / "run", "--storage", f"sqlite:///{disk / 'study.db'}", "--quiet")
    filler = fill(disk)
    assert "study.db" in fails_in_one_line(1, *search)
    filler.unlink()
    succeeds(*search)


def test_a_diagnosis_needs_no_room(disk):
    fill(disk)
    succeeds("diagnose", cwd=disk)
