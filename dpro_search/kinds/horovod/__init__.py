"""Horovod: TensorFlow and MXNet jobs whose gradients Horovod fuses and all-reduces, on Gloo or MPI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dpro_search.collect.trace import Trace
from dpro_search.deploy.parts.horovod import HOROVOD
from dpro_search.deploy.parts.part import Target
from dpro_search.deploy.parts.tensorflow_step import TENSORFLOW, XLA
from dpro_search.kinds._base import Job, Kind, PlanOptions

if TYPE_CHECKING:
    from dpro_search.deploy.jobs import JobLauncher


class HorovodKind(Kind):
    """Jobs whose recording holds Horovod's knobs."""

    title = "a Horovod job"
    targets = (HOROVOD, XLA, TENSORFLOW)

    @property
    def job_type(self) -> type[Job]:
        from dpro_search.kinds.horovod.job import Horovod

        return Horovod

    def recognises(self, trace: Trace) -> bool:
        return trace.meta.settings is not None

    def job(self, trace: Trace, options: PlanOptions) -> Job:
        from dpro_search.kinds.horovod.job import horovod_job

        return horovod_job(trace, options)

    def launchers(self) -> Mapping[str, JobLauncher]:
        from dpro_search.collect.job import time_job
        from dpro_search.collect.mxnet_horovod_job import time_mxnet_horovod_job
        from dpro_search.deploy.jobs import JobLauncher

        return {
            "tensorflow-horovod": JobLauncher(targets=self.targets, time=time_job, checks_groups=True),
            "mxnet-horovod": JobLauncher(targets=(HOROVOD,), time=time_mxnet_horovod_job),
        }

    def targets_of(self, trace: Trace) -> tuple[Target, ...]:
        return self.targets if trace.meta.framework == "tensorflow" else (HOROVOD,)


KIND = HorovodKind()
