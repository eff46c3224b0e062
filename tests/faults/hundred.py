"""A hundred kills of one kind, which are too many for every change: ``python -m tests.faults.hundred KIND [--python PYTHON]``.

KIND: ``run``, ``workers`` (the same with two worker processes), ``import``, ``report``, ``replay``; ``collect`` and ``validate``
record and run a small PyTorch job on shaped hosts, with the PYTHON of an environment made by ``scripts/make_env.sh torch`` (root).
The last line is a JSON object with the kills that were made and what they met; an AssertionError says what was found broken. With
other seeds, several calls make one campaign.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from tests.faults.kills import (
    WRITERS,
    Kills,
    kill_recordings,
    kill_searches,
    kill_searches_with_workers,
    kill_validations,
    kill_writers,
)
from tests.faults.processes import ROOT, succeeds

COLLECT = (
    *("--framework", "pytorch", "--comm", "ddp", "--hosts", 2, "--rate", "1gbit"),
    *("--warmup", 2, "--untraced", 3, "--traced", 3),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill one kind of command with SIGKILL, again and again.")
    parser.add_argument("kind", choices=("run", "workers", *WRITERS, "collect", "validate"))
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="make fewer kills when this time is over")
    parser.add_argument("--python", help="for collect and validate")
    asked = parser.parse_args()
    if asked.kind in ("collect", "validate") and asked.python is None:
        parser.error(f"{asked.kind}: name the --python of an environment with PyTorch")
    job = (asked.python, ROOT / "tests" / "integration" / "planned_ddp_job.py")
    kills = Kills(wanted=asked.kills, seed=asked.seed, seconds=asked.seconds)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dpro-search-kills-") as name:
        folder = Path(name)
        if asked.kind == "run":
            kill_searches(folder, kills)
        elif asked.kind == "workers":
            kill_searches_with_workers(folder, kills)
        elif asked.kind == "collect":
            kill_recordings(folder, kills, collect=COLLECT, job=job)
        elif asked.kind == "validate":
            succeeds("collect", *COLLECT, "--out", folder / "trace", "--", *job)
            kill_validations(folder, kills, job=job, options=("--warmup", 2))
        else:
            kill_writers(folder, kills, verb=asked.kind)
    print(json.dumps({"kind": asked.kind, "seed": asked.seed, **kills.tally, "seconds": round(time.monotonic() - started)}))


if __name__ == "__main__":
    main()
