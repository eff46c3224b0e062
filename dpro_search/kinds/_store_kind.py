"""`StoreKind`: the base of kinds of jobs with parameter servers."""

from __future__ import annotations

from dpro_search.collect.trace import Trace
from dpro_search.deploy.parts.part import Servers
from dpro_search.kinds._kind import Kind


class StoreKind(Kind):
    """Jobs whose gradients go to parameter servers."""

    def servers(self, trace: Trace) -> Servers:
        from dpro_search.kinds._stores import recorded_servers

        return recorded_servers(trace)
