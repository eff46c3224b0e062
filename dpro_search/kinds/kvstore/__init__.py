"""MXNet with parameter servers: KVStore and its priority slices (P3)."""

from __future__ import annotations

from dpro_search.collect.assemble.kvstore import FORMAT
from dpro_search.deploy.parts.stores import MXNET
from dpro_search.deploy.parts.synchronisation import MXNET_SYNCHRONISATION
from dpro_search.kinds.servers import ParameterServerKind


class KvstoreKind(ParameterServerKind):
    """Jobs of MXNet with a KVStore."""

    title = "a job with parameter servers"
    formats = (FORMAT,)
    targets = (MXNET, MXNET_SYNCHRONISATION)
    job_name = "dpro_search.kinds.kvstore.job:Kvstore"
    launcher_names = ("dpro_search.collect.launchers.ps_lite:MXNET_KVSTORE",)


KIND = KvstoreKind()
