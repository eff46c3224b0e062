"""Run a distributed PyTorch job (Gloo) under the recorder: `record_..._job` traces it, `time_ddp_job` only measures."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec

from dpro_search.collect._files import write_file
from dpro_search.collect.job import Schedule, StepTimes, machine, raw_folder, shaped_hosts, step_times
from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ports import free_port
from dpro_search.collect.launch.ranks import JobSpec, require_framework, run_ranks
from dpro_search.collect.torch_assemble import assemble_torch
from dpro_search.collect.torch_files import FORMAT, FSDP_FORMAT, TorchJobFile, read_torch_hook
from dpro_search.collect.trace import Trace
from dpro_search.errors import InputError

_PORT = 29500  # torchrun's own; each job has its network namespaces for itself


def record_ddp_job(
    spec: JobSpec,
    out: Path,
    *,
    rate_bps: float | None = None,
    shaped: bool = False,
    schedule: Schedule | None = None,
    keep_raw: Path | None = None,
) -> Trace:
    """Run a DistributedDataParallel job with the hook on and write its trace to the new folder `out`.

    Parameters and errors are those of `collect.job.record_job`.
    """
    return _recorded(FORMAT, spec, out, rate_bps, shaped, schedule, keep_raw)


def record_fsdp_job(
    spec: JobSpec,
    out: Path,
    *,
    rate_bps: float | None = None,
    shaped: bool = False,
    schedule: Schedule | None = None,
    keep_raw: Path | None = None,
) -> Trace:
    """The same for a job whose model ``torch.distributed.fsdp.fully_shard`` divides."""
    return _recorded(FSDP_FORMAT, spec, out, rate_bps, shaped, schedule, keep_raw)


def time_ddp_job(spec: JobSpec, *, rate_bps: float | None = None, shaped: bool = False, warmup: int = 5) -> StepTimes:
    """Run a job of either kind and measure its steps; the recorder only reads the clock.

    Raises
    ------
    JobError
        The job failed, or ran too few steps.
    """
    with raw_folder(None) as folder:
        _run(spec, folder, Schedule(warmup=max(warmup, 2)).hook("time"), rate_bps, shaped)
        return step_times([read_torch_hook(folder / f"rank{rank}" / "hook.json") for rank in range(spec.ranks)], warmup)


def _recorded(
    kind: str, spec: JobSpec, out: Path, rate_bps: float | None, shaped: bool, schedule: Schedule | None, keep_raw: Path | None
) -> Trace:
    if out.exists():
        raise InputError(f"{out}: exists already; remove it or choose another --out")
    schedule = schedule or Schedule()
    require_framework(spec.interpreter, ("torch",), "torch")
    with raw_folder(keep_raw) as raw:
        job = TorchJobFile(
            format=kind,
            ranks=spec.ranks,
            command=spec.command,
            machine=machine(),
            recorded_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            rate_bps=rate_bps,
        )
        write_file(raw / "job.json", msgspec.json.encode(job))
        _run(spec, raw, schedule.hook("record"), rate_bps, shaped)
        trace = assemble_torch(raw)
        trace.save(out)
        return trace


def _run(spec: JobSpec, out: Path, hook: dict[str, str], rate_bps: float | None, shaped: bool) -> None:
    with shaped_hosts(spec.ranks, rate_bps, shaped) as hosts:
        port = _PORT if hosts else free_port()
        env = [_rank_env(spec, rank, hosts, port) for rank in range(spec.ranks)]
        run_ranks(spec, out, env, hosts=hosts, hook={**hook, "FRAMEWORK": "pytorch"})


def _rank_env(spec: JobSpec, rank: int, hosts: ShapedHosts | None, port: int) -> dict[str, str]:
    """What torchrun would set, for one rank on each host; and one thread for a rank that is pinned to one core."""
    alone = hosts is not None
    values = {
        "RANK": rank,
        "WORLD_SIZE": spec.ranks,
        "LOCAL_RANK": 0 if alone else rank,
        "LOCAL_WORLD_SIZE": 1 if alone else spec.ranks,
        "GROUP_RANK": rank if alone else 0,
        "MASTER_ADDR": hosts.address(0) if hosts else "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "eth0" if alone else "lo",
    }
    threads = {"OMP_NUM_THREADS": "1"} if spec.cores and "OMP_NUM_THREADS" not in spec.env else {}
    return threads | {key: str(value) for key, value in values.items()}
