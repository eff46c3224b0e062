"""The end of a job with Horovod's timeline: its calmed writer writes what is left, however long it has to wait for a core."""

from __future__ import annotations

import importlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dpro_search.runtime import HOOKS


class SpentTime:
    """Stands for `ThreadClock`: the writer's time on a core, as the test says."""

    spent_ns: int | None = 0

    def of(self, tid: str) -> int | None:
        return self.spent_ns


@pytest.fixture
def let_write(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(HOOKS)
    return importlib.import_module("dpro_search_horovod").let_write


def test_a_writer_that_gets_no_core_is_waited_for(let_write: Any, tmp_path: Path) -> None:
    timeline, clock = tmp_path / "timeline.json", SpentTime()
    timeline.write_text("[")

    def writes() -> None:
        time.sleep(0.7)
        timeline.write_text("[the last all-reduce]")
        time.sleep(0.1)
        clock.spent_ns = 10**9

    writer = threading.Thread(target=writes)
    writer.start()
    let_write(str(timeline), clock, {"0"})
    assert clock.spent_ns == 10**9
    writer.join()


def test_a_writer_that_has_ended_is_not_waited_for(let_write: Any, tmp_path: Path) -> None:
    clock, start = SpentTime(), time.monotonic()
    clock.spent_ns = None
    let_write(str(tmp_path / "timeline.json"), clock, {"0"})
    assert time.monotonic() < start + 10
