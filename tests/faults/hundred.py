"""A hundred kills of each kind, too many for every change: ``python -m tests.faults.hundred KIND... [--python PYTHON]``.

KIND: ``run``, ``workers`` (the same with two worker processes), ``storage`` (with an SQLite study), ``import``, ``export``,
``fit``, ``report``, ``replay``, ``describe``, ``diagnose``, ``diff``, ``doctor``, ``samples``. With the PYTHON of an environment
made by ``scripts/make_env.sh torch``: ``capture``, and ``collect`` and ``validate``, which record and run a small job on shaped
hosts (root). For each kind a line, a JSON object, has the kills that were made and what they met; an AssertionError says what was
found broken. With other seeds, several calls make one campaign.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from tests.faults.kills import (
    READERS,
    WRITERS,
    Kills,
    kill_captures,
    kill_readers,
    kill_recordings,
    kill_searches,
    kill_searches_with_workers,
    kill_shared_searches,
    kill_validations,
    kill_writers,
)
from tests.faults.processes import ROOT, succeeds

COLLECT = (
    *("--framework", "pytorch", "--comm", "ddp", "--hosts", 2, "--rate", "1gbit"),
    *("--warmup", 2, "--untraced", 3, "--traced", 3),
)


JOBS = ("capture", "collect", "validate")  # need a framework
KINDS = {"run": kill_searches, "workers": kill_searches_with_workers, "storage": kill_shared_searches}


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill commands with SIGKILL, again and again.")
    parser.add_argument(
        "kinds",
        nargs="+",
        choices=(*KINDS, *WRITERS, *READERS, *JOBS),
        metavar="KIND",
        help=", ".join((*KINDS, *WRITERS, *READERS, *JOBS)),
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="make fewer kills of a kind when this time is over")
    parser.add_argument("--python", help="for capture, collect and validate")
    options = parser.parse_args()
    if options.python is None and set(options.kinds) & set(JOBS):
        parser.error("capture, collect and validate: name the --python of an environment with PyTorch")
    for kind in options.kinds:
        kills = Kills(wanted=options.kills, seed=options.seed, seconds=options.seconds)
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="dpro-search-kills-") as name:
            make(kind, Path(name), kills, (options.python, ROOT / "tests" / "integration" / "planned_ddp_job.py"))
        row = {"kind": kind, "seed": options.seed, **kills.tally, "seconds": round(time.monotonic() - started)}
        print(json.dumps(row), flush=True)


def make(kind: str, folder: Path, kills: Kills, job: tuple[object, ...]) -> None:
    if kind in KINDS:
        KINDS[kind](folder, kills)
    elif kind in WRITERS:
        kill_writers(folder, kills, writer=WRITERS[kind])
    elif kind in READERS:
        kill_readers(folder, kills, verb=kind)
    elif kind == "capture":
        kill_captures(folder, kills, python=job[0])
    elif kind == "collect":
        kill_recordings(folder, kills, collect=COLLECT, job=job)
    else:
        succeeds("collect", *COLLECT, "--out", folder / "trace", "--", *job)
        kill_validations(folder, kills, job=job, options=("--warmup", 2))


if __name__ == "__main__":
    main()
