"""Two ranks that share one GPU, each in a process of its own, over NCCL's sockets: their collectives are real kernels.

NCCL refuses two ranks on one GPU of a host. Told that they are on two hosts (NCCL_HOSTID) it connects them by its network
transport. The GPU runs their kernels in turn, so that times are not those of two GPUs, but prediction and measurement share that.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.validation.gpu_jobs.jobs import GpuJob, Training, smaller
from experiments.validation.gpu_jobs.parallel import DDP_VARIANTS, FSDP_VARIANTS, Wrap, replicated, sharded
from experiments.validation.gpu_jobs.results import RESULTS, Results
from experiments.validation.gpu_jobs.timing import recorded, step_times

RANKS = 2
STEPS = 8  # of a round
ROUNDS = 2
FSDP = GpuJob(name="fsdp-2-ranks-bert-4-blocks", model="bert", batch=8, sequence=128, bf16=True, blocks=4)
DDP = GpuJob(name="ddp-2-ranks-resnet50-b16", model="resnet50", batch=16)


def run_ranks(folder: Path, seconds: float, device: str, *, small: bool) -> list[str]:
    """Run both ranks, which leave `rank0/results.json` and profiles in the folder; what failed, a text for each."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "experiments.validation.gpu_jobs", "rank", str(folder), "--seconds", str(seconds)]
    command += ["--device", device, *(["--small"] if small else [])]
    logs, processes = [folder / f"rank{rank}.log" for rank in range(RANKS)], []
    for rank, log in enumerate(logs):
        told = {"NCCL_HOSTID": f"host{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        with log.open("w") as output:
            processes.append(
                subprocess.Popen([*command, "--rank", str(rank)], env=os.environ | told, stdout=output, stderr=subprocess.STDOUT)
            )
    until = time.perf_counter() + seconds
    failed = []
    for rank, process in enumerate(processes):
        try:
            code = process.wait(max(until - time.perf_counter(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code:
            failed.append(f"rank {rank} ended with {code}: {logs[rank].read_text()[-1500:]}")
    return failed


def run_rank(folder: Path, rank: int, seconds: float, device: str, *, small: bool) -> None:
    """What each of the ranks does."""
    results = Results(folder / f"rank{rank}", seconds)
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=max(seconds, 10)),
    )
    fsdp: dict[str, Wrap] = {name: sharded(**options) for name, options in FSDP_VARIANTS.items()}
    ddp: dict[str, Wrap] = {name: replicated(**options) for name, options in DDP_VARIANTS.items() if name != "bucket_cap_mb=1"}
    jobs: tuple[tuple[GpuJob, dict[str, Wrap], dict[str, Any]], ...] = ((FSDP, fsdp, {"autocast": False}), (DDP, ddp, {}))
    for job, wraps, options in jobs:
        job = smaller(job) if small else job
        with results.case(job.name, needs_s=0):  # without a look at the clock, on which ranks might differ
            running = {name: Training(job, device, wrap=wrap, **options) for name, wrap in wraps.items()}
            for number in range(ROUNDS):
                for name, training in running.items():
                    results.add_round(job.name, name, step_times(training.step, STEPS), loss=float(training.loss))
                    results.write()
                if not number:
                    recorded(running["as recorded"].step, folder / f"{job.name}.rank{rank}.json.gz", profile_memory=True)
            running.clear()
    dist.barrier()
    results.write()
    os._exit(0)  # what is left to tear down waits for the other rank at times


def merged(results: Results, folder: Path) -> None:
    """Take over what the ranks left."""
    import json

    left = folder / "rank0" / RESULTS
    if left.exists():
        facts = json.loads(left.read_text())
        for part in ("times", "errors"):
            results.facts[part].update(facts[part])
    for path in sorted(folder.glob("*.json.gz")):
        results.add_profile(path, job=path.name.split(".")[0])
