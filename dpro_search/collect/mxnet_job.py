"""Run an MXNet job with parameter servers (KVStore) under the recorder: `record_kvstore_job`, `time_kvstore_job`."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import msgspec

from dpro_search.collect._files import write_file
from dpro_search.collect.job import Schedule, StepTimes, machine, raw_folder, shaped_hosts, step_times
from dpro_search.collect.kvstore_slices import DEFAULT_KNOBS
from dpro_search.collect.launch.parameter_servers import ServerSpec, run_with_servers, server_cores, server_hosts, servers_of
from dpro_search.collect.launch.ranks import JobSpec, require_framework
from dpro_search.collect.mxnet_assemble import FORMAT, MxnetJobFile, assemble_kvstore, read_mxnet_hook
from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError


def record_kvstore_job(
    spec: JobSpec,
    out: Path,
    *,
    rate_bps: float | None = None,
    shaped: bool = False,
    schedule: Schedule | None = None,
    keep_raw: Path | None = None,
    timeout_s: float = 3600,
) -> Trace:
    """Run a job with the hook on and write its trace to the new folder `out`.

    The number of servers is DMLC_NUM_SERVER's, else that of the workers. Other parameters and errors are those of
    `collect.job.record_job`; a job that takes longer than `timeout_s` is ended.
    """
    if out.exists():
        raise InputError(f"{out}: exists already; remove it or choose another --out")
    schedule = schedule or Schedule()
    require_framework(spec.interpreter, ("mxnet",), "mxnet")
    env = {**os.environ, **spec.env}
    servers = servers_of(env, spec.ranks)
    with raw_folder(keep_raw) as raw:
        job = MxnetJobFile(
            format=FORMAT,
            ranks=spec.ranks,
            servers=servers,
            server_hosts=server_hosts(spec, servers, shaped),
            server_cores=server_cores(spec, servers),
            command=spec.command,
            machine=machine(),
            boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            recorded_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            rate_bps=rate_bps,
            knobs={name: env.get(name, value) for name, value in DEFAULT_KNOBS.items()},
        )
        write_file(raw / "job.json", msgspec.json.encode(job))
        _run(spec, raw, schedule.hook("record"), servers, rate_bps, shaped, timeout_s)
        trace = assemble_kvstore(raw)
        trace.save(out)
        return trace


def time_kvstore_job(
    spec: JobSpec, *, rate_bps: float | None = None, shaped: bool = False, warmup: int = 5, timeout_s: float = 3600
) -> StepTimes:
    """Run a job and measure its steps; the recorder only reads the clock.

    Raises
    ------
    JobError
        The job failed, or ran too few steps.
    """
    servers = servers_of({**os.environ, **spec.env}, spec.ranks)
    with raw_folder(None) as folder:
        _run(spec, folder, Schedule(warmup=max(warmup, 2)).hook("time"), servers, rate_bps, shaped, timeout_s)
        return step_times([read_mxnet_hook(folder / f"rank{rank}" / "hook.json") for rank in range(spec.ranks)], warmup)


def _run(
    spec: JobSpec, out: Path, hook: dict[str, str], servers: int, rate_bps: float | None, shaped: bool, timeout_s: float
) -> None:
    with shaped_hosts(spec.ranks + servers, rate_bps, shaped) as hosts:
        run_with_servers(
            spec, out, ServerSpec(count=servers), hosts=hosts, hook={**hook, "FRAMEWORK": "mxnet"}, timeout_s=timeout_s
        )
