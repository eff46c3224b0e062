"""On which hosts the servers of a job run: hosts of their own, or the workers'. The link of a host is shared by its processes.

Workers have the hosts 0 to workers - 1, or the first of these where several share a host; a host of its own has a number from
there on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpro_search.collect.trace import Ints
from dpro_search.errors import InputError


def process_hosts(workers: int, servers: int, server_host: Sequence[int], workers_per_host: int = 1) -> Ints:
    """Host of each worker, then of each server, [workers + servers]; without `server_host`, servers have hosts of their own.

    Raises
    ------
    InputError
        Not one host for each server.
    """
    chosen = tuple(server_host) or own_hosts(workers, servers)
    if len(chosen) != servers or min(chosen) < 0:
        raise InputError(f"a job with {servers} servers needs a host for each, not {server_host}")
    return np.array([*(worker // workers_per_host for worker in range(workers)), *chosen])


def own_hosts(workers: int, servers: int) -> tuple[int, ...]:
    """A host for each server alone."""
    return tuple(range(workers, workers + servers))


def hosts_of_workers(hosts: int, servers: int) -> tuple[int, ...]:
    """The workers' hosts, which take servers round-robin.

    Servers are in the order of ps-lite's own numbers, by which keys are given out: it numbers them by address, the last one first,
    so that those of one host follow each other.
    """
    return tuple(host for host in reversed(range(hosts)) for _ in range(host, servers, hosts))


def on_workers(workers: int, server_host: Sequence[int]) -> bool:
    """Whether all servers are on workers' hosts."""
    return bool(server_host) and max(server_host) < workers
