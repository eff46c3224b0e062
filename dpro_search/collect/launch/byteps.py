"""The servers of a BytePS job, in place of MXNet's own servers: `byteps_servers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dpro_search.collect.launch.parameter_servers import ServerSpec


def byteps_servers(
    count: int,
    on_workers: bool = False,
    env: tuple[tuple[str, str], ...] = (),
    worker_env: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> ServerSpec:
    """Servers of BytePS; parameters are attributes of `ServerSpec`.

    BytePS names its shared memory by tensor only: workers on one machine would share their gradients, so that each gets a /dev/shm
    of its own, which needs root.
    """
    return ServerSpec(
        count=count,
        on_workers=on_workers,
        code="import byteps.server",
        env=env,
        own_shm=True,
        worker_env=lambda rank: {**_one_device(rank), **worker_env(rank)},
    )


def _one_device(rank: int) -> dict[str, str]:
    """Variables that BytePS requires of a worker with one device. Its sockets are in its own /dev/shm."""
    return {
        "DMLC_WORKER_ID": str(rank),
        "BYTEPS_LOCAL_RANK": "0",
        "BYTEPS_LOCAL_SIZE": "1",
        "BYTEPS_SOCKET_PATH": "/dev/shm",
    }
