"""Diagnosis of a job of workers of unequal speed: waiting, slow workers, and gains of changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpro_search.errors import InputError
from dpro_search.kinds._facts import critical_table, gain_table
from dpro_search.kinds._job import Table
from dpro_search.quantities import time_text
from dpro_search.replay.synchronisation import TimeToLoss

if TYPE_CHECKING:
    from dpro_search.kinds._job import Job
    from dpro_search.kinds.synchronised.training import Trainings

_SLOW = 1.5  # times the median step: a worker that is named
_HOPELESS = 20.0  # times: one that gives next to nothing
_WAITING = 0.05  # of worker time, that is worth a sentence
_ASKED = ("adsp(commits=1)", "asp", "fixed-adacomm(steps=8)", "local-sgd(steps=8)")


def gains_of(job: Job, base_us: float, step_s: Sequence[float]) -> list[dict[str, Any]]:
    """Gains of some changes: other schemes, faster links, a slow worker as fast as the median one."""
    median_s, slowest = float(np.median(step_s)), int(np.argmax(step_s))
    questions = ["communication=0", *(f"synchronisation={scheme}" for scheme in _ASKED)]
    if step_s[slowest] > median_s:
        questions.append(f"rank{slowest}.compute={median_s / step_s[slowest]:.4g}")
    rows = []
    for text in questions:
        try:
            lowered = job.lower(job.scenario.changed([text], known=(*job.askable, *job.settings), job=job.title))
        except InputError:
            continue
        iteration_us = lowered.replayable.iterations().iteration_us
        if lowered.infeasible is None and iteration_us < base_us:
            rows.append({"what_if": text, "predicted_iteration_us": iteration_us, "gain_us": base_us - iteration_us})
    return sorted(rows, key=lambda row: -float(row["gain_us"]))


def findings(
    training: TimeToLoss, trainings: Trainings, rows: Sequence[Mapping[str, Any]], gains: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Sentences."""
    target = f"a loss of {trainings.target_loss:g}"
    said = [f"An iteration is a training to {target} by {training.scheme}: {training.steps} steps, {training.commits} commits."]
    if training.time_s is None:
        said.append(f"{training.scheme} does not reach {target} within {training.simulated.end_s:.0f} s.")
    if training.waiting_share > _WAITING:
        waiting = max(rows, key=lambda row: row["waited_us"])["rank"]
        said.append(f"Workers wait for each other {training.waiting_share:.0%} of their time, worker {waiting} most.")
    median_s = float(np.median(trainings.step_s))
    for worker, step_s in enumerate(trainings.step_s):
        if step_s > _HOPELESS * median_s:
            said.append(f"Worker {worker} is {step_s / median_s:.0f} times slower than the median one: leave it out.")
        elif step_s > _SLOW * median_s:
            said.append(f"Worker {worker} takes {step_s / median_s:.1f} times as long for a step as the median one.")
    if gains and gains[0]["gain_us"] > 0:
        best = gains[0]
        said.append(f"'{best['what_if']}' would take {time_text(best['predicted_iteration_us'])}.")
    return said


def tables(facts: Mapping[str, Any]) -> list[Table]:
    """Workers, gains and the critical path."""
    rows = [
        (
            row["host"],
            time_text(row["step_us"]),
            str(row["steps"]),
            str(row["commits"]),
            *(time_text(us) for us in row["breakdown_us"].values()),
        )
        for row in facts["ranks"]
    ]
    columns = ("worker", "a step", "steps", "commits", "in steps", "in commits", "waiting")
    return [
        Table(title="workers", columns=columns, rows=rows),
        gain_table(facts["gains"], facts["iteration_us"]),
        critical_table(facts["critical_ops"]),
    ]
