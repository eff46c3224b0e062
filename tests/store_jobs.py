"""Small jobs with parameter servers, by the sizes of their tensors; every cost that a test does not name is 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpro_search.collect.assemble.kvstore_slices import Slicing
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.servers.byteps_job import BytepsJob
from dpro_search.space.servers.kvstore_job import KvstoreJob
from dpro_search.space.servers.store_job import Segment

MIB = 2**20
Segments = tuple[Segment, ...]


def forward_of(us: Sequence[float]) -> Segments:
    """Layers that each use one tensor, in order."""
    return tuple(Segment(kind=OpKind.FORWARD, work_us=work_us, uses=(i,), makes=()) for i, work_us in enumerate(us))


def layers_of(forward_us: Sequence[float], backward_us: Sequence[float]) -> Segments:
    """Those, and the layers of the backward pass, which make their gradients in the reverse order."""
    backward = [Segment(kind=OpKind.BACKWARD, work_us=us, uses=(), makes=(i,)) for i, us in enumerate(backward_us)]
    return (*forward_of(forward_us), *reversed(backward))


def kvstore_job(
    sizes: Sequence[float], *, workers: int = 2, servers: int = 1, segments: Segments | None = None, **fields: object
) -> KvstoreJob:
    """Workers that each take 10 ms forward and 10 ms backward over layers of these sizes, every process on a core of its own."""
    layer_us = [10_000 / len(sizes)] * len(sizes)
    defaults = {
        "workers": (segments or layers_of(layer_us, layer_us),) * workers,
        "worker_core": tuple(range(workers)),
        "server_core": tuple(range(workers, workers + servers)),
        "slicing": Slicing(servers=servers, bound=10**9),
        "bytes_per_us": None,
        "beside_us_per_byte": (0.0,) * workers,
        "updates": tuple((i,) for i in range(len(sizes))),
    }
    free = _free("comm_us_per_byte", "copy_us_per_byte", "sum_us_per_byte", "update_us_per_byte")
    free |= _free("slice_us", "update_call_us", "worker_call_us")
    return KvstoreJob(
        tensor_bytes=np.array(sizes, dtype=np.float64),
        element_bytes=np.full(len(sizes), 4.0),
        key=np.arange(len(sizes)),
        **(free | defaults | fields),
    )


def byteps_job(
    sizes: Sequence[float], *, workers: int = 2, servers: int = 1, segments: Segments | None = None, **fields: object
) -> BytepsJob:
    """The same with BytePS; no gradient is ready before the end of the backward pass."""
    backward = Segment(kind=OpKind.BACKWARD, work_us=10_000, uses=(), makes=())
    defaults = {
        "workers": (segments or (*forward_of([10_000 / len(sizes)] * len(sizes)), backward),) * workers,
        "declared_key": 1 + 2 * np.arange(len(sizes)),
        "group": np.arange(len(sizes)),
        "order": np.arange(len(sizes)),
        "scale_us": np.zeros((workers, len(sizes))),
        "update_us": np.zeros((workers, len(sizes))),
        "worker_core": tuple(range(workers)),
        "server_core": tuple(range(workers, workers + servers)),
        "partition_bytes": MIB,
        "credit": 0,
        "hash_name": "djb2",
        "bytes_per_us": None,
    }
    free = _free("worker_polling", "server_polling", "cpu_us_per_byte", "message_us")
    free |= _free("reduce_us", "before_push_us", "reply_us", "after_pull_us")
    return BytepsJob(tensor_bytes=np.array(sizes, dtype=np.float64), **(free | defaults | fields))


def _free(*costs: str) -> dict[str, float]:
    return dict.fromkeys(costs, 0.0)
