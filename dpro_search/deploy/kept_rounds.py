"""Rounds of a validation that have ended, in ``rounds.jsonl`` of the run folder until the whole validation is written.

The first line says what is measured; each further line is one round. A validation that was interrupted or killed continues after
its last whole round if it measures the same: the same plans of the same command. Every round has its own runs of the recorded
setting, so that rounds of two calls may be compared together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from dpro_search._regular_files import read_regular
from dpro_search.collect._files import write_file
from dpro_search.collect.launch.step_times import StepTimes
from dpro_search.deploy.jobs import JobRun, RecordedJob
from dpro_search.deploy.losses import Loss
from dpro_search.deploy.step_split import ComparedSplit
from dpro_search.space.plan import Plan

_VERSION = 1
_LARGEST_BYTES = 256 * 2**20


class KeptRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run: the plan's number (-1: the recorded setting), its iterations in us, CPU times per step in us, and its losses."""

    number: int
    iteration_us: tuple[float, ...]
    compute_cpu_us: tuple[float, ...]
    comm_cpu_us: tuple[float, ...]
    peak_rss_bytes: int = 0
    losses: tuple[Loss, ...] = ()
    split: ComparedSplit | None = None

    @staticmethod
    def of(number: int, run: JobRun) -> KeptRun:
        times = run.times
        columns = (tuple(times.iteration_us.tolist()), tuple(times.compute_cpu_us.tolist()), tuple(times.comm_cpu_us.tolist()))
        return KeptRun(
            number=number,
            iteration_us=columns[0],
            compute_cpu_us=columns[1],
            comm_cpu_us=columns[2],
            peak_rss_bytes=times.peak_rss_bytes,
            losses=run.losses,
            split=run.split,
        )

    def run(self) -> JobRun:
        """The run as it was measured."""
        times = StepTimes(
            iteration_us=np.array(self.iteration_us),
            compute_cpu_us=np.array(self.compute_cpu_us),
            comm_cpu_us=np.array(self.comm_cpu_us),
            peak_rss_bytes=self.peak_rss_bytes,
        )
        return JobRun(times=times, losses=self.losses, split=self.split)


class FinishedRound(msgspec.Struct, frozen=True, kw_only=True):
    """A round that has ended.

    Attributes
    ----------
    failed
        Why plans are not run again, by their numbers.
    longest_s
        The longest run of the recorded setting so far.
    """

    runs: tuple[KeptRun, ...]
    failed: dict[int, str] = {}
    longest_s: float = 0.0


class _RoundsHead(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    setting: str


class RoundsFile:
    """The rounds of one validation in a run folder.

    Attributes
    ----------
    rounds
        Those that have ended. A file of another validation, or what does not decode of a file, counts for none.
    """

    def __init__(self, run: Path, job: RecordedJob, plans: Sequence[Plan], warmup: int) -> None:
        self.path = run / "rounds.jsonl"
        facts: tuple[object, ...] = (job.spec.command, job.spec.ranks, job.rate_bps, job.shaped, warmup, list(plans))
        facts += ("paced",) if job.paced is not None else ()
        facts += (job.spec.limits,) if job.spec.limits else ()
        self._head = _RoundsHead(version=_VERSION, setting=hashlib.blake2b(msgspec.json.encode(facts), digest_size=16).hexdigest())
        self.rounds = self._read(len(plans))

    def add(self, finished: FinishedRound) -> None:
        """Keep a round; raises `MissingCapabilityError` if the disk does not take it."""
        self.rounds = (*self.rounds, finished)
        write_file(self.path, b"".join(msgspec.json.encode(line) + b"\n" for line in (self._head, *self.rounds)))

    def remove(self) -> None:
        """The validation is written."""
        self.path.unlink(missing_ok=True)

    def _read(self, plans: int) -> tuple[FinishedRound, ...]:
        rounds: list[FinishedRound] = []
        try:
            if self.path.stat().st_size > _LARGEST_BYTES:
                return ()
            head, *lines = read_regular(self.path).splitlines() or [b""]
            if msgspec.json.decode(head, type=_RoundsHead) != self._head:
                return ()
            for line in lines:
                one = msgspec.json.decode(line, type=FinishedRound)
                if not _whole(one, plans):
                    break
                rounds.append(one)
        except (OSError, msgspec.DecodeError, RecursionError):
            pass
        return tuple(rounds)


def _whole(finished: FinishedRound, plans: int) -> bool:
    """Whether a round has what is compared: runs of the recorded setting and of plans that there are, of positive times."""
    numbers = {run.number for run in finished.runs}
    return (
        -1 in numbers
        and (numbers | finished.failed.keys()) <= set(range(-1, plans))
        and -1 not in finished.failed
        and all(run.iteration_us and min(run.iteration_us) > 0 for run in finished.runs)
        and all(max(run.iteration_us) < float("inf") for run in finished.runs)
    )
