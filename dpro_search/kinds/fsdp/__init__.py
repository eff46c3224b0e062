"""PyTorch's ``fully_shard`` (FSDP2): units gather their parameters and reduce-scatter their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dpro_search.collect.torch_files import FSDP_FORMAT
from dpro_search.collect.trace import Trace
from dpro_search.deploy.parts.pytorch import FSDP
from dpro_search.kinds._base import Job, Kind, PlanOptions

if TYPE_CHECKING:
    from dpro_search.deploy.jobs import JobLauncher


class FsdpKind(Kind):
    """Jobs that were recorded with ``fully_shard``."""

    title = "a fully sharded job"
    targets = (FSDP,)

    @property
    def job_type(self) -> type[Job]:
        from dpro_search.kinds.fsdp.job import Fsdp

        return Fsdp

    def recognises(self, trace: Trace) -> bool:
        return trace.meta.format == FSDP_FORMAT

    def job(self, trace: Trace, options: PlanOptions) -> Job:
        from dpro_search.kinds.fsdp.job import fsdp_job

        return fsdp_job(trace, options)

    def launchers(self) -> Mapping[str, JobLauncher]:
        from dpro_search.collect.torch_job import time_ddp_job
        from dpro_search.deploy.jobs import JobLauncher

        return {FSDP_FORMAT: JobLauncher(targets=self.targets, time=time_ddp_job)}


KIND = FsdpKind()
