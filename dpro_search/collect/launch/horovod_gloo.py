"""Start a Horovod job on Gloo: its rendezvous server, and its ranks: `run_horovod_gloo`."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.ranks import JobSpec, run_ranks
from dpro_search.errors import JobError
from dpro_search.runtime import WORKERS


def run_horovod_gloo(spec: JobSpec, out: Path, *, hosts: ShapedHosts | None = None, hook: Mapping[str, str] | None = None) -> None:
    """Run a Horovod job to its end; parameters and errors are those of `run_ranks`."""
    interpreter = spec.interpreter
    names = hosts.names if hosts else tuple("localhost" for _ in range(spec.ranks))
    slots = ",".join(f"{name}:1" for name in names) if hosts else f"localhost:{spec.ranks}"
    server = subprocess.Popen(
        [interpreter, str(WORKERS / "rendezvous.py"), slots, str(spec.ranks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert server.stderr is not None
        port = server.stdout.readline().strip()
        if not port:
            raise JobError(f"{interpreter}: the rendezvous server did not start: {server.stderr.read().strip()[-300:]}")
        run_ranks(spec, out, [_rank_env(rank, spec.ranks, hosts, port) for rank in range(spec.ranks)], hosts=hosts, hook=hook)
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()


def _rank_env(rank: int, ranks: int, hosts: ShapedHosts | None, port: str) -> dict[str, str]:
    """Variables that horovodrun would set."""
    alone = hosts is not None
    values = {
        "HOSTNAME": hosts.names[rank] if hosts else "localhost",
        "RANK": rank,
        "SIZE": ranks,
        "LOCAL_RANK": 0 if alone else rank,
        "LOCAL_SIZE": 1 if alone else ranks,
        "CROSS_RANK": rank if alone else 0,
        "CROSS_SIZE": ranks if alone else 1,
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_IFACE": "eth0" if alone else "lo",
        "GLOO_RENDEZVOUS_ADDR": hosts.bridge_address if hosts else "127.0.0.1",
        "GLOO_RENDEZVOUS_PORT": port,
    }
    return {f"HOROVOD_{key}": str(value) for key, value in values.items()}
