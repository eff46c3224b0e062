"""Reads the losses that a training script prints, for `dpro-search validate`; Python imports this when its folder is on PYTHONPATH.

A line with "loss" followed by a number has one: ``step 3 loss 4.605``, ``loss: 4.605``, ``{'loss': 4.605}``. The first losses
that a process prints are appended to ``loss-<rank>-<process id>`` in the folder that DPRO_SEARCH_REPORT names, a line each.
Another `sitecustomize` further down the path still runs. Standard library only; Python 3.8 and later.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

MOST = 20  # losses of a process
_NUMBER = r"[-+]?(?:0x[0-9a-f.]+p[-+]?\d+|\d+(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|nan|inf)"
_LOSS = re.compile(rf"""(?<![a-z])loss(?:es)?['"]?[\s:=(\[]{{1,4}}({_NUMBER})""", re.IGNORECASE)
_LONGEST_LINE = 4096
_RANKS = ("DPRO_SEARCH_HOOK_RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK", "DMLC_WORKER_ID")


class _Read:
    """A stream that reads the lines that pass through it."""

    def __init__(self, stream: Any, report: _Report) -> None:
        self._stream = stream
        self._report = report
        self._line = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        if self._report.left > 0:
            *lines, self._line = (self._line + text).split("\n")
            self._line = self._line[-_LONGEST_LINE:]
            for line in lines:
                self._report.read(line)
        return self._stream.write(text)


class _Report:
    """The file of a process; `left` is how many losses it still takes."""

    def __init__(self, folder: str) -> None:
        rank = next((os.environ[name] for name in _RANKS if os.environ.get(name, "").isdigit()), "0")
        self._path = Path(folder, f"loss-{int(rank):05d}-{os.getpid()}")
        self.left = MOST

    def read(self, line: str) -> None:
        match = _LOSS.search(line)
        if match and self.left > 0:
            self.left -= 1
            try:
                with self._path.open("a") as file:
                    file.write(f"{match[1]}\n")
            except OSError:  # the job must not fail: validate reports that there are no losses
                self.left = 0


def _run_shadowed() -> None:
    """Run the next module of this name on the path; those before it have run, for one of them came here."""
    here = Path(__file__).resolve().parent
    places = [Path(entry or ".").resolve() for entry in sys.path]
    behind = sys.path[places.index(here) + 1 :] if here in places else []
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_shadowed()

if os.environ.get("DPRO_SEARCH_REPORT"):
    _report = _Report(os.environ["DPRO_SEARCH_REPORT"])
    sys.stdout, sys.stderr = _Read(sys.stdout, _report), _Read(sys.stderr, _report)

if os.environ.get("DPRO_SEARCH_OBSERVER", "").startswith("timed:"):
    import dpro_search_timed

    dpro_search_timed.install()
