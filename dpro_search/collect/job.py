"""Run a TensorFlow + Horovod job under the recorder: `record_job` makes a trace of it, `time_job` only measures its steps."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from dpro_search.collect._files import write_file
from dpro_search.collect.assemble import HookFile, assemble, read_hook
from dpro_search.collect.assembly import RankFile
from dpro_search.collect.horovod_phases import EXACT_GROUPS, JobFile
from dpro_search.collect.launch.mpi import run_mpi_job
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec, require_framework, run_job
from dpro_search.collect.trace import CommSettings, Floats, Trace
from dpro_search.errors import InputError, JobError

_MODULES = ("tensorflow", "horovod.tensorflow")
_MIB = 2**20
_LAUNCHERS: dict[str, Callable[..., None]] = {"gloo": run_job, "mpi": run_mpi_job}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Which steps are skipped, timed, profiled; those after that are timed again."""

    warmup: int = 5
    untraced: int = 8
    traced: int = 10

    def __post_init__(self) -> None:
        if self.warmup < 2 or self.untraced < 0 or self.traced < 2:
            raise InputError("--warmup must be at least 2 and --traced at least 2")

    def hook(self, mode: str) -> dict[str, str]:
        """Settings of the recorder."""
        numbers = {"WARMUP": self.warmup, "UNTRACED": self.untraced, "TRACED": self.traced}
        return {"MODE": mode, **{key: str(value) for key, value in numbers.items()}}


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Measured iterations of one run, without tracing.

    Attributes
    ----------
    iteration_us
        Distance between the starts of consecutive steps on rank 0 after the warm-up, [steps].
    compute_cpu_us, comm_cpu_us
        CPU time per step, mean over ranks, [steps].
    peak_rss_bytes
        Of the rank that took the most; 0: not known.
    """

    iteration_us: Floats
    compute_cpu_us: Floats
    comm_cpu_us: Floats
    peak_rss_bytes: int = 0

    @property
    def median_us(self) -> float:
        """Median iteration time."""
        return float(np.median(self.iteration_us))


@contextlib.contextmanager
def shaped_hosts(count: int, rate_bps: float | None, shaped: bool) -> Iterator[ShapedHosts | None]:
    """Hosts behind limited links, or None where the job is to run on this machine as it is."""
    if not shaped:
        yield None
        return
    with ShapedHosts(count, rate_bps) as hosts:
        yield hosts


def settings_of(env: Mapping[str, str]) -> CommSettings:
    """Horovod's knobs under an environment: its own defaults where a variable is not set."""
    try:
        threshold = int(env.get("HOROVOD_FUSION_THRESHOLD", 128 * _MIB))
        cycle_ms = float(env.get("HOROVOD_CYCLE_TIME", 1))
    except ValueError as error:
        raise InputError(f"HOROVOD_FUSION_THRESHOLD or HOROVOD_CYCLE_TIME is not a number ({error})") from error
    return CommSettings(fusion_threshold_bytes=threshold, cycle_time_us=cycle_ms * 1000)


def on_mpi(spec: JobSpec) -> JobSpec:
    """The job with Horovod's agreements and transfers on MPI."""
    return replace(spec, env={**spec.env, "HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi"})


def controller_of(env: Mapping[str, str]) -> str:
    """What Horovod starts with under an environment: HOROVOD_CONTROLLER, by default gloo."""
    name = env.get("HOROVOD_CONTROLLER", "gloo").lower()
    if name not in _LAUNCHERS:
        raise InputError(f"HOROVOD_CONTROLLER={name}: known are {', '.join(_LAUNCHERS)}")
    return name


def _exact_groups(env: Mapping[str, str]) -> dict[str, str]:
    """The variable that keeps Horovod from fusing groups with other tensors, where it is set."""
    return {EXACT_GROUPS: env[EXACT_GROUPS]} if env.get(EXACT_GROUPS, "0") != "0" else {}


def _launched(spec: JobSpec) -> tuple[JobSpec, Callable[..., None]]:
    """The job, and what starts it."""
    controller = controller_of({**os.environ, **spec.env})
    return on_mpi(spec) if controller == "mpi" else spec, _LAUNCHERS[controller]


def record_job(
    spec: JobSpec,
    out: Path,
    *,
    rate_bps: float | None = None,
    shaped: bool = False,
    schedule: Schedule | None = None,
    keep_raw: Path | None = None,
) -> Trace:
    """Run a job with the hooks on and write its trace to the new folder `out`.

    HOROVOD_CONTROLLER=mpi starts it with mpirun, on OpenMPI; else it runs on Gloo.

    Parameters
    ----------
    shaped
        Give the ranks hosts of their own with links of `rate_bps` (None: not limited); needs root.
    keep_raw
        Where to leave the raw files as well.

    Raises
    ------
    InputError
        `out` exists, or the job holds nothing to record.
    JobError
        The job failed.
    MissingCapabilityError
        The framework, a permission or disk space is missing.
    """
    spec, run = _launched(spec)
    kind = HorovodKind(modules=_MODULES, environment="tensorflow", run=run, assemble=assemble)
    return record_horovod(spec, out, kind, rate_bps=rate_bps, shaped=shaped, schedule=schedule, keep_raw=keep_raw)


