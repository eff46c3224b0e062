"""How many parameter servers there are, and on which hosts they run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from dpro_search.space.plan import Plan
from dpro_search.space.servers.byteps_job import BytepsJob
from dpro_search.space.servers.kvstore_job import KvstoreJob
from dpro_search.space.servers.placement import hosts_of_workers, on_workers, own_hosts
from dpro_search.space.transformations._base import Choice, JobFacts, Knob

MOST_SERVERS = 1024
_MOST_TRIED = 16


class ServerCount(Knob):
    """More servers than recorded take the recorded cores in turn."""

    name = "servers"
    fields = ("servers",)

    def legal(self, plan: Plan) -> str | None:
        if plan.servers is not None and plan.servers > MOST_SERVERS:
            return f"servers={plan.servers}: at most {MOST_SERVERS} are replayed"
        return None

    @cached_property
    def choice(self) -> Choice:
        recorded = int(self.job.values["servers"])
        counts = [count for count in range(1, min(max(2 * recorded, 4), _MOST_TRIED) + 1) if count != recorded]
        return self.chosen_from(counts)


class ServerPlacement(Knob):
    """Servers on the workers' hosts, or on hosts of their own; there is nothing to choose where links have no limit."""

    name = "placement"
    fields = ("servers_on_workers",)

    def __init__(self, job: JobFacts, *, limited: bool) -> None:
        self.limited = limited
        super().__init__(job)

    def simplest(self, plan: Plan) -> Plan:
        """Without limits the field has no effect."""
        return super().simplest(plan) if self.limited else plan.changed(servers_on_workers=None)

    @cached_property
    def choice(self) -> Choice | None:
        if not self.limited:
            return None
        other = not self.job.values["servers_on_workers"]
        return self.chosen_from((other,))


def servers_under(plan: Plan, job: KvstoreJob | BytepsJob) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Core and host of each server of a job under a plan.

    On a worker's host a server has the worker's core, if the job's servers have cores of workers.
    """
    workers, recorded = len(job.worker_core), len(job.server_core)
    servers = recorded if plan.servers is None else plan.servers
    together = on_workers(workers, job.server_host)
    chosen = None if job.bytes_per_us is None else plan.servers_on_workers
    on_workers_now = together if chosen is None else chosen
    if servers == recorded and on_workers_now == together:
        return job.server_core, job.server_host
    core = _cores(servers, job.worker_core, job.server_core)
    if not on_workers_now:
        return core, own_hosts(workers, servers)
    host = hosts_of_workers(job.worker_hosts, servers)
    if set(job.server_core) <= set(job.worker_core):
        core = tuple(job.worker_core[at * job.workers_per_host] for at in host)
    return core, host


def _cores(servers: int, worker_core: Sequence[int], server_core: Sequence[int]) -> tuple[int, ...]:
    """The core of each of a number of servers: the recorded ones, and for more the job's cores in turn."""
    if servers == len(server_core):
        return tuple(server_core)
    cores = sorted({*worker_core, *server_core})
    return tuple(cores[server % len(cores)] for server in range(servers))
