"""Horovod: TensorFlow and MXNet jobs whose gradients Horovod fuses and all-reduces, on Gloo or MPI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpro_search.collect.trace import Trace
from dpro_search.deploy.parts.horovod import HOROVOD
from dpro_search.deploy.parts.part import Target
from dpro_search.deploy.parts.tensorflow_step import TENSORFLOW, XLA
from dpro_search.kinds._base import Job, Kind

if TYPE_CHECKING:
    from dpro_search.collect.launchers._base import Launcher


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

    @property
    def launchers(self) -> tuple[Launcher, ...]:
        from dpro_search.collect.launchers.horovod import MXNET_HOROVOD, TENSORFLOW_HOROVOD

        return (TENSORFLOW_HOROVOD, MXNET_HOROVOD)

    def targets_of(self, framework: str) -> tuple[Target, ...]:
        return self.targets if framework == "tensorflow" else (HOROVOD,)


KIND = HorovodKind()
