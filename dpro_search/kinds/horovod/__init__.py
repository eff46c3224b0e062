"""Horovod: TensorFlow and MXNet jobs whose gradients Horovod fuses and all-reduces, on Gloo or MPI."""

from __future__ import annotations

from dpro_search.collect.trace import Trace
from dpro_search.deploy.parts.horovod import HOROVOD
from dpro_search.deploy.parts.part import Target
from dpro_search.deploy.parts.tensorflow_step import TENSORFLOW, XLA
from dpro_search.kinds._kind import Kind


class HorovodKind(Kind):
    """Jobs whose recording holds Horovod's knobs."""

    title = "a Horovod job"
    targets = (HOROVOD, XLA, TENSORFLOW)
    job_name = "dpro_search.kinds.horovod.job:Horovod"
    launcher_names = (
        "dpro_search.collect.launchers.horovod:TENSORFLOW_HOROVOD",
        "dpro_search.collect.launchers.horovod:MXNET_HOROVOD",
    )

    def recognises(self, trace: Trace) -> bool:
        return trace.meta.settings is not None

    def targets_of(self, framework: str) -> tuple[Target, ...]:
        return self.targets if framework == "tensorflow" else (HOROVOD,)


KIND = HorovodKind()
