"""Runs a job for real, as it was recorded or described, or under a plan."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dpro_search.collect._files import scratch_folder
from dpro_search.collect.launch.host_limits import HostLimits
from dpro_search.collect.launch.parameter_servers import SERVER_HOSTS
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.launch.step_times import StepTimes
from dpro_search.collect.launch.while_running import Watch
from dpro_search.collect.launchers._base import Launcher
from dpro_search.collect.trace import Trace, TraceMeta
from dpro_search.deploy.export import ExportedFiles, export_plan
from dpro_search.deploy.losses import Losses, read_losses
from dpro_search.deploy.parts.part import JobFacts, Target
from dpro_search.deploy.step_split import ComparedSplit
from dpro_search.deploy.targets import targets_for
from dpro_search.deploy.trained_run import TrainedRun
from dpro_search.errors import InputError, JobError
from dpro_search.runtime import TIMED
from dpro_search.space.plan import Plan

PLAN_VARIABLE = "DPRO_SEARCH_PLAN"
OBSERVER_VARIABLE = "DPRO_SEARCH_OBSERVER"
_REPORT_VARIABLE = "DPRO_SEARCH_REPORT"
_KNOB_VALUE = re.compile(r"[\w.+-]*", re.ASCII)  # numbers and names
_USES = {
    "tape.py": "planned_tape in place of hvd.DistributedGradientTape, or planned_averages with micro-batches; with Keras fit, "
    "groups=planned_groups(model.trainable_variables) of hvd.DistributedOptimizer",
    "xla.py": "planned_step behind the step's tf.function",
    "ddp.py": "planned_ddp in place of DistributedDataParallel",
    "fsdp.py": "planned_fsdp after fully_shard",
    "modules.py": "planned_modules before DistributedDataParallel",
    "micro_batches.py": "planned_parts or planned_gradients",
    "trainer.py": "planned_options as arguments of the Trainer",
    "parallel_plan.py": "planned = apply(model, loss_function)",
}


@dataclass(frozen=True, kw_only=True)
class JobRun:
    """One run of a job: its steps, the first losses that it printed, and where the time of its steps went if it was paced."""

    times: StepTimes
    losses: Losses
    split: ComparedSplit | None = None


@dataclass(frozen=True, kw_only=True)
class Paced:
    """How ranks run that wait in place of computing."""

    # Times of a rank's own work under a plan, as the job's observer reads them (`runtime/timed/dpro_search_paced.py`).
    times: Callable[[Plan], bytes]
    # Split of a plan's step time behind a warm-up, from what ranks wrote to a folder (`runtime/timed/dpro_search_spans.py`).
    split: Callable[[Plan, Path, int], ComparedSplit | None]


PROBE_S = 60.0  # of a job that is started to see whether its script follows a plan


@dataclass(frozen=True, kw_only=True)
class RecordedJob:
    """A job that was recorded and can run again, or one that was described and can run here."""

    # launcher, targets: How it is started, and its targets.
    launcher: Launcher
    targets: tuple[Target, ...]
    spec: JobSpec  # The job in its recorded setting.
    facts: JobFacts
    # rate_bps, shaped: The links of its hosts, and whether it has hosts of its own.
    rate_bps: float | None
    shaped: bool
    command_from_trace: bool = False  # Whether the command is the one that the trace names.
    watch: Watch | None = None  # Called now and then while the job runs.
    described: bool = False  # Whether the empty plan is exported too: a script follows any plan alike.
    paced: Paced | None = None  # None: ranks compute.
    precision: str | None = None  # Precision of a parallel job's matrix products, see `losses.tolerance_of`.
    target_loss: float | None = None  # That every run ends at; None: it ends after its steps.

    @staticmethod
    def of(
        trace: Trace, launcher: Launcher, targets: tuple[Target, ...], facts: JobFacts, command: Sequence[str] = ()
    ) -> RecordedJob:
        """The job of a trace; `command` in place of the recorded one.

        Raises
        ------
        InputError
            The trace has no command, its hosts have different numbers of ranks, or a knob is neither a number nor a name.
        """
        meta = trace.meta
        chosen = tuple(command) or meta.command
        if not chosen:
            raise InputError("the trace has no command of the job: write it after '--', like '-- python train.py'")
        servers = facts.servers.count
        workers = meta.ranks - servers
        cores = meta.cores[:workers]
        env = _recorded_env(meta, launcher.knobs, servers)
        ranks_per_host = 1 if servers else meta.ranks_per_host
        if ranks_per_host is None:
            raise InputError("the recorded job's hosts had different numbers of ranks: no such job can be started here")
        return RecordedJob(
            launcher=launcher,
            targets=targets,
            spec=JobSpec(
                command=chosen,
                ranks=workers,
                ranks_per_host=ranks_per_host,
                cores=cores if min(cores) >= 0 else (),
                env=env,
                limits=HostLimits(cpus=meta.host_cpus, changes_text=meta.host_changes),
            ),
            facts=facts,
            rate_bps=meta.rate_bps,
            shaped=len(set(meta.hosts)) > 1 or meta.rate_bps is not None,
            command_from_trace=not command,
        )

    def trained(self) -> tuple[TrainedRun, ...]:
        """The runs so far of a job that is trained to a loss."""
        return ()

    def run(self, plan: Plan, *, warmup: int, timeout_s: float | None = None) -> JobRun:
        """Run the job under a plan (the empty one: as recorded) and measure its steps.

        Parameters
        ----------
        warmup
            Steps that are left out.
        timeout_s
            Time limit; None: that of `spec`.

        Raises
        ------
        InputError
            The plan has a field that this kind of job cannot follow.
        JobError
            The job failed, took too long, ran too few steps, or its script does not follow the plan.
        """
        with scratch_folder("plan") as work:
            report = work / "report"
            report.mkdir()
            exported = self._exported(plan, work)
            spec = with_exported(self.spec, exported, report)
            if self.paced is not None:
                times = work / "paced.json"
                times.write_bytes(self.paced.times(plan))
                spec = with_observer(spec, "paced", times)
            if timeout_s is not None:
                spec = replace(spec, timeout_s=timeout_s)
            steps = self.launcher.time(
                spec,
                rate_bps=self.rate_bps,
                shaped=self.shaped,
                warmup=warmup,
                expected_groups=plan.tensor_groups,
                watch=self.watch,
            )
            _require_followed(exported, report)
            if self.paced is not None:
                return JobRun(times=steps, losses=(), split=self.paced.split(plan, work, warmup))
            return JobRun(times=steps, losses=read_losses(report))

    def helpers(self, plan: Plan) -> frozenset[str]:
        """Names of the files of a plan that the script has to use; empty: none, or the job is paced and is not probed."""
        if self.paced is not None:
            return frozenset()
        with scratch_folder("plan") as work:
            exported = self._exported(plan, work)
            return frozenset() if exported is None else frozenset(exported.helpers)

    def probe(self, plan: Plan) -> None:
        """Start the job under a plan to see whether its script follows the plan: until it has, but for `PROBE_S` at the most.

        A script that has not come that far when the time is up passes: `run` tells.

        Raises
        ------
        JobError
            The job ended by itself, and its script does not use the plan's files or failed.
        """
        with scratch_folder("plan") as work:
            report = work / "report"
            report.mkdir()
            exported = self._exported(plan, work)
            used = tuple(_used(report, name) for name in exported.helpers) if exported is not None else ()
            spec = replace(with_exported(self.spec, exported, report), timeout_s=PROBE_S, ends_with=used)
            started = time.monotonic()
            try:
                self.launcher.time(
                    spec,
                    rate_bps=self.rate_bps,
                    shaped=self.shaped,
                    warmup=0,
                    expected_groups=plan.tensor_groups,
                    watch=self.watch,
                )
            except (JobError, InputError):  # a job that was ended early lacks the files that it writes at its end
                if time.monotonic() - started >= PROBE_S or (used and all(path.exists() for path in used)):
                    return
                _require_followed(exported, report)
                raise
            _require_followed(exported, report)

    def _exported(self, plan: Plan, work: Path) -> ExportedFiles | None:
        """The files of a plan; None: the job follows it without any."""
        if plan == Plan() and not self.described:
            return None
        return export_plan(plan, work / "plan", targets_for(plan, self.targets), self.facts)


def with_observer(spec: JobSpec, name: Literal["paced", "timed"], file: Path) -> JobSpec:
    """The job with an observer of its parallel plan in the ranks; `file` is what it reads or writes."""
    return replace(spec, env={**spec.env, OBSERVER_VARIABLE: f"{name}:{file}"})


def _recorded_env(meta: TraceMeta, knobs: frozenset[str], servers: int) -> dict[str, str]:
    """Variables that set the recorded knobs: only those of the launcher (`knobs`), for a trace could name LD_PRELOAD as well."""
    env = {name: value for name, value in meta.knobs.items() if name in knobs and value}
    for name, value in env.items():
        if not _KNOB_VALUE.fullmatch(value):
            raise InputError(f"meta.json: knobs: {name}={value}: neither a number nor a name; record the job again")
    if meta.settings is not None:
        env["HOROVOD_FUSION_THRESHOLD"] = str(meta.settings.fusion_threshold_bytes)
        env["HOROVOD_CYCLE_TIME"] = f"{meta.settings.cycle_time_us / 1000:.6g}"
    if servers:
        env["DMLC_NUM_SERVER"] = str(servers)
        env.setdefault(SERVER_HOSTS, "own")  # the setting of recordings of earlier versions
    return env


def with_exported(spec: JobSpec, exported: ExportedFiles | None, report: Path) -> JobSpec:
    """The job with the variables of a plan and its files on the path, and with the modules that observe it from inside."""
    env = {**spec.env, _REPORT_VARIABLE: str(report)}
    path = [str(TIMED)]
    if exported is not None:
        env |= {**exported.env, PLAN_VARIABLE: str(exported.folder)}
        path.append(str(exported.folder))
    user = spec.env.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
    env["PYTHONPATH"] = os.pathsep.join([*path, *([user] if user else [])])
    return replace(spec, env=env)


def _used(report: Path, name: str) -> Path:
    """The file that a helper of a plan writes when the script uses it."""
    return report / f"used-{name}"


def _require_followed(exported: ExportedFiles | None, report: Path) -> None:
    """Raise `JobError` unless the script used every helper of the plan."""
    for name in exported.helpers if exported is not None else ():
        if not _used(report, name).exists():
            raise JobError(
                f"the job does not follow the plan: its script does not use {name} ({_USES[name]}); {PLAN_VARIABLE} "
                "names the folder with the files of the plan"
            )
