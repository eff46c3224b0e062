"""`TrainedJob`: real runs to the target loss, for `validate`: under the scheme of today and under those of plans."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

import dpro_search
from dpro_search.collect._files import scratch_folder
from dpro_search.collect.launch.cpu_quota import hosts_with_quotas
from dpro_search.collect.launch.parameter_servers import ServerSpec, run_with_servers, servers_of
from dpro_search.collect.launch.ranks import JobSpec, free_port, require_framework, run_ranks
from dpro_search.collect.launch.step_times import StepTimes
from dpro_search.deploy.export import export_plan
from dpro_search.deploy.jobs import JobRun, RecordedJob
from dpro_search.deploy.parts.part import JobFacts, Target
from dpro_search.deploy.targets import targets_for
from dpro_search.deploy.trained_run import TrainedRun
from dpro_search.errors import InputError, JobError
from dpro_search.kinds._job import JobInScenario
from dpro_search.kinds._job_on_cluster import searched_job
from dpro_search.kinds._options import PlanOptions
from dpro_search.kinds.synchronised.job import SynchronisedJob
from dpro_search.kinds.synchronised.recording import RecordedRun, ShortRuns, recorded_runs
from dpro_search.runtime.schemes import Scheme, parse_scheme
from dpro_search.runtime.synchronisation.recording import SEED_VARIABLE
from dpro_search.search.run_folder import read_run
from dpro_search.space.plan import Plan

_PATIENCE, _LEAST_PATIENCE_S = 5.0, 60.0  # time limit of a training: so many times the longest recorded one, and at least this
_START_S = 300.0  # processes may take so long to start and to end
# By framework, what its scripts import, and the environment of make_env.sh that has it.
_NEEDS = {"pytorch": (("torch", "ray"), "synchronisation"), "mxnet": (("mxnet",), "mxnet")}
_RAY = (
    "import ray, sys; head = ray.init('local', num_cpus=2, include_dashboard=False, log_to_driver=False); "
    "print('at', head.address_info['address'], flush=True); sys.stdin.read()"
)
_STORE = (
    "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=True, wait_for_workers=False); "
    "print('at', sys.argv[1], flush=True); sys.stdin.read()"
)


@dataclass(frozen=True, kw_only=True)
class TrainedJob(RecordedJob):
    """A script with `synchronise`, whose workers all run on this machine; a run ends at the target loss."""

    launcher: None = None  # type: ignore[assignment]  # it is started here
    today: Scheme
    longest_s: float
    # records, runs: File in which the runs are recorded, and those of this call.
    records: Path
    runs: list[TrainedRun] = field(default_factory=list)

    def trained(self) -> tuple[TrainedRun, ...]:
        return tuple(self.runs)

    def run(self, plan: Plan, *, warmup: int, timeout_s: float | None = None) -> JobRun:
        """Train to the target; the one iteration of the run is the time that this took. `warmup` has no meaning here.

        Raises
        ------
        JobError
            A worker failed, the target was not reached in time, or the script does not follow the plan.
        """
        assert self.target_loss is not None
        scheme = self.today if plan.synchronisation is None else parse_scheme(plan.synchronisation)
        limit_s = timeout_s or max(_PATIENCE * self.longest_s, _LEAST_PATIENCE_S)
        seed = sum(run.scheme == scheme for run in self._recorded())
        with scratch_folder("training") as work:
            env = dict(self.spec.env)
            if plan != Plan():
                env |= export_plan(plan, work / "plan", targets_for(plan, self.targets), self.facts).env
            env |= {
                "DPRO_SEARCH_TARGET_LOSS": repr(self.target_loss),
                "DPRO_SEARCH_LIMIT_S": repr(limit_s),
                "DPRO_SEARCH_RECORD": str(work / "records.jsonl"),
                SEED_VARIABLE: str(seed),
            }
            train(replace(self.spec, env=env, timeout_s=limit_s + _START_S), work, scheme, self.facts.framework)
            record = self._kept(work / "records.jsonl", scheme)
        times_s, losses = record.curve
        reached = np.flatnonzero(losses <= self.target_loss)
        if not len(reached):
            raise JobError(
                f"{scheme}: the target loss of {self.target_loss:g} was not reached: {losses[-1]:.3g} after {record.end_s:.0f} s; "
                "give a longer --timeout, or search with --set target_loss=..."
            )
        time_s = float(times_s[reached[0]])
        until = record.time_s <= time_s
        self.runs.append(
            TrainedRun(
                synchronisation=str(scheme),
                seed=seed,
                time_s=time_s,
                final_loss=float(losses[reached[0]]),
                steps=int(record.steps[until].sum()),
                commits=int(until.sum()),
                bytes=2 * 4 * record.elements * int(until.sum()),
                waiting_share=record.waiting_share,
            )
        )
        nothing = np.zeros(1)
        return JobRun(
            times=StepTimes(iteration_us=np.array([1e6 * time_s]), compute_cpu_us=nothing, comm_cpu_us=nothing), losses=()
        )

    def _recorded(self) -> tuple[RecordedRun, ...]:
        short_runs = recorded_runs(self.records) if self.records.is_file() else None
        return () if short_runs is None else short_runs.runs

    def _kept(self, written: Path, scheme: Scheme) -> RecordedRun:
        """The run that the workers recorded, which is appended to `records`."""
        if not written.is_file():
            raise JobError("the script records nothing: it must call synchronise(model, optimizer) and, at its end, sync.close()")
        short_runs = recorded_runs(written)
        if short_runs is None or short_runs.runs[-1].scheme != scheme:
            raise JobError(f"the script does not follow {scheme}: it must call synchronise(model, optimizer) without a scheme")
        self.records.parent.mkdir(parents=True, exist_ok=True)
        with self.records.open("ab") as file:
            file.write(written.read_bytes())
        return short_runs.runs[-1]


def train(spec: JobSpec, folder: Path, scheme: Scheme, framework: str | None) -> None:
    """Run all workers of a job to their end, and what they meet at: servers of ps-lite for MXNet, else a Ray or a store."""
    places = [{"RANK": str(rank), "WORLD_SIZE": str(spec.ranks)} for rank in range(spec.ranks)]
    if framework == "mxnet":
        if spec.limits:
            raise InputError("--host-cpus, --host-change: only workers of PyTorch jobs can have quotas; pace those of MXNet")
        servers = ServerSpec(count=servers_of(os.environ, workers=1), worker_env=places.__getitem__)
        run_with_servers(spec, folder, servers)
        return
    engine, quotas = _engine(scheme, spec.interpreter, spec.env, folder), hosts_with_quotas(spec.ranks, spec.limits)
    with engine as engine_env, quotas as hosts:
        run_ranks(replace(spec, env={**spec.env, **engine_env}), folder, places, hosts=hosts)


def trained_job(source: ShortRuns, facts: JobFacts, targets: tuple[Target, ...], run: Path, command: Sequence[str]) -> TrainedJob:
    """The job of some recorded runs as a search's run folder has it, with `command` for each worker; `InputError` without one."""
    if not command:
        raise InputError("the recording has no command of the job: write it after '--', like '-- python train.py'")
    job = SynchronisedJob.of(source, PlanOptions())
    scenario = searched_job(JobInScenario(job), read_run(run)).scenario
    today = job.today(scenario)
    spec = JobSpec(command=tuple(command), ranks=source.workers, env=_environment(today))
    needed, environment = _NEEDS[source.framework]
    require_framework(spec.interpreter, needed, environment)
    return TrainedJob(
        targets=targets,
        spec=spec,
        facts=facts,
        rate_bps=None,
        shaped=False,
        today=today,
        target_loss=job.target_loss(scenario),
        longest_s=max(each.end_s for each in source.runs),
        records=run / "trained.jsonl",
    )


def _environment(scheme: Scheme) -> dict[str, str]:
    """Variables of all workers under the scheme of today; the package is importable in each process, also in Ray's."""
    path = [str(Path(dpro_search.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "DPRO_SEARCH_SYNCHRONISATION": str(scheme),
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@contextmanager
def _engine(scheme: Scheme, python: str, env: Mapping[str, str], work: Path) -> Iterator[dict[str, str]]:
    """Variables of the service that connects workers of a scheme: a Ray of their own, or a store."""
    if scheme.collective:
        port = free_port()
        with _served([python, "-c", _STORE, str(port)], env):
            yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return
    token = work / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    ray_env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with _served([python, "-c", _RAY], {**env, **ray_env}) as address:
        yield {**ray_env, "RAY_ADDRESS": address}


@contextmanager
def _served(command: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    """A process that says where it is, and ends when its input does: also when this process is killed."""
    environment = {**os.environ, **env}
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            line = next((line for line in process.stdout if line.startswith("at ")), None)
            if line is None:
                said = process.stderr.read().strip().splitlines()[-1:] or ["nothing"]
                raise JobError(f"{command[0]}: what the workers meet at did not start: {said[0]}")
            yield line.split()[1]
        finally:
            with suppress(OSError):
                process.stdin.close()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
