"""``recorded_runs(path)``: the short runs in a file that `dpro_search.runtime.synchronisation` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from dpro_search._regular_files import open_regular, read_regular
from dpro_search.collect.trace import Floats
from dpro_search.errors import InputError
from dpro_search.kinds._kind import Description
from dpro_search.runtime.schemes import Accumulation, LossWindow, Scheme, parse_scheme
from dpro_search.runtime.synchronisation.recording import FORMAT, VERSION

_MARK = f'"{FORMAT}"'.encode()
_LARGEST_BYTES = 2**30
_MOST_WORKERS = 10_000


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """Records of one worker of one run; see `runtime.synchronisation.recording`."""

    version: int
    run: str
    framework: Literal["pytorch", "mxnet"] = "pytorch"  # lines without one are older than the second framework
    scheme: str
    worker: int
    workers: int
    seed: str | None = None
    target_loss: float | None = None
    elements: int
    step_s: float
    paced: bool = False
    late_steps: int = 0
    commits: tuple[tuple[float, int, float, float, float | None, float, float], ...]


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """One run of all workers; commits of all in order of time, [n].

    Attributes
    ----------
    step_s
        Mean seconds of a local step, by worker that wrote its line.
    commit_s
        Mean seconds of a commit, without waiting.
    waited_s
        Seconds that each worker waited for others.
    time_s, worker, steps, weights, behind_steps, losses
        See `runtime.synchronisation.recording.RecordedCommit`.
    """

    name: str
    framework: str
    scheme: Scheme
    workers: int
    seed: str | None
    target_loss: float | None
    elements: int
    paced: bool
    late_steps: int
    step_s: dict[int, float]
    commit_s: float
    waited_s: dict[int, float]
    time_s: Floats
    worker: Floats
    steps: Floats
    weights: Floats
    behind_steps: Floats
    losses: Floats

    @property
    def end_s(self) -> float:
        """The time of the last commit."""
        return float(self.time_s[-1])

    @property
    def waiting_share(self) -> float:
        """Waiting as a share of the time of the workers that are known."""
        return sum(self.waited_s.values()) / (self.end_s * len(self.waited_s))

    @property
    def moved_bytes(self) -> int:
        """Bytes of all commits: an update and a model of float32 each."""
        return 2 * 4 * self.elements * len(self.time_s)

    @property
    def start_loss(self) -> float:
        """The mean loss of the first commits, as many as there are workers."""
        return float(self.losses[: self.workers].mean())

    @cached_property
    def curve(self) -> tuple[Floats, Floats]:
        """Seconds, and the mean training loss of the last steps then (`LossWindow`), [m]."""
        window, times, losses = LossWindow(), [], []
        for time, steps, loss in zip(self.time_s.tolist(), self.steps.tolist(), self.losses.tolist(), strict=True):
            window.add(loss, round(steps))
            if window.mean is not None:
                times.append(time)
                losses.append(window.mean)
        return np.array(times), np.array(losses)


@dataclass(frozen=True, kw_only=True)
class ShortRuns(Description):
    """The runs in a file, in their order; the job runs today like the first."""

    runs: tuple[RecordedRun, ...]

    @property
    def workers(self) -> int:
        """Number of workers of the job."""
        return self.runs[0].workers

    @property
    def target_loss(self) -> float:
        """Target of the newest run with one, or else the lowest loss that every run reached."""
        given = [run.target_loss for run in self.runs if run.target_loss is not None]
        return given[-1] if given else max(float(run.curve[1].min()) for run in self.runs)


def recorded_runs(path: Path) -> ShortRuns | None:
    """The runs in a file; None: it is of another format.

    Raises
    ------
    InputError
        A line is damaged, a run has no losses, too few steps or one worker only.
    """
    with open_regular(path) as file:
        if _MARK not in file.readline(4096):
            return None
    if path.stat().st_size > _LARGEST_BYTES:
        raise InputError(f"{path}: larger than 1 GiB; record shorter runs")
    lines: dict[str, list[_Line]] = {}
    for number, raw in enumerate(read_regular(path).splitlines(), 1):
        if raw.strip():
            line = _decoded(raw, f"{path}, line {number}")
            lines.setdefault(line.run, []).append(line)
    runs = tuple(_run(lines_of_run, str(path)) for lines_of_run in lines.values())
    late = sum(run.late_steps for run in runs) / max(sum(float(run.steps.sum()) for run in runs), 1.0)
    warnings = [w for run in runs if (w := _missing(run)) is not None]
    if late > 0.02:
        warnings.append(f"{late:.0%} of the paced steps were late: the machine was too slow for the pace, or did something else")
    frameworks = sorted({run.framework for run in runs})
    if len(frameworks) > 1:
        raise InputError(f"{path}: has runs of {' and of '.join(frameworks)}; put those of one framework into a file")
    schemes = ", ".join(dict.fromkeys(str(run.scheme) for run in runs))
    return ShortRuns(
        framework=frameworks[0],
        provenance=(("recorded runs", f"{len(runs)}: {schemes}"), ("workers", str(runs[0].workers))),
        warnings=tuple(warnings),
        runs=runs,
    )


def _decoded(raw: bytes, where: str) -> _Line:
    try:
        line = msgspec.json.decode(raw, type=_Line)
        parse_scheme(line.scheme)
    except (msgspec.DecodeError, RecursionError, InputError) as error:
        raise InputError(f"{where}: not what a worker records ({error})") from error
    if line.version != VERSION:
        raise InputError(f"{where}: version {line.version}, this program reads {VERSION}")
    if not (0 <= line.worker < line.workers <= _MOST_WORKERS and 0 < line.step_s < 1e6 and 0 < line.elements < 1e15):
        raise InputError(f"{where}: a worker, its steps or its parameters are out of range")
    for time_s, steps, weight, behind, _, took_s, waited_s in line.commits:
        small = 0 <= time_s < 1e9 and 0 < steps < 1e9 and 0 <= took_s < 1e9 and 0 <= waited_s < 1e9
        if not (small and 0 < weight <= 1 and 0 <= behind < 1e12):
            raise InputError(f"{where}: a commit at {time_s} s is out of range")
    return line


def _run(lines: Sequence[_Line], where: str) -> RecordedRun:
    """One run from the lines of its workers, of which the last of each counts."""
    by_worker = {line.worker: line for line in lines}
    first = lines[0]
    scheme = parse_scheme(first.scheme)
    what = f"{where}: run {first.run} ({scheme})"
    if any((line.scheme, line.workers) != (first.scheme, first.workers) for line in lines):
        raise InputError(f"{what}: its workers differ in the scheme or in the number of workers")
    if first.workers == 1:
        raise InputError(f"{what}: has one worker, which has nobody to exchange updates with; record a run of several")
    rows = [(*commit, line.worker) for line in by_worker.values() for commit in line.commits]
    if any(row[4] is None or not np.isfinite(row[4]) for row in rows):
        raise InputError(f"{what}: has commits without a loss; call sync.step(loss) in the script")
    rows.sort(key=lambda row: row[0])
    if len(rows) < first.workers or sum(row[1] for row in rows) < 2 * LossWindow().length:
        raise InputError(
            f"{what}: has {sum(row[1] for row in rows)} steps; record at least {2 * LossWindow().length} of all workers"
        )
    took, waited = _shared_waits(by_worker) if scheme.collective else _own_waits(by_worker)
    columns = np.array([row[:4] for row in rows], dtype=float).T
    return RecordedRun(
        name=first.run,
        framework=first.framework,
        scheme=scheme,
        workers=first.workers,
        seed=first.seed,
        target_loss=first.target_loss,
        elements=first.elements,
        paced=first.paced,
        late_steps=sum(line.late_steps for line in by_worker.values()),
        step_s={worker: line.step_s for worker, line in sorted(by_worker.items())},
        commit_s=took,
        waited_s=waited,
        time_s=columns[0],
        steps=columns[1],
        weights=columns[2],
        behind_steps=columns[3],
        losses=np.array([row[4] for row in rows], dtype=float),
        worker=np.array([row[7] for row in rows], dtype=float),
    )


def _own_waits(lines: dict[int, _Line]) -> tuple[float, dict[int, float]]:
    """Seconds of a commit, and each worker's waits."""
    took = [commit[5] for line in lines.values() for commit in line.commits]
    return float(np.mean(took)), {worker: sum(commit[6] for commit in line.commits) for worker, line in lines.items()}


def _shared_waits(lines: dict[int, _Line]) -> tuple[float, dict[int, float]]:
    """Seconds of an all-reduce, and each worker's waits. The last one to come waits for nobody."""
    rounds = min(len(line.commits) for line in lines.values())
    took = np.array([[commit[5] for commit in line.commits[-rounds:]] for line in lines.values()])
    least = took.min(axis=0)
    return float(least.mean()), dict(zip(lines, (took - least).sum(axis=1).tolist(), strict=True))


def _missing(run: RecordedRun) -> str | None:
    missing = sorted(set(range(run.workers)) - run.step_s.keys())
    if not missing:
        return None
    return f"run {run.name} ({run.scheme}): worker {missing[0]} left no line: it was killed, or has not called sync.close()"


def effective_steps(run: RecordedRun) -> Floats:
    """Local steps of each commit as the convergence model counts them: micro-batches of one step are one."""
    return np.ones_like(run.steps) if isinstance(run.scheme, Accumulation) else run.steps


def effective_weights(run: RecordedRun) -> Floats:
    """Their weights."""
    return run.weights * run.steps if isinstance(run.scheme, Accumulation) else run.weights
