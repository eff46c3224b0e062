"""MXNet with parameter servers: KVStore and its priority slices (P3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpro_search.collect.mxnet_assemble import FORMAT
from dpro_search.deploy.parts.stores import MXNET
from dpro_search.kinds._base import Job
from dpro_search.kinds._store_kind import StoreKind

if TYPE_CHECKING:
    from dpro_search.collect.launchers._base import Launcher


class KvstoreKind(StoreKind):
    """Jobs of MXNet with a KVStore."""

    title = "a job with parameter servers"
    formats = (FORMAT,)
    targets = (MXNET,)

    @property
    def job_type(self) -> type[Job]:
        from dpro_search.kinds.kvstore.job import Kvstore

        return Kvstore

    @property
    def launchers(self) -> tuple[Launcher, ...]:
        from dpro_search.collect.launchers.ps_lite import MXNET_KVSTORE

        return (MXNET_KVSTORE,)


KIND = KvstoreKind()
