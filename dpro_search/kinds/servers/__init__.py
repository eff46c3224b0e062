"""Jobs with parameter servers: what the kinds `kvstore` and `byteps` have in common."""

from __future__ import annotations

from dpro_search.collect.trace import Trace
from dpro_search.deploy.parts.part import Servers
from dpro_search.kinds._kind import Kind


class ParameterServerKind(Kind):
    """Jobs whose gradients go to parameter servers."""

    def servers(self, trace: Trace) -> Servers:
        from dpro_search.kinds.servers.job import recorded_servers

        return recorded_servers(trace)
