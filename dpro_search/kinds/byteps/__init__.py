"""MXNet with BytePS: partitions of gradients, summed by servers in order of priority."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpro_search.collect.byteps_assemble import FORMAT
from dpro_search.deploy.parts.stores import BYTEPS
from dpro_search.kinds._base import Job
from dpro_search.kinds._store_kind import StoreKind

if TYPE_CHECKING:
    from dpro_search.collect.launchers._base import Launcher


class BytepsKind(StoreKind):
    """Jobs of MXNet with BytePS."""

    title = "a job with BytePS"
    formats = (FORMAT,)
    targets = (BYTEPS,)

    @property
    def job_type(self) -> type[Job]:
        from dpro_search.kinds.byteps.job import Byteps

        return Byteps

    @property
    def launchers(self) -> tuple[Launcher, ...]:
        from dpro_search.collect.launchers.ps_lite import MXNET_BYTEPS

        return (MXNET_BYTEPS,)


KIND = BytepsKind()
