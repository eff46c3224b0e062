"""MXNet with BytePS: partitions of gradients, summed by servers in order of priority."""

from __future__ import annotations

from dpro_search.collect.assemble.byteps import FORMAT
from dpro_search.deploy.parts.stores import BYTEPS
from dpro_search.kinds.servers import ParameterServerKind


class BytepsKind(ParameterServerKind):
    """Jobs of MXNet with BytePS."""

    title = "a job with BytePS"
    formats = (FORMAT,)
    targets = (BYTEPS,)
    job_name = "dpro_search.kinds.byteps.job:Byteps"
    launcher_names = ("dpro_search.collect.launchers.ps_lite:MXNET_BYTEPS",)


KIND = BytepsKind()
