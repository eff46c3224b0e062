"""How many parameter servers there are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from dpro_search.space.plan import Plan
from dpro_search.space.transformations._base import RECORDED, Choice, Knob, ladder

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
        return Choice(name=self.name, fields=self.fields, ways={RECORDED: ({},), "set": ladder("servers", counts)})


def cores_of_servers(servers: int, worker_core: Sequence[int], server_core: Sequence[int]) -> tuple[int, ...]:
    """The core of each of a number of servers: the recorded ones, and for more the job's cores in turn."""
    if servers == len(server_core):
        return tuple(server_core)
    cores = sorted({*worker_core, *server_core})
    return tuple(cores[server % len(cores)] for server in range(servers))
