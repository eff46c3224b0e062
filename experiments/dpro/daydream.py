"""Daydream's prediction of a distributed step (Zhu et al., ATC 2020): the baseline of dPRO's evaluation, and better ones.

Daydream takes the profile of one worker and inserts communication: for each gradient an op after the one that makes it, on a
channel of its own, that takes its bytes over the bandwidth; updates wait for it. An all-reduce of n ranks moves 2 (n - 1) / n bytes
over a link for each byte; with parameter servers a push and a pull, on a channel for each direction, move one. There are no other
ranks, no agreement, no queue, no servers' work, and communication takes nothing of the cores. Three variants:

* `PLAIN`: the link's nominal rate, every gradient by itself. A link without a limit has no nominal rate, and gets the measured one.
* `SLIP`: the same at 0.85 times the rate in bytes where bits were meant, 6.8 times too fast: what dPRO's own comparison used.
* `CORRECTED`: the bandwidth that the recording's own transfers reached, and gradients fused, bucketed or cut as they were.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import EventKind, Floats, Trace
from dpro_search.errors import GraphError
from dpro_search.graph.dataflow import OpKind
from dpro_search.graph.measured import profiled_iterations_us
from dpro_search.replay.replayer import replay
from dpro_search.space.graph_builder import GraphBuilder
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.servers.byteps_recorded import recorded_byteps_job
from experiments.dpro.worker import Worker, worker_of

_BITS = 8.0
_SLIP = 0.85 * 8  # 85 GB/s where 85 % of 100 Gbit/s was meant
_LARGE_BYTES = 2**20  # from here on a transfer is no latency
_ALONE = 0.95  # quantile of the rates of gradients: nothing else was under way beside these


class Variant(enum.Enum):
    """Which Daydream."""

    PLAIN = "plain"
    SLIP = "slip"
    CORRECTED = "corrected"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Gradients that travel together, or a part of one."""

    tensors: tuple[int, ...]
    size_bytes: float


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """How gradients travel."""

    # What a unit passes one after the other, each one unit at a time: "all-reduce", or "push" and "pull".
    channels: tuple[str, ...]
    volume: float  # Bytes on a worker's link, in one direction, for each byte of a gradient.


def all_reduce(ranks: int) -> Exchange:
    """A ring of n ranks."""
    return Exchange(channels=("all-reduce",), volume=2 * (ranks - 1) / ranks)


PARAMETER_SERVER = Exchange(channels=("push", "pull"), volume=1.0)


def exchange_of(trace: Trace) -> Exchange:
    """How the gradients of a recorded job travel."""
    return PARAMETER_SERVER if trace.meta.format in ("mxnet-kvstore", "mxnet-byteps") else all_reduce(trace.meta.ranks)


def predictions_us(trace: Trace) -> dict[Variant, float]:
    """Iteration time of a recorded job by each variant; raises what `worker_of` does."""
    worker, exchange = worker_of(trace), exchange_of(trace)
    measured = measured_bytes_per_us(trace)
    nominal = measured if trace.meta.rate_bps is None else trace.meta.rate_bps / _BITS / 1e6
    alone = single_units(worker)
    asked = {
        Variant.PLAIN: (alone, nominal),
        Variant.SLIP: (alone, nominal * _SLIP),
        Variant.CORRECTED: (recorded_units(trace, worker), measured),
    }
    return {variant: replay(daydream_graph(worker, units, exchange, rate)).iteration_us for variant, (units, rate) in asked.items()}


def daydream_graph(worker: Worker, units: Sequence[Unit], exchange: Exchange, bytes_per_us: float) -> ReplayGraph:
    """The worker's step with communication inserted; its end carries over to the next step.

    Parameters
    ----------
    units
        Together they hold each of the worker's tensors.
    bytes_per_us
        What a link carries in each direction.
    """
    builder = GraphBuilder()
    core = builder.add_device(name="core")
    channels = [builder.add_device(name=name) for name in exchange.channels]
    chain: list[int] = []
    maker: dict[int, int] = {}
    for stretch in worker.chain:
        chain.append(builder.add_op(core, stretch.work_us, kind=OpKind.BACKWARD, after=chain[-1:]))
        maker |= dict.fromkeys(stretch.makes, chain[-1])
    back: defaultdict[int, list[int]] = defaultdict(list)
    for unit in units:
        before = sorted({maker[tensor] for tensor in unit.tensors})
        for channel in channels:
            us = unit.size_bytes * exchange.volume / bytes_per_us
            before = [builder.add_op(channel, us, kind=OpKind.COMM, after=before)]
        for tensor in unit.tensors:
            back[tensor] += before
    for op, stretch in zip(chain, worker.chain, strict=True):
        for tensor in stretch.needs:
            builder.add_edges(back[tensor], op)
    updated: defaultdict[int, list[int]] = defaultdict(list)
    for stretch in worker.updates:
        needed = sorted({op for tensor in stretch.needs for op in back[tensor]})
        update = builder.add_op(core, stretch.work_us, kind=OpKind.UPDATE, after=needed)
        for tensor in stretch.needs:
            updated[tensor].append(update)
    if worker.script_us is None:
        builder.carry(chain[-1], chain[0])
        for op, stretch in zip(chain, worker.chain, strict=True):
            for tensor in stretch.wants:
                builder.carry(updated[tensor] or back[tensor], op)
    else:
        everything = sorted({chain[-1], *(op for ops in (*back.values(), *updated.values()) for op in ops)})
        builder.carry(builder.add_op(core, worker.script_us, kind=OpKind.HOST, after=everything), chain[0])
    return builder.build()


