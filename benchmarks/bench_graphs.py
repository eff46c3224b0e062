"""Data-parallel graphs with known makespans, of any size: what the replay engine is measured on.

W workers, L layers, a gradient tensor a layer. A worker runs FW.0 .. FW.L-1, then BW.L-1 .. BW.0 on its compute device; each BW.l
is followed by Sync.l on its negotiation device. When all workers have synced, the tensor is communicated: by one op a worker that
waits for all (kind "coarse"), or in 2(W-1) ring steps, each a send and the next worker's receive, both on the worker's one
communication device (kind "ring"). UPDATE.l follows on the compute device. Durations are whole microseconds from a hash of what
the op is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.replay_graph import Int32s, OrderPolicy, ReplayGraph, csr

_COMPUTE, _NEGOTIATION, _COMMUNICATION = range(3)
_DEVICES_OF_A_WORKER = 4  # the last one idles
_LATE = 100  # priority value of what is not computation


class _What(NamedTuple):
    """What ops of one sort are; durations are ``shortest_us + hash % span_us``."""

    code: int  # in the hash
    shortest_us: int
    span_us: int
    queue: int
    kind: OpKind
    priority: int


_FW = _What(1, 20, 181, _COMPUTE, OpKind.FORWARD, 0)
_BW = _What(2, 40, 361, _COMPUTE, OpKind.BACKWARD, 2)
_UPDATE = _What(3, 5, 21, _COMPUTE, OpKind.UPDATE, 3)
_SYNC = _What(4, 1, 5, _NEGOTIATION, OpKind.HOST, _LATE)
_SEND = _What(5, 5, 31, _COMMUNICATION, OpKind.COMM, _LATE)
_RECV = _What(6, 5, 31, _COMMUNICATION, OpKind.COMM, _LATE)
_ALL_REDUCE = _What(7, 100, 901, _COMMUNICATION, OpKind.COMM, _LATE)


def build(kind: str, workers: int, layers: int) -> ReplayGraph:
    """The graph of one iteration. Raises `InputError` for an unknown kind or a size below 1."""
    if kind not in ("ring", "coarse") or workers < 1 or layers < 1:
        raise InputError(f"graph '{kind}:{workers}:{layers}': write ring:WORKERS:LAYERS or coarse:WORKERS:LAYERS, both at least 1")
    graph = _Ops(workers, layers)
    fw = graph.compute(_FW)
    bw = graph.compute(_BW)
    graph.needs(fw[:, 1:], fw[:, :-1])
    graph.needs(bw[:, :-1], bw[:, 1:])
    graph.needs(bw[:, -1], fw[:, -1])
    steps = 2 * (workers - 1)
    per_layer = [(_SYNC, 1), (_UPDATE, 1), *([(_ALL_REDUCE, 1)] if kind == "coarse" else [(_SEND, steps), (_RECV, steps)])]
    sync, update, *communication = graph.per_layer(per_layer)
    graph.needs(sync[..., 0], bw.T)
    everyone = sync[:, None, :, 0]  # [layers, 1, workers]
    if kind == "coarse":
        (all_reduce,) = communication
        graph.needs(all_reduce, everyone)
        graph.needs(update, all_reduce)
    elif steps:
        send, recv = communication
        graph.needs(send[:, :, :1], everyone)
        graph.needs(send[:, :, 1:], recv[:, :, :-1])
        graph.needs(np.roll(recv, -1, axis=1), send)
        graph.needs(update, recv[:, :, -1:])
    return graph.build()


class _Ops:
    """Ops by number, block after block, and what they need."""

    def __init__(self, workers: int, layers: int) -> None:
        self.workers, self.layers, self.count = workers, layers, 0
        self.columns: list[list[npt.NDArray[Any]]] = []
        self.source: list[Int32s] = []
        self.destination: list[Int32s] = []

    def compute(self, what: _What) -> Int32s:
        """An op of every worker and layer, numbered worker by worker, [workers, layers]."""
        worker, layer = np.indices((self.workers, self.layers), sparse=True)
        return self._add([_columns(what, worker, layer, np.zeros_like(layer))]).reshape(self.workers, self.layers)

    def per_layer(self, blocks: list[tuple[_What, int]]) -> list[Int32s]:
        """Ops of every layer, numbered layer by layer: a block of [layers, workers, steps] for each (what, steps)."""
        columns = []
        for what, steps in blocks:
            layer, worker, step = np.indices((self.layers, self.workers, steps), sparse=True)
            columns.append(_columns(what, worker, layer, step))
        numbers = self._add(columns).reshape(self.layers, -1)
        ends = np.cumsum([self.workers * steps for _, steps in blocks])
        parts = np.split(numbers, ends[:-1], axis=1)
        return [part.reshape(self.layers, self.workers, steps) for part, (_, steps) in zip(parts, blocks, strict=True)]

    def needs(self, op: Int32s, needed: Int32s) -> None:
        """Dependencies; the arrays are broadcast against each other."""
        destination, source = np.broadcast_arrays(op, needed)
        self.destination.append(destination.ravel())
        self.source.append(source.ravel())

    def build(self) -> ReplayGraph:
        duration, device, priority, kind = (np.concatenate(column) for column in zip(*self.columns, strict=True))
        pred_ptr, pred_idx = csr(np.concatenate(self.destination), np.concatenate(self.source), self.count)
        devices = self.workers * _DEVICES_OF_A_WORKER
        return ReplayGraph(
            duration_us=duration,
            device=device,
            kind=kind,
            priority=priority,
            pred_ptr=pred_ptr,
            pred_idx=pred_idx,
            policy=np.full(devices, int(OrderPolicy.FIFO), np.int8),
            rank_of_device=np.arange(devices, dtype=np.int32) // _DEVICES_OF_A_WORKER,
        )

    def _add(self, blocks: list[tuple[npt.NDArray[Any], ...]]) -> Int32s:
        """Join blocks along their last axes, row by row of the first axis, and number what comes out."""
        rows = len(blocks[0][0])
        joined = [np.concatenate([part.reshape(rows, -1) for part in parts], axis=1).ravel() for parts in zip(*blocks, strict=True)]
        self.columns.append(joined)
        numbers = np.arange(self.count, self.count + len(joined[0]), dtype=np.int32)
        self.count += len(joined[0])
        return numbers


def _columns(
    what: _What, worker: npt.NDArray[np.int64], layer: npt.NDArray[np.int64], step: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[Any], ...]:
    """Duration, device, priority and kind of a block of ops."""
    hashed = (worker * 2654435761 + what.code * 40503 + layer * 97 + step * 7919) % (1 << 32)
    duration = (what.shortest_us + hashed % what.span_us).astype(np.float64)
    device = np.broadcast_to(worker * _DEVICES_OF_A_WORKER + what.queue, duration.shape).astype(np.int32)
    return duration, device, np.full(duration.shape, what.priority, np.int32), np.full(duration.shape, int(what.kind), np.int8)
