"""Run an MXNet job with parameter servers (KVStore) under the recorder: `record_kvstore_job`, `time_kvstore_job`."""

from __future__ import annotations

import os
from pathlib import Path

from dpro_search.collect.job import Schedule, StepTimes, raw_folder, step_times
from dpro_search.collect.kvstore_slices import DEFAULT_KNOBS
from dpro_search.collect.launch.parameter_servers import SERVER_HOSTS, ServerSpec, on_workers_of, servers_of
from dpro_search.collect.launch.ranks import JobSpec, require_framework
from dpro_search.collect.mxnet_assemble import FORMAT, assemble_kvstore, read_mxnet_hook
from dpro_search.collect.server_job import ServerJob
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
) -> Trace:
    """Run a job with the hook on and write its trace to the new folder `out`.

    The number of servers is DMLC_NUM_SERVER's, else that of the workers; on shaped hosts, DPRO_SEARCH_SERVER_HOSTS says where they
    run. Other parameters and errors are those of `collect.job.record_job`.
    """
    if out.exists():
        raise InputError(f"{out}: exists already; remove it or choose another --out")
    schedule = schedule or Schedule()
    require_framework(spec.interpreter, ("mxnet",), "mxnet")
    job = _job(spec, rate_bps, shaped)
    with raw_folder(keep_raw) as raw:
        job.describe(raw, FORMAT)
        job.run(raw, schedule.hook("record"))
        trace = assemble_kvstore(raw)
        trace.save(out)
        return trace


def time_kvstore_job(spec: JobSpec, *, rate_bps: float | None = None, shaped: bool = False, warmup: int = 5) -> StepTimes:
    """Run a job and measure its steps; the recorder only reads the clock.

    Raises
    ------
    JobError
        The job failed, or ran too few steps.
    """
    with raw_folder(None) as folder:
        _job(spec, rate_bps, shaped).run(folder, Schedule(warmup=max(warmup, 2)).hook("time"))
        return step_times([read_mxnet_hook(folder / f"rank{rank}" / "hook.json") for rank in range(spec.ranks)], warmup)


def _job(spec: JobSpec, rate_bps: float | None, shaped: bool) -> ServerJob:
    env = {**os.environ, **spec.env}
    return ServerJob(
        spec=spec,
        servers=ServerSpec(count=servers_of(env, spec.ranks), on_workers=on_workers_of(env)),
        knobs={name: env.get(name, value) for name, value in {**DEFAULT_KNOBS, SERVER_HOSTS: "own"}.items()},
        command=spec.command,
        rate_bps=rate_bps,
        shaped=shaped,
    )
