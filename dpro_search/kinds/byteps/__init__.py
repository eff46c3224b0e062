"""MXNet with BytePS: partitions of gradients, summed by servers in order of priority."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpro_search.collect.byteps_assemble import FORMAT
from dpro_search.collect.trace import Trace
from dpro_search.deploy.parts.part import Servers
from dpro_search.deploy.parts.stores import BYTEPS
from dpro_search.kinds._base import Job, Kind, PlanOptions

if TYPE_CHECKING:
    from dpro_search.collect.launchers._base import Launcher


class BytepsKind(Kind):
    """Jobs whose gradients go to parameter servers."""

    title = "a job with BytePS"
    targets = (BYTEPS,)

    @property
    def job_type(self) -> type[Job]:
        from dpro_search.kinds.byteps.job import Byteps

        return Byteps

    def recognises(self, trace: Trace) -> bool:
        return trace.meta.format == FORMAT

    def job(self, trace: Trace, options: PlanOptions) -> Job:
        from dpro_search.kinds.byteps.job import Byteps

        return Byteps.of(trace, options)

    @property
    def launchers(self) -> tuple[Launcher, ...]:
        from dpro_search.collect.launchers.ps_lite import MXNET_BYTEPS

        return (MXNET_BYTEPS,)

    def servers(self, trace: Trace) -> Servers:
        from dpro_search.kinds._stores import recorded_servers

        return recorded_servers(trace)


KIND = BytepsKind()
