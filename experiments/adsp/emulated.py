"""``record_of(case)``: a case in simulated time, as a record like those of real jobs."""

from __future__ import annotations

from typing import Any

from experiments.adsp.cases import Case
from experiments.adsp.emulate import emulate
from experiments.adsp.workloads import WORKLOADS


def record_of(case: Case) -> dict[str, Any]:
    """Train a case to its target."""
    workload = WORKLOADS[case.workload]
    found = emulate(workload, case.scheme, case.paces, seed=case.seed, batch=case.batch)
    elements = sum(parameter.numel() for parameter in workload.task(case.seed).model.parameters())
    commits = found.simulated.commits
    applied = [(c.time_s, c.worker, c.steps, c.weight, c.behind_steps) for c in commits]
    return {
        "how": "real training, simulated time",
        "time_s": found.time_s,
        "losses": found.losses,
        "steps": sum(commit.steps for commit in commits),
        "commits": len(commits),
        "bytes": 2 * 4 * elements * len(commits),
        "waiting_share": found.simulated.waiting_share,
        "late_share": 0.0,
        "commit_s": case.commit_s,
        "departures": 0,
        "applied": applied if case.experiment == "calibration" else [],
    }
