"""``kills(out, count)``: random workers are killed (SIGKILL) while ADSP trains, and come back; beside undisturbed runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.adsp.cases import Case
from experiments.adsp.journal import Journal
from experiments.adsp.measured import Machine

_EVERY_S = 3.0
_SEEDS = 5  # undisturbed runs


def kills(out: Path, count: int) -> Iterator[str]:
    """Train until so many workers were killed in all; lines that say what happened."""
    journal = Journal(out)
    plain = Case(experiment="undisturbed", workload="digits-mlp", scheme="adsp", seed=0)
    with Machine(4) as machine:
        for seed in range(_SEEDS):
            case = replace(plain, seed=seed)
            if case not in journal:
                journal.add(case, **machine.train(case))
        killed, seed = sum(record["killed"] for record in journal.records("killed")), len(journal.records("killed"))
        while killed < count:
            case, killer = replace(plain, experiment="killed", seed=seed), _Killer(seed)
            record = machine.train(case, killer)
            journal.add(case, **record, killed=killer.killed)
            killed, seed = killed + killer.killed, seed + 1
            yield f"seed {case.seed}: {killer.killed} killed, target after {record['time_s']} s, {record['commits']} commits"
    undisturbed = [record["time_s"] for record in journal.records("undisturbed")]
    disturbed = [record["time_s"] for record in journal.records("killed")]
    missed = sum(time is None for time in disturbed)
    yield f"{killed} workers killed in {len(disturbed)} runs; {missed} runs did not reach the target"
    yield f"undisturbed {min(undisturbed):.1f} to {max(undisturbed):.1f} s; with kills, seconds: {disturbed}"


class _Killer:
    """Kills a random worker every `_EVERY_S`, and starts it anew."""

    def __init__(self, seed: int) -> None:
        self.killed = 0
        self._draws = np.random.default_rng((seed, 31))
        self._next = _EVERY_S

    def __call__(self, now: float, where: Any, running: dict[int, Any]) -> None:
        if now < self._next:
            return
        machine, case, job = where
        worker = int(self._draws.integers(len(running)))
        os.kill(machine.process_id(worker), signal.SIGKILL)
        running[worker] = machine.restart(case, job, worker)
        self.killed += 1
        self._next = now + _EVERY_S
