"""`Worker`: what the workers of all engines have in common: pacing, counters, and a recording of the run."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpro_search.runtime.schemes import Goal, Pace, Scheme
from dpro_search.runtime.synchronisation.local_model import LocalModel
from dpro_search.runtime.synchronisation.recording import RecordedCommit, write_record


@dataclass(frozen=True)
class WorkerPart:
    """The part of one worker in a job.

    Attributes
    ----------
    worker, workers
        Its number, from 0, and that of all.
    silent_s
        Seconds without a sign of life after which a worker is not waited for.
    record
        File that the run is recorded in; None: it is not.
    """

    scheme: Scheme
    worker: int
    workers: int
    job: str
    silent_s: float
    pace: Pace | None = None
    goal: Goal = field(default_factory=Goal)
    record: Path | None = None


class Worker(ABC):
    """See `Synchronised` for the methods. An engine sets `run`, and calls `_committed` at the end of each commit."""

    def __init__(self, model: LocalModel, part: WorkerPart) -> None:
        self.running = True
        self.run = ""  # one name for the run on all workers
        self._local, self._part, self._scheme, self._worker = model, part, part.scheme, part.worker
        self._pacer = Pacer(part.pace)
        self._steps = self._all_steps = self._commits = 0  # steps: since the last commit
        self._losses: list[float] = []  # likewise
        self._step_s = self._all_step_s = self._waited_s = 0.0
        self._recorded: list[RecordedCommit] = []

    @abstractmethod
    def step(self, loss: Any = None, batch_size: int | None = None) -> None:
        """See `Synchronised`."""

    @abstractmethod
    def _leave(self) -> None:
        """Nobody waits for this worker any more."""

    def facts(self) -> dict[str, Any]:
        return {
            "worker": self._worker,
            "process": os.getpid(),
            "steps": self._all_steps,
            "commits": self._commits,
            "step_s": self._all_step_s / max(self._all_steps, 1),
            "waited_s": self._waited_s,
            "paced": self._part.pace is not None,
            "late_steps": self._pacer.late_steps,
        }

    def close(self) -> None:
        if self._part.record is not None:
            write_record(
                self._part.record,
                run=self.run,
                framework=self._local.framework,
                scheme=str(self._scheme),
                worker=self._worker,
                workers=self._part.workers,
                target_loss=self._part.goal.target_loss,
                elements=self._local.elements,
                step_s=self._all_step_s / max(self._all_steps, 1),  # the mean
                paced=self._part.pace is not None,
                late_steps=self._pacer.late_steps,
                commits=self._recorded,
            )
        self._leave()

    def _stepped(self, loss: Any) -> None:
        """Count a local step, which ends now."""
        if loss is not None:
            self._losses.append(self._local.loss(loss))
        self._steps += 1
        self._all_steps += 1
        self._step_s = self._pacer.end_step()
        self._all_step_s += self._step_s

    @property
    def _loss(self) -> float | None:
        """The mean loss of the steps since the last commit."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    def _committed(self, commit: RecordedCommit) -> None:
        """Count a commit, which ends now; the next step begins."""
        if self._part.record is not None:
            self._recorded.append(commit)
        self._commits += 1
        self._waited_s += commit.waited_s
        self._steps, self._losses = 0, []
        self._pacer.begin_step()


class Pacer:
    """The clock of one worker, paced or not.

    Attributes
    ----------
    late_steps
        Steps that took longer than they should have: the machine was too slow for the pace.
    """

    def __init__(self, pace: Pace | None) -> None:
        self.late_steps = 0
        self._pace = pace
        self._origin = self._begin = time.monotonic()

    def start(self, job_s: float) -> None:
        """The worker has the first model, `job_s` after the job's start."""
        self._begin = time.monotonic()
        self._origin = self._begin - job_s

    def end_step(self) -> float:
        """Sleep until the step may end; seconds that it took."""
        if self._pace is not None:
            planned_end = self._begin + self._pace.step_at(self._begin - self._origin)
            rest = planned_end - time.monotonic()
            if rest > 0:
                time.sleep(rest)
            elif rest < -0.1 * (planned_end - self._begin):
                self.late_steps += 1
        begun, self._begin = self._begin, time.monotonic()
        return self._begin - begun

    def half_commit(self) -> None:
        """Sleep half of a commit's time."""
        if self._pace is not None and self._pace.commit_s:
            time.sleep(self._pace.commit_s / 2)

    def begin_step(self) -> None:
        """The next step begins now."""
        self._begin = time.monotonic()
