"""Run an MXNet job with BytePS under the recorder: `record_byteps_job`, `time_byteps_job`."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from dpro_search.collect.byteps_assemble import FORMAT, KNOBS, assemble_byteps, read_byteps_hook
from dpro_search.collect.job import Schedule, StepTimes, raw_folder, step_times
from dpro_search.collect.launch.parameter_servers import SERVER_HOSTS, ServerSpec, on_workers_of, servers_of
from dpro_search.collect.launch.ranks import JobSpec, require_framework
from dpro_search.collect.server_job import ServerJob
from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError, JobError, MissingCapabilityError

_MODULES = ("mxnet", "byteps.mxnet")
SERVER_CODE = "import byteps.server"
_TELL_NODE = ("PS_VERBOSE", "1")  # which of the servers each is
_SERVER_LOGS = (("BYTEPS_VAN_TRACE", "messages.log"), ("BYTEPS_SERVER_TRACE", "work.log"))
# BytePS names its shared memory by tensor only: workers on one machine would share their gradients.
_MOUNT = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
WITH_OWN_SHM = f"import os, sys; os.execvp('unshare', ['unshare', '--mount', 'sh', '-c', {_MOUNT!r}, 'sh', *sys.argv[1:]])"


def record_byteps_job(
    spec: JobSpec,
    out: Path,
    *,
    rate_bps: float | None = None,
    shaped: bool = False,
    schedule: Schedule | None = None,
    keep_raw: Path | None = None,
    logs: bool = False,
) -> Trace:
    """Run a job with the hook on and write its trace to the new folder `out`.

    The number of servers is DMLC_NUM_SERVER's, else that of the workers; on shaped hosts, DPRO_SEARCH_SERVER_HOSTS says where they
    run. Needs root: every worker gets a /dev/shm of its own. Other parameters and errors are those of `collect.job.record_job`.
    With `logs`, a build of BytePS that can also logs every message and every operation of a server, which costs some time.
    """
    if out.exists():
        raise InputError(f"{out}: exists already; remove it or choose another --out")
    schedule = schedule or Schedule()
    _require(spec)
    job = _job(spec, rate_bps, shaped, logs=logs)
    with raw_folder(keep_raw) as raw:
        job.describe(raw, FORMAT)
        first = schedule.warmup + schedule.untraced
        traced = {  # BytePS counts steps from 1, the last included
            "BYTEPS_TRACE_ON": "1",
            "BYTEPS_TRACE_START_STEP": str(first + 1),
            "BYTEPS_TRACE_END_STEP": str(first + schedule.traced),
        }
        try:
            job.run(raw, schedule.hook("record"), lambda rank: {**one_device(rank), **traced, **_log_env(raw, rank, logs)})
        except JobError as error:
            raise explained(error) from error
        trace = assemble_byteps(raw)
        trace.save(out)
        return trace


def explained(error: JobError) -> JobError:
    """The same error, or what to do where BytePS's own tracer ended the job: it does at times, mostly with very many partitions."""
    if "'dur' has already been assigned" not in str(error):
        return error
    return JobError(
        "BytePS's own tracer ended the job ('dur' has already been assigned), as it does at times where there are very many "
        "partitions: record again, with a larger BYTEPS_PARTITION_BYTES, or fewer --traced steps"
    )


def time_byteps_job(spec: JobSpec, *, rate_bps: float | None = None, shaped: bool = False, warmup: int = 5) -> StepTimes:
    """Run a job and measure its steps; the recorder only reads the clock.

    Raises
    ------
    JobError
        The job failed, or ran too few steps.
    MissingCapabilityError
        BytePS or a permission is missing.
    """
    _require(spec)
    with raw_folder(None) as folder:
        _job(spec, rate_bps, shaped).run(folder, Schedule(warmup=max(warmup, 2)).hook("time"), one_device)
        return step_times([read_byteps_hook(folder / f"rank{rank}" / "hook.json") for rank in range(spec.ranks)], warmup)


def _job(spec: JobSpec, rate_bps: float | None, shaped: bool, *, logs: bool = False) -> ServerJob:
    env = {**os.environ, **spec.env}
    server_env = (_TELL_NODE, *(_SERVER_LOGS if logs else ()))
    return ServerJob(
        spec=replace(spec, command=(spec.interpreter, "-c", WITH_OWN_SHM, *spec.command)),
        servers=ServerSpec(count=servers_of(env, spec.ranks), on_workers=on_workers_of(env), code=SERVER_CODE, env=server_env),
        knobs={name: env.get(name, value) for name, value in {**KNOBS, SERVER_HOSTS: "own"}.items()},
        command=spec.command,
        rate_bps=rate_bps,
        shaped=shaped,
    )


def one_device(rank: int) -> dict[str, str]:
    """What BytePS asks of a worker with one device; its sockets are in its own /dev/shm."""
    return {
        "DMLC_WORKER_ID": str(rank),
        "BYTEPS_LOCAL_RANK": "0",
        "BYTEPS_LOCAL_SIZE": "1",
        "BYTEPS_SOCKET_PATH": "/dev/shm",
    }


def _log_env(raw: Path, rank: int, logs: bool) -> dict[str, str]:
    """Where a worker's trace and log go; BytePS makes no folder, and adds one for the device."""
    folder = (raw / f"rank{rank}").resolve()
    (folder / "0").mkdir(parents=True, exist_ok=True)
    env = {"BYTEPS_TRACE_DIR": str(folder)}
    return {**env, "BYTEPS_VAN_TRACE": str(folder / "messages.log")} if logs else env


def _require(spec: JobSpec) -> None:
    require_framework(spec.interpreter, _MODULES, "mxnet")
    if shutil.which("unshare") is None:
        raise MissingCapabilityError("a worker's own /dev/shm needs unshare: install util-linux")
    if os.geteuid() != 0:
        raise MissingCapabilityError("a worker's own /dev/shm needs root: run as root")
