"""Runs the cases of the characterisation, one job for each scheme and number of workers, into a journal.

``DIR/characterised.jsonl``: a line of JSON for each case, and for each recorded computation of a worker; a campaign goes on where
it was interrupted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from dpro_search.collect._files import scratch_folder
from dpro_search.collect.launch.ranks import log_tail
from dpro_search.collect.this_machine import machine
from dpro_search.errors import DproSearchError, JobError
from experiments.allreduce.cases import BURSTS, Case, calls, cases, singles, sizes_of
from experiments.allreduce.networks import Step, networks, step_of
from experiments.allreduce.schemes import SCHEMES

_WARM_UP = 1  # step, after which DDP arranges its buckets
_MEASURED_S, _FEWEST, _MOST = 8.0, 2, 10  # of steps of a case
_SINGLE_STEPS = 3
_BURST_CALLS = 3
_TIMEOUT_S = 1800.0
_KERAS = Path(__file__).with_name("in_job") / "keras_networks.py"
Show = Callable[[str], None]


class Journal:
    """Finished cases and recorded computations, by key."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "characterised.jsonl"
        self.rows: dict[str, dict[str, Any]] = {}
        text = self._path.read_text() if self._path.is_file() else ""
        self._unfinished = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # cut off when the campaign was interrupted
            self.rows[row["key"]] = row

    def add(self, key: str, **facts: Any) -> None:
        """Append a row."""
        row = {"key": key, **facts, "machine": machine(), "at": datetime.now(UTC).isoformat(timespec="seconds")}
        self.rows[key] = row
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write("\n" * self._unfinished + json.dumps(row) + "\n")
        self._unfinished = False

    def compute_us(self, network: str, batch: int) -> float:
        """What one worker was recorded to compute for."""
        seconds = sorted(self.rows[single_key(network, batch)]["seconds"])
        return float(seconds[len(seconds) // 2]) * 1e6


def single_key(network: str, batch: int) -> str:
    """The key of a recorded computation."""
    return f"single network={network} batch={batch}"


def characterise(folder: Path, names: Sequence[str], workers: Sequence[int], show: Show) -> None:
    """Run what the journal lacks; a job that fails is reported, and others go on."""
    journal = Journal(folder)
    for network, batch in singles():
        if single_key(network, batch) not in journal.rows:
            show(f"one worker, {network}, batch {batch}")
            journal.add(single_key(network, batch), **_single(network, batch))
    todo = [case for name in names for case in cases(name) if case.workers in workers and case.key not in journal.rows]
    # By workers first: an early end leaves a comparison of all schemes.
    todo.sort(key=lambda case: case.workers)
    for (count, name), some in groupby(todo, key=lambda case: (case.workers, case.scheme)):
        listed = list(some)
        show(f"{name}, {count} workers, {len(listed)} cases")
        try:
            _run(journal, listed)
        except DproSearchError as error:
            show(f"{name}, {count} workers: {error}")


def _single(network: str, batch: int) -> dict[str, Any]:
    """Training of a network on one core, alone."""
    python = SCHEMES["horovod-mpi"].python()
    command = ["taskset", "-c", "0", python, str(_KERAS), "time", network, str(batch), str(_SINGLE_STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JobError(f"{network}, batch {batch}: {' | '.join(done.stderr.strip().splitlines()[-3:])}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {"network": network, "batch": batch, **found}


def _run(journal: Journal, some: Sequence[Case]) -> None:
    """One job; what it had finished before it failed is kept."""
    scheme, count, rate_bps = SCHEMES[some[0].scheme], some[0].workers, some[0].rate_bps
    orders = [_order(journal, case) for case in some]
    with scratch_folder("allreduce-") as folder:
        (folder / "cases.json").write_text(json.dumps(orders))
        try:
            scheme.start(count, folder, rate_bps, _TIMEOUT_S)
        except JobError as error:
            chief = folder / f"rank{scheme.hosts(count) - 1}" / "log"
            raise JobError(f"{error}; last output of the last process: {log_tail(chief)}") from error
        finally:
            for number, case in enumerate(some):
                path = folder / f"result-{number}.json"
                if path.is_file():
                    journal.add(case.key, **asdict(case), servers=scheme.servers(count), **_facts(orders[number], path))


def _order(journal: Journal, case: Case) -> dict[str, Any]:
    if not case.network:
        listed = sizes_of(case)
        sizes = {"sizes_bytes": listed, "calls": calls(listed)}
        return {"kind": "latency", **sizes, "bursts": BURSTS, "burst_calls": _BURST_CALLS}
    step = paced_step(journal, case)
    steps = min(max(int(_MEASURED_S * 1e6 / step.compute_us), _FEWEST), _MOST)
    return {"kind": "training", "waits_us": step.waits_us, "moments": step.moments, "warm_up": _WARM_UP, "steps": steps}


def paced_step(journal: Journal, case: Case) -> Step:
    """The step of one worker of a case that is to be run."""
    return step_of(networks()[case.network], journal.compute_us(case.network, case.batch))


def measured_step(journal: Journal, case: Case) -> Step:
    """The step of one worker of a case as it was run; raises `KeyError` where the journal has none."""
    return step_of(networks()[case.network], journal.rows[case.key]["compute_us"])


def _facts(order: dict[str, Any], path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    if order["kind"] == "latency":
        sizes = {"sizes_bytes": order["sizes_bytes"], "us": found["us"]}
        return {"version": found["version"], **sizes, "bursts": order["bursts"], "bursts_us": found["bursts_us"]}
    steps_us = [(end - begin) * 1e6 for begin, end in pairwise(found["ends_s"])]
    return {"version": found["version"], "compute_us": sum(order["waits_us"]), "steps_us": steps_us}


def show_on_stderr(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)
