"""Recordings of jobs of workers of unequal speed that converge by a known law: simulated, and written as workers do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpro_search.costmodel.convergence import Convergence
from dpro_search.replay.synchronisation import EffectiveSteps, simulate
from dpro_search.runtime.schemes import LossWindow, Pace, Scheme, parse_paces, parse_scheme
from dpro_search.runtime.synchronisation.recording import FORMAT, VERSION

TARGET = 0.4
LAW = Convergence(
    drift=0.01,
    staleness=0.0,
    start_loss=2.4,
    levels=tuple(2.4 * 0.8**n for n in range(1, 13)),
    needed=tuple(30.0 * n for n in range(1, 13)),
    log_error=0.0,
    runs=1,
)
MIX, STEP_S, COMMIT_S = "1:1:2", 0.06, 0.02


class _Trained(EffectiveSteps):
    """Remembers the loss of each commit, and when the window's mean reached the target."""

    def __init__(self, scheme: Scheme, workers: int, goal: float) -> None:
        super().__init__(LAW, scheme, workers)
        self.window, self.goal = LossWindow(), goal
        self.rows: list[tuple[Any, float]] = []

    def commit(self, worker: int, commit: Any) -> None:
        loss = LAW.loss_after(self.made)
        super().commit(worker, commit)
        self.window.add(loss, commit.steps)
        self.rows.append((commit, loss))

    def ended(self, now: float) -> bool:
        return self.window.mean is not None and self.window.mean <= self.goal


def trained(scheme: str, paces: Sequence[Pace], goal: float = TARGET) -> _Trained:
    """One training to a goal."""
    training = _Trained(parse_scheme(scheme), len(paces), goal)
    simulate(parse_scheme(scheme), paces, training, stop=training.ended, check_s=0.001, limit_s=10_000.0)
    return training


def lines_of(
    scheme: str,
    mix: str = MIX,
    *,
    run: str = "",
    target: float | None = TARGET,
    goal: float = TARGET,
    framework: str = "pytorch",
) -> list[dict[str, Any]]:
    """The lines of all workers of one run, as `runtime.synchronisation` writes them."""
    paces = parse_paces(mix, step_s=STEP_S, commit_s=COMMIT_S)
    training = trained(scheme, paces, goal)
    lines = []
    for worker, pace in enumerate(paces):
        commits = [
            [commit.time_s, commit.steps, commit.weight, commit.behind_steps, loss, COMMIT_S, 0.0]
            for commit, loss in training.rows
            if commit.worker == worker
        ]
        lines.append(
            {
                "format": FORMAT,
                "version": VERSION,
                "run": run or scheme,
                "framework": framework,
                "scheme": scheme,
                "worker": worker,
                "workers": len(paces),
                "seed": "0",
                "target_loss": target,
                "elements": 1000,
                "step_s": pace.step_s,
                "paced": True,
                "late_steps": 0,
                "commits": commits,
            }
        )
    return lines


def recording(path: Path, *runs: list[dict[str, Any]]) -> Path:
    """A file of some runs; default: BSP, and fixed ADACOMM with 8 steps."""
    chosen = runs or (lines_of("bsp"), lines_of("fixed-adacomm(steps=8)"))
    path.write_text("".join(json.dumps(line) + "\n" for lines in chosen for line in lines))
    return path