def single_units(worker: Worker) -> list[Unit]:
    """Every gradient by itself."""
    return [Unit(tensors=(number,), size_bytes=float(tensor.size_bytes)) for number, tensor in enumerate(worker.tensors)]


def recorded_units(trace: Trace, worker: Worker) -> list[Unit]:
    """Gradients as they travelled in the recording: Horovod's fusions of a step in the middle, DDP's buckets, BytePS's partitions.

    The parts into which KVStore cuts a tensor go to its servers at a time, over the same link of the worker: a unit.
    """
    if trace.meta.format == "mxnet-byteps":
        job = recorded_byteps_job(trace)
        parts = ((tensor, part) for tensor in range(len(worker.tensors)) for part in job.parts(tensor))
        return [Unit(tensors=(tensor,), size_bytes=part.size_bytes) for tensor, part in parts]
    if trace.meta.settings is not None:
        return _of_groups(worker, _fused_in_a_step(trace))
    if trace.meta.format == "pytorch-ddp":
        buckets: defaultdict[str, list[str]] = defaultdict(list)
        for tensor in trace.tensors:
            buckets[tensor.node].append(tensor.name)
        return _of_groups(worker, list(buckets.values()))
    return single_units(worker)


def _of_groups(worker: Worker, groups: Sequence[Sequence[str]]) -> list[Unit]:
    place = {tensor.name: number for number, tensor in enumerate(worker.tensors)}
    units = []
    for group in groups:
        members = tuple(sorted(place[name] for name in group))
        units.append(Unit(tensors=members, size_bytes=float(sum(worker.tensors[member].size_bytes for member in members))))
    return units


def _fused_in_a_step(trace: Trace) -> list[list[str]]:
    """Names of the tensors of each collective, in the profiled step with the median iteration of those that are all there."""
    moved = trace.events.select((trace.events.kind == EventKind.ALLREDUCE) & (trace.events.collective >= 0))
    lasted_us = profiled_iterations_us(trace)
    whole = [step for step in lasted_us if len(np.unique(moved.tensor[moved.step == step])) == len(trace.tensors)]
    if not whole:
        raise GraphError("in no profiled step were all gradients seen in collectives; record the job again with a timeline")
    step = sorted(whole, key=lambda number: lasted_us[number])[len(whole) // 2]
    home = dict(zip(moved.tensor[moved.step == step].tolist(), moved.collective[moved.step == step].tolist(), strict=True))
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for tensor, collective in home.items():
        groups[collective].append(trace.tensors[tensor].name)
    return list(groups.values())


def measured_bytes_per_us(trace: Trace) -> float:
    """What a worker's link carried in one direction in the profiled steps, as far as the recording of worker 0 says.

    Of all-reduces, their bytes on the link over the time in which any of them moved. With parameter servers only the whole way of a
    gradient is known, push and pull. Its bytes crossed the link in that time in both directions, and, of a gradient that was under
    way by itself, one after the other: the most of both that is certain counts.
    """
    events = trace.events.select((trace.events.rank == 0) & (trace.events.step >= 0))
    moved = events.select(events.kind == EventKind.ALLREDUCE)
    size_bytes = moved.size_bytes.astype(np.float64)
    if not len(moved):
        moved = events.select((events.kind == EventKind.COMM) & (events.tensor >= 0))
        size_bytes = np.array([tensor.size_bytes for tensor in trace.tensors], dtype=np.float64)[moved.tensor]
    if not size_bytes.sum() > 0:
        raise GraphError("the recording holds no transfer of a gradient: its bandwidth is not known")
    together = float(size_bytes.sum()) * exchange_of(trace).volume / covered_us(moved.start_us, moved.end_us)
    large = size_bytes >= _LARGE_BYTES
    if exchange_of(trace) != PARAMETER_SERVER or not large.any():
        return together
    alone = 2 * size_bytes[large] / (moved.end_us - moved.start_us)[large]
    return max(together, float(np.quantile(alone, _ALONE)))


def covered_us(start_us: Floats, end_us: Floats) -> float:
    """Time during which any of the spans lasted."""
    order = np.argsort(start_us, kind="stable")
    start_us, end_us = start_us[order], end_us[order]
    until_us = np.concatenate(([-np.inf], np.maximum.accumulate(end_us)[:-1]))
    return float(np.maximum(end_us - np.maximum(start_us, until_us), 0.0).sum())
