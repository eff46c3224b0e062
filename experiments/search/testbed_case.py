"""A case of `testbed`: its folder, what it is, what has been measured, and who takes part in its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect.trace import Floats, Trace
from dpro_search.deploy.jobs import RecordedJob
from dpro_search.deploy.losses import Loss, Losses
from dpro_search.deploy.validate import typical_us
from dpro_search.errors import InputError
from dpro_search.kinds import recorded_job
from dpro_search.search import SearchResult
from dpro_search.space.plan import Plan
from dpro_search.space.plan_json import decoded
from experiments.search.testbed_jobs import SCHEMES, Scheme

DEFAULT, AUTOTUNE, XLA, GRID, PLAN = "default", "autotune", "xla", "grid", "plan"
OUT_OF_THE_RACE = 4 / 3  # times the default's iteration
_START_S, _SLOWER = 100.0, 3.0  # of a run that is not ended: what it takes to start, and times the recorded iteration
_XLA_ENV = {"TF_XLA_FLAGS": "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"}


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a case is; `trace` is a recording that was there before, or empty."""

    scheme: str
    workload: str
    rate: str
    python: str
    trace: str = ""
    steps: int = 16
    grid_steps: int = 7
    autotune_steps: int = 270
    autotune_sample: int = 0
    trials: int = 500

    def check(self) -> None:
        """Raise `InputError` for what no case is."""
        if self.scheme not in SCHEMES:
            raise InputError(f"--scheme {self.scheme}: known are {', '.join(SCHEMES)}")
        if min(self.steps, self.grid_steps) < 3:
            raise InputError("--steps and --grid-steps: at least 3")


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a setting: a plan, and variables on top of what it sets.

    Attributes
    ----------
    iteration_us
        Steps behind the warm-up.
    cpu_us
        CPU time in each of them, mean over the ranks that train: tells a slow processor from waiting. Empty: not known.
    losses
        As (value, half a unit of the last digit).
    failed
        Why there are none; empty: it ran.
    seconds, started_at
        Of the whole job (its share, where one process ran several settings), and in seconds since 1970.
    """

    plan: Plan = Plan()
    env: dict[str, str] = {}
    iteration_us: tuple[float, ...] = ()
    cpu_us: tuple[float, ...] = ()
    losses: tuple[tuple[str, float], ...] = ()
    failed: str = ""
    seconds: float = 0.0
    started_at: float = 0.0

    @property
    def times_us(self) -> Floats:
        """Its steps, [steps]."""
        return np.array(self.iteration_us)

    def read_losses(self) -> Losses:
        """The losses that it printed."""
        return tuple(Loss(float(value), resolution) for value, resolution in self.losses)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A setting of the rounds; `env` is on top of the recorded job's."""

    name: str
    plan: Plan = field(default_factory=Plan)
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """The folder of a workload, a link and a way to communicate.

    ==========================  =======================================================================
    ``setup.json``              `Setup`
    ``trace``, ``search``       what was recorded (unless a trace was given), and the search's run folder
    ``export``                  the best plan's files
    ``grid/N.json``             `Measured` of the N-th setting
    ``autotune.json``           `Measured` of the autotuner's run, all steps; plan and env are its choice
    ``rounds/NAME.N.json``      `Measured` of a contender
    ``case.json``               what `table` concludes
    ==========================  =======================================================================
    """

    folder: Path
    setup: Setup

    @property
    def scheme(self) -> Scheme:
        """How its jobs are started."""
        return SCHEMES[self.setup.scheme]

    @property
    def trace(self) -> Path:
        """The recording."""
        return Path(self.setup.trace) if self.setup.trace else self.folder / "trace"

    @property
    def search(self) -> Path:
        """The run folder of the search."""
        return self.folder / "search"

    def grid_file(self, number: int) -> Path:
        """Where the grid's N-th setting is."""
        return self.folder / "grid" / f"{number}.json"

    def round_file(self, name: str, number: int) -> Path:
        """Where a contender's run in a round is."""
        return self.folder / "rounds" / f"{name}.{number}.json"

    @property
    def autotune_file(self) -> Path:
        """Where the autotuner's run is."""
        return self.folder / "autotune.json"

    @cached_property
    def recorded(self) -> RecordedJob:
        """The job of the recording, with this checkout's script."""
        return recorded_job(Trace.load(self.trace), self.scheme.command(self.setup.python, self.setup.workload, 1))

    def job(self, steps: int, *, env: Mapping[str, str] | None = None, switched: Path | None = None) -> RecordedJob:
        """The recorded job with a number of steps."""
        spec = self.recorded.spec
        command = self.scheme.command(self.setup.python, self.setup.workload, steps, switched=switched)
        return replace(self.recorded, spec=replace(spec, command=command, env={**spec.env, "OMP_NUM_THREADS": "1", **(env or {})}))

    def limit_s(self, steps: int) -> float:
        """A job with a number of steps that takes longer than this is ended."""
        return _START_S + _SLOWER * steps * SearchResult.load(self.search).baseline.iteration_us * 1e-6

    def best(self) -> Plan:
        """What the search found best: the empty plan where nothing is to be gained (then it runs as the default does)."""
        return SearchResult.load(self.search).plans[0].plan

    def grid(self) -> dict[int, Measured]:
        """What ran of the grid, by number."""
        return {int(path.stem): read(path) for path in (self.folder / "grid").glob("[0-9]*.json")}

    def best_of_grid(self) -> Plan | None:
        """The fastest setting of the grid, which does not change once it is in the rounds; None if none ran."""
        if runs := self.rounds(GRID):
            return runs[0].plan
        found = [point for point in self.grid().values() if not point.failed]
        return min(found, key=lambda point: typical_us([point.times_us])).plan if found else None

    def contenders(self) -> list[Contender]:
        """Those of a round, in their order."""
        found = [Contender(name=DEFAULT)]
        if self.autotune_file.exists() and not (run := read(self.autotune_file)).failed:
            found.append(Contender(name=AUTOTUNE, plan=run.plan, env=run.env))
        if self.setup.scheme == "tensorflow":
            found.append(Contender(name=XLA, env=_XLA_ENV))
        if (best := self.best_of_grid()) is not None:
            found.append(Contender(name=GRID, plan=best))
        return [*found, Contender(name=PLAN, plan=self.best())]

    def rounds(self, name: str) -> list[Measured]:
        """A contender's runs so far, in their order, those that failed included."""
        paths = (self.folder / "rounds").glob(f"{name}.*.json")
        return [read(path) for path in sorted(paths, key=lambda path: int(path.suffixes[0][1:]))]

    def in_the_race(self, name: str) -> bool:
        """Whether a contender runs again: default and plan do, others unless they failed or were far behind at first."""
        own = self.rounds(name)
        base = [run.times_us for run in self.rounds(DEFAULT) if not run.failed]
        if name in (DEFAULT, PLAN) or not base or not own:
            return True
        return not own[0].failed and typical_us([own[0].times_us]) <= OUT_OF_THE_RACE * typical_us(base)


def read(path: Path) -> Measured:
    """A run that was measured before."""
    return decoded(path.read_bytes(), Measured)


def open_case(folder: Path, setup: Setup | None = None) -> Case:
    """The case of a folder, made if it is missing; raises `InputError` if there is none, or another one than `setup`."""
    path = folder / "setup.json"
    if not path.exists():
        if setup is None:
            raise InputError(f"{folder}: holds no case")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(setup), indent=1) + b"\n")
    found = decoded(path.read_bytes(), Setup)
    if setup is not None and found != setup:
        raise InputError(f"{folder}: holds a case with other options: {msgspec.json.encode(found).decode()}")
    return Case(folder, found)