@dataclass(frozen=True, kw_only=True)
class HorovodKind:
    """What the recordings of a framework's Horovod jobs have of their own.

    Attributes
    ----------
    modules, environment
        What the job imports, and the environment of scripts/make_env.sh that has it.
    run
        The launcher.
    assemble
        From the raw folder to the trace.
    hook
        Settings of the recorder beside the schedule.
    format
        Name of the raw files; "" is TensorFlow's.
    """

    modules: tuple[str, ...]
    environment: str
    run: Callable[..., None]
    assemble: Callable[[Path], Trace]
    hook: Mapping[str, str] = field(default_factory=dict)
    format: str = ""


def record_horovod(
    spec: JobSpec,
    out: Path,
    kind: HorovodKind,
    *,
    rate_bps: float | None,
    shaped: bool,
    schedule: Schedule | None,
    keep_raw: Path | None,
) -> Trace:
    """Run a job of some framework with the hooks and Horovod's timeline on; parameters and errors are those of `record_job`."""
    if out.exists():
        raise InputError(f"{out}: exists already; remove it or choose another --out")
    schedule = schedule or Schedule()
    require_framework(spec.interpreter, kind.modules, kind.environment)
    with raw_folder(keep_raw) as raw:
        timeline = {"HOROVOD_TIMELINE": str((raw / "horovod_timeline.json").resolve()), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
        recorded = replace(spec, env={**spec.env, **timeline})
        job = JobFile(
            format=kind.format,
            ranks=spec.ranks,
            settings=settings_of({**os.environ, **spec.env}),
            command=spec.command,
            machine=machine(),
            recorded_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            rate_bps=rate_bps,
            knobs={"HOROVOD_CONTROLLER": controller_of(spec.env), **_exact_groups({**os.environ, **spec.env})},
        )
        write_file(raw / "job.json", msgspec.json.encode(job))
        with shaped_hosts(spec.hosts, rate_bps, shaped) as hosts:
            kind.run(recorded, raw, hosts=hosts, hook={**schedule.hook("record"), **kind.hook})
        trace = kind.assemble(raw)
        trace.save(out)
        return trace


def time_job(
    spec: JobSpec,
    *,
    rate_bps: float | None = None,
    shaped: bool = False,
    warmup: int = 5,
    log: Path | None = None,
    expected_groups: tuple[tuple[str, ...], ...] | None = None,
) -> StepTimes:
    """Run a job and measure its steps; the recorder only reads the clock.

    Parameters
    ----------
    log
        Folder for the ranks' output; removed afterwards if None.
    expected_groups
        Names of the tensors that must travel together; None: not checked.

    Raises
    ------
    JobError
        The job failed, ran too few steps, or does not follow the groups.
    """
    spec, run = _launched(spec)
    with raw_folder(log) as folder:
        with shaped_hosts(spec.hosts, rate_bps, shaped) as hosts:
            run(spec, folder, hosts=hosts, hook=Schedule(warmup=max(warmup, 2)).hook("time"))
        hooks = [read_hook(folder / f"rank{rank}" / "hook.json") for rank in range(spec.ranks)]
        if expected_groups is not None:
            _require_groups(hooks[0], expected_groups)
        return step_times(hooks, warmup)


@contextlib.contextmanager
def raw_folder(keep: Path | None) -> Iterator[Path]:
    """Folder for a job's raw files: the one to keep, made if it is missing, or one that is removed afterwards if None."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="dpro-search-raw-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def step_times(hooks: Sequence[RankFile], warmup: int) -> StepTimes:
    """Measured iterations after the warm-up, from what the hooks of all ranks wrote; `JobError` if there are too few."""
    rows = [np.array(hook.steps, dtype=np.float64) for hook in hooks]
    if min(len(row) for row in rows) < warmup + 3:
        raise JobError(f"the job ran {min(len(row) for row in rows)} steps; at least {warmup + 3} are needed to measure it")
    distances = [np.diff(row, axis=0)[warmup:] / 1e3 for row in rows]
    return StepTimes(
        iteration_us=distances[0][:, 0],
        compute_cpu_us=np.mean([row[:, 2] for row in distances], axis=0),
        comm_cpu_us=np.mean([row[:, 3] for row in distances], axis=0),
        peak_rss_bytes=max(hook.peak_rss_bytes for hook in hooks),
    )


def _require_groups(hook: HookFile, expected: tuple[tuple[str, ...], ...]) -> None:
    """Raise `JobError` unless the job's all-reduces carry exactly the groups, beside tensors that go alone."""
    members: dict[str, set[str]] = {}
    for gradient in hook.gradients:
        members.setdefault(gradient.op, set()).add(gradient.name)
    missing = [group for group in expected if set(group) not in members.values()]
    if missing:
        raise JobError(
            f"the job does not follow the plan: nothing carries the group of '{missing[0][0]}' and {len(missing[0]) - 1} more; "
            "use planned_tape of the folder that DPRO_SEARCH_PLAN names in place of hvd.DistributedGradientTape"
        )


def machine() -> str:
    """This machine in a line: processor, cores, kernel."""
    model = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")),
        platform.processor(),
    )
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}"
