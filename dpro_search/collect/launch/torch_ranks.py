"""Start the ranks of a PyTorch job as torchrun would, on hosts of their own or on this machine: `run_torch_ranks`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec, free_port, run_ranks

_PORT = 29500  # torchrun's own; each job has its network namespaces for itself


def run_torch_ranks(spec: JobSpec, out: Path, *, hosts: ShapedHosts | None = None, hook: Mapping[str, str] | None = None) -> None:
    """Run a job of torch.distributed to its end; parameters and errors are those of `run_ranks`.

    A rank that is pinned to one core, or shares a host with others, gets one compute thread, unless the job or this process's
    environment sets how many (https://docs.pytorch.org/docs/stable/elastic/run.html: torchrun sets OMP_NUM_THREADS likewise).
    """
    port = _PORT if hosts else free_port()
    threads = spec.thread_env
    if hosts is None and spec.ranks > 1 and "OMP_NUM_THREADS" not in {**os.environ, **spec.env}:
        threads = {"OMP_NUM_THREADS": "1"}
    per_host = spec.ranks_per_host if hosts else spec.ranks
    env = [{**threads, **_rank_env(rank, spec.ranks, per_host, hosts, port)} for rank in range(spec.ranks)]
    run_ranks(spec, out, env, hosts=hosts, hook=hook, several_on_a_host=True)


def _rank_env(rank: int, ranks: int, per_host: int, hosts: ShapedHosts | None, port: int) -> dict[str, str]:
    """Variables that torchrun would set, and Gloo's interface, over which ranks of one host reach each other without its link."""
    values = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank % per_host,
        "LOCAL_WORLD_SIZE": per_host,
        "GROUP_RANK": rank // per_host,
        "MASTER_ADDR": hosts.address(0) if hosts else "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "eth0" if hosts else "lo",
    }
    return {key: str(value) for key, value in values.items()}
