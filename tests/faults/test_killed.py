"""A hundred kills with SIGKILL at random points: nothing half-written, nothing lost, the next call works."""

import json
import random
import time
from pathlib import Path

import pytest

from dpro_search.collect.trace import Trace
from dpro_search.search import SearchResult
from tests.faults.processes import RAW, SEARCH, killed_after, shown, succeeds

pytestmark = pytest.mark.integration  # for its three minutes; it needs no framework

KILLED_SEARCHES, MORE_TRIALS = 40, 10
KILLED_OTHERS = 20


def test_a_search_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(tmp_path):
    chance = random.Random(1)
    everything = MORE_TRIALS * KILLED_SEARCHES
    started = time.monotonic()
    succeeds(*SEARCH, everything, "--out", "whole", cwd=tmp_path)
    seconds = time.monotonic() - started
    reference = (tmp_path / "whole" / "trials.jsonl").read_bytes()
    journal, seen = tmp_path / "killed" / "trials.jsonl", b""
    for number in range(KILLED_SEARCHES):
        killed_after(chance.uniform(0, seconds), *SEARCH, MORE_TRIALS * (number + 1), "--out", "killed", cwd=tmp_path)
        found = journal.read_bytes() if journal.is_file() else b""
        found = found[: found.rfind(b"\n") + 1]  # a last line may be cut off
        assert reference.startswith(found)
        assert found.startswith(seen), "what was written down before is there still"
        seen = found
    succeeds(*SEARCH, everything, "--out", "killed", cwd=tmp_path)
    assert journal.read_bytes() == reference
    assert SearchResult.load(tmp_path / "killed").plans == SearchResult.load(tmp_path / "whole").plans


def check_trace(path: Path) -> None:
    assert Trace.load(path).meta.ranks == 2


def check_page(path: Path) -> None:
    assert path.read_text().endswith("</html>\n")


def check_timeline(path: Path) -> None:
    assert json.loads(path.read_bytes())["traceEvents"]


@pytest.mark.parametrize(
    ("args", "name", "check"),
    [
        (("import", RAW, "--out"), "trace", check_trace),
        (("report", "--out"), "page.html", check_page),
        (("replay", "--perfetto"), "timeline.json", check_timeline),
    ],
    ids=["import", "report", "replay"],
)
def test_what_a_killed_command_writes_is_whole_or_not_there(args, name, check, tmp_path):
    chance = random.Random(2)
    started = time.monotonic()
    succeeds(*args, tmp_path / "whole")
    seconds = time.monotonic() - started
    for number in range(KILLED_OTHERS):
        out = tmp_path / f"{number}-{name}"
        killed_after(chance.uniform(0, seconds), *args, out)
        assert shown(tmp_path) in (["whole"], sorted([out.name, "whole"]))
        if out.exists():
            check(out)
            out.rename(tmp_path / f".{number}")
    succeeds(*args, tmp_path / name)
    check(tmp_path / name)
