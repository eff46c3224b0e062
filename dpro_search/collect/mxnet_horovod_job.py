"""Run an MXNet + Horovod job (on MPI) under the recorder: `record_mxnet_horovod_job`, `time_mxnet_horovod_job`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dpro_search.collect.job import HorovodKind, Schedule, StepTimes, on_mpi, raw_folder, record_horovod, shaped_hosts, step_times
from dpro_search.collect.launch.mpi import run_mpi_job
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.collect.mxnet_horovod_assemble import FORMAT, assemble_mxnet_horovod, read_mxnet_horovod_hook
from dpro_search.collect.trace import Trace

_HOOK = {"FRAMEWORK": "mxnet"}
_KIND = HorovodKind(
    modules=("mxnet", "horovod.mxnet"),
    environment="mxnet",
    run=run_mpi_job,
    assemble=assemble_mxnet_horovod,
    hook=_HOOK,
    format=FORMAT,
)


def record_mxnet_horovod_job(
    spec: JobSpec,
    out: Path,
    *,
    rate_bps: float | None = None,
    shaped: bool = False,
    schedule: Schedule | None = None,
    keep_raw: Path | None = None,
) -> Trace:
    """Run a job with the hook on and write its trace to the new folder `out`; parameters and errors are those of `record_job`."""
    return record_horovod(_on_cores(spec), out, _KIND, rate_bps=rate_bps, shaped=shaped, schedule=schedule, keep_raw=keep_raw)


def time_mxnet_horovod_job(
    spec: JobSpec, *, rate_bps: float | None = None, shaped: bool = False, warmup: int = 5, log: Path | None = None
) -> StepTimes:
    """Run a job and measure its steps; parameters and errors are those of `time_job`."""
    with raw_folder(log) as folder:
        with shaped_hosts(spec.hosts, rate_bps, shaped) as hosts:
            run_mpi_job(_on_cores(spec), folder, hosts=hosts, hook={**Schedule(warmup=max(warmup, 2)).hook("time"), **_HOOK})
        return step_times([read_mxnet_horovod_hook(folder / f"rank{rank}") for rank in range(spec.ranks)], warmup)


def _on_cores(spec: JobSpec) -> JobSpec:
    """On MPI, and with one compute thread where each rank has one core."""
    threads = {} if not spec.cores or "OMP_NUM_THREADS" in spec.env else {"OMP_NUM_THREADS": "1"}
    return on_mpi(replace(spec, env={**spec.env, **threads}))
