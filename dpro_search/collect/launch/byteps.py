"""Start a job of BytePS: workers with a /dev/shm of their own, and its servers: `run_byteps`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from dpro_search.collect.launch.netns import ShapedHosts
from dpro_search.collect.launch.parameter_servers import ServerSpec, run_with_servers
from dpro_search.collect.launch.ranks import JobSpec
from dpro_search.errors import MissingCapabilityError

_SERVER_CODE = "import byteps.server"
# BytePS names its shared memory by tensor only: workers on one machine would share their gradients.
_MOUNT = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
_WITH_OWN_SHM = f"import os, sys; os.execvp('unshare', ['unshare', '--mount', 'sh', '-c', {_MOUNT!r}, 'sh', *sys.argv[1:]])"


def run_byteps(
    spec: JobSpec,
    out: Path,
    servers: ServerSpec,
    *,
    hosts: ShapedHosts | None = None,
    hook: Mapping[str, str] | None = None,
    worker_env: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> None:
    """Run workers, scheduler and servers to their end; parameters and errors are those of `run_with_servers`.

    What the servers run is BytePS's, whatever their spec says. `MissingCapabilityError`: it needs unshare, and root.
    """
    require_own_shm()
    run_with_servers(
        replace(spec, command=(spec.interpreter, "-c", _WITH_OWN_SHM, *spec.command)),
        out,
        replace(servers, code=_SERVER_CODE),
        hosts=hosts,
        hook=hook,
        worker_env=lambda rank: {**_one_device(rank), **worker_env(rank)},
    )


def require_own_shm() -> None:
    """Raise `MissingCapabilityError` unless workers can have a /dev/shm of their own."""
    if shutil.which("unshare") is None:
        raise MissingCapabilityError("a worker's own /dev/shm needs unshare: install util-linux")
    if os.geteuid() != 0:
        raise MissingCapabilityError("a worker's own /dev/shm needs root: run as root")


def _one_device(rank: int) -> dict[str, str]:
    """What BytePS asks of a worker with one device; its sockets are in its own /dev/shm."""
    return {
        "DMLC_WORKER_ID": str(rank),
        "BYTEPS_LOCAL_RANK": "0",
        "BYTEPS_LOCAL_SIZE": "1",
        "BYTEPS_SOCKET_PATH": "/dev/shm",
    }
