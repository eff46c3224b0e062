"""The file that `synchronise(..., record=PATH)` writes: a line of JSON for each worker of a run, appended when it leaves.

Workers of one machine may share the file. Lines of several machines and runs may be put into one file in any order: a line names
its run. `dpro_search.kinds.synchronised` reads them.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

FORMAT, VERSION = "dpro-search-synchronisation", 1
SEED_VARIABLE = "DPRO_SEARCH_SEED"


class RecordedCommit(NamedTuple):
    """One commit of a worker.

    Attributes
    ----------
    time_s
        When it was applied, since the job's start.
    steps, weight
        Local steps in it, and the factor of each.
    behind_steps
        Steps of others that were applied since the worker had received the model, each times its weight.
    loss
        Mean training loss of its steps; None: the script gave none.
    took_s, waited_s
        Of the worker, without what it waited for others, and that. Of an all-reduce only the sum is known: it is in `took_s`.
    """

    time_s: float
    steps: int
    weight: float
    behind_steps: float
    loss: float | None
    took_s: float
    waited_s: float


def write_record(path: Path, **facts: Any) -> None:
    """Append the line of a worker: ``run``, ``scheme``, ``worker``, ..., and its ``commits`` as `RecordedCommit`."""
    commits = [[*map(_short, commit)] for commit in facts.pop("commits")]
    line = {"format": FORMAT, "version": VERSION, "seed": os.environ.get(SEED_VARIABLE), **facts, "commits": commits}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line) + "\n")


def _short(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")
