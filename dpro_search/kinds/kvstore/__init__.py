"""MXNet with parameter servers: KVStore and its priority slices (P3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpro_search.collect.mxnet_assemble import FORMAT
from dpro_search.collect.trace import Trace
from dpro_search.deploy.parts.part import Servers
from dpro_search.deploy.parts.stores import MXNET
from dpro_search.kinds._base import Job, Kind, PlanOptions

if TYPE_CHECKING:
    from dpro_search.collect.launchers._base import Launcher


class KvstoreKind(Kind):
    """Jobs whose gradients go to parameter servers."""

    title = "a job with parameter servers"
    targets = (MXNET,)

    @property
    def job_type(self) -> type[Job]:
        from dpro_search.kinds.kvstore.job import Kvstore

        return Kvstore

    def recognises(self, trace: Trace) -> bool:
        return trace.meta.format == FORMAT

    def job(self, trace: Trace, options: PlanOptions) -> Job:
        from dpro_search.kinds.kvstore.job import Kvstore

        return Kvstore.of(trace, options)

    @property
    def launchers(self) -> tuple[Launcher, ...]:
        from dpro_search.collect.launchers.ps_lite import MXNET_KVSTORE

        return (MXNET_KVSTORE,)

    def servers(self, trace: Trace) -> Servers:
        from dpro_search.kinds._stores import recorded_servers

        return recorded_servers(trace)


KIND = KvstoreKind()
