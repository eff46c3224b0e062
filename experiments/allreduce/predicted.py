"""Steps of the characterisation as the replay predicts them, from exchanges of other sizes, or of other numbers of workers.

A scheme takes gradients in units: DDP's buckets, what Horovod fuses, single tensors of parameter servers, all at once in
MultiWorkerMirroredStrategy. A worker computes; units are exchanged one after the other, in the order in which they are there, and
each takes what was measured for its size: alone, or as the largest unit of a burst. Through servers a tensor goes two ways, each of
which takes what the busiest server's link takes; MXNet's stores use both at once, TensorFlow's servers are read before they are
written to. `loss` says what the difference to a step without exchanges is made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import nnls

from dpro_search.collect.assemble.kvstore_slices import Slicing
from dpro_search.collect.launch.host_limits import burst_bytes
from dpro_search.collect.trace import Floats
from dpro_search.replay.engine import Engine
from dpro_search.space.replay_graph import OrderPolicy, ReplayGraph, csr
from experiments.allreduce.cases import RATE_BPS, WORKERS, Case, is_warm
from experiments.allreduce.characterise import Journal, measured_step
from experiments.allreduce.networks import Step, ready
from experiments.allreduce.schemes import SCHEMES

MIB = 1 << 20
_FIRST_BUCKET, _BUCKET = MIB, 25 * MIB  # of DDP
_FUSED, _CYCLE_US = 128 * MIB, 5e3  # of Horovod 0.28; the cycle is set
_PARTITION = 1_024_000  # elements of BytePS' parts
_CORES = 2
_BYTES_PER_US = RATE_BPS / 8e6
STORES = tuple(name for name, scheme in SCHEMES.items() if scheme.has_servers)
_ITERATIONS = 3
_STEADY_BURSTS = 32  # of a link, beyond which it counts little how long it has rested


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What an exchange takes, us: ``latency_us + message_us + us_per_byte * bytes`` of a unit, the first part once for a burst.

    Through servers this is one of a tensor's two ways, if bytes are spread evenly. `link_us_per_byte` is what of the last the
    worker's own link takes; `copied_us_per_byte` is computed beside it for each byte.
    """

    latency_us: float
    message_us: float
    us_per_byte: float
    link_us_per_byte: float
    copied_us_per_byte: float = 0.0
    servers: int = 0  # Over which tensors are spread.
    sizes_bytes: tuple[float, ...] = ()  # Measured ones of single tensors,
    sizes_us: tuple[float, ...] = ()  # and their times; empty: the formula counts.

    def unit_us(self, size_bytes: float) -> float:
        """Of one unit in a row of them; through servers, of one of its ways."""
        if not self.sizes_bytes:
            return self.message_us + self.us_per_byte * size_bytes
        if size_bytes > self.sizes_bytes[-1]:
            return self.sizes_us[-1] * size_bytes / self.sizes_bytes[-1]
        return float(np.exp(np.interp(np.log(size_bytes), np.log(self.sizes_bytes), np.log(self.sizes_us))))


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What a step takes longer than its computation, us, by cause; the sum is the whole."""

    copies_us: float  # Beside the computation, into and out of what is exchanged.
    latency_us: float  # Of messages, whatever their size.
    server_us: float  # What bytes take beyond a worker's own link: servers that many share, processors.
    waiting_us: float  # For gradients that are exchanged later than they are there.
    bandwidth_us: float  # Of the worker's own link.


def exchange_of(journal: Journal, scheme: str, workers: int, *, of_others: bool) -> Exchange | None:
    """From measured exchanges of so many workers, or of all other numbers; None: they were not measured."""
    rows = {count: row for count in WORKERS if (row := journal.rows.get(Case(scheme=scheme, workers=count).key)) is not None}
    copied = _copied_us_per_byte(journal, scheme, workers)
    if of_others:
        rest = [_fitted(scheme, count, row) for count, row in rows.items() if count != workers]
        return _between(scheme, workers, [count for count in rows if count != workers], rest, copied) if len(rest) > 1 else None
    return None if workers not in rows else replace(_fitted(scheme, workers, rows[workers]), copied_us_per_byte=copied)


def predicted_us(scheme: str, step: Step, exchange: Exchange) -> float:
    """The distance of steps, us."""
    if exchange.servers > 1:
        sizes = [elements for some in step.moments for elements in some]
        exchange = replace(exchange, us_per_byte=exchange.us_per_byte * busiest_share(scheme, sizes, exchange.servers), servers=0)
    if scheme == "tf-ps":
        return _pulled_and_pushed(step, exchange)
    copies = [4.0 * sum(some) * exchange.copied_us_per_byte for some in step.moments]
    step = replace(step, waits_us=(step.waits_us[0], *(us + more for us, more in zip(step.waits_us[1:], copies, strict=True))))
    return _replayed(step, _units(scheme, step, exchange), exchange, returned=scheme in STORES)


def busiest_share(scheme: str, sizes: Sequence[int], servers: int) -> float:
    """Elements of the busiest server over those of the mean: keys of KVStore by their number, others in turn."""
    load = [0] * servers
    if scheme == "mxnet-byteps":
        sizes = [min(_PARTITION, elements - at) for elements in sizes for at in range(0, elements, _PARTITION)]
    if scheme == "mxnet-kvstore":
        for parts in Slicing.of_knobs({}, servers).parts(range(len(sizes)), sizes):
            for server, part in parts:
                load[server] += part
    else:
        for number, elements in enumerate(sizes):
            load[number % servers] += elements
    return max(load) * servers / sum(load)


def loss(scheme: str, step: Step, exchange: Exchange) -> Loss:
    """Causes are taken away one after the other, in the order of the fields; what is left is the computation."""
    without = [
        replace(exchange, copied_us_per_byte=0.0),
        _without_latency(exchange),
        replace(_without_latency(exchange), us_per_byte=exchange.link_us_per_byte, servers=0),
    ]
    taken = [predicted_us(scheme, step, one) for one in (exchange, *without)]
    overlapping = min(predicted_us("overlapped", step, without[-1]), taken[-1])
    ends = [*taken, overlapping, step.compute_us]
    parts = [max(before - after, 0.0) for before, after in pairwise(ends)]
    return Loss(copies_us=parts[0], latency_us=parts[1], server_us=parts[2], waiting_us=parts[3], bandwidth_us=parts[4])


def _without_latency(exchange: Exchange) -> Exchange:
    return replace(exchange, copied_us_per_byte=0.0, latency_us=0.0, message_us=0.0, sizes_bytes=(), sizes_us=())


def _fitted(scheme: str, workers: int, row: dict[str, Any]) -> Exchange:
    found = _through_servers(scheme, workers, row) if scheme in STORES else _among_workers(scheme, row)
    return replace(found, link_us_per_byte=min(_link_us_per_byte(scheme, workers), found.us_per_byte))


def _through_servers(scheme: str, workers: int, row: dict[str, Any]) -> Exchange:
    """What the busiest server's link is given, way by way; one that has rested lets the first bytes of each way pass at once.

    What takes longer than that, but not much, is left out: its time says how long the links had rested.
    """
    servers = SCHEMES[scheme].servers(workers)
    rested_bytes, steady_bytes = burst_bytes(RATE_BPS) * servers / workers, burst_bytes(RATE_BPS) * _STEADY_BURSTS
    singles = [((size // 4,), us) for size, us in zip(row["sizes_bytes"], row["us"], strict=True) if is_warm(size)]
    lines = []
    for sizes, us in [*singles, *zip(row["bursts"], row["bursts_us"], strict=True)]:
        # A tensor's second way goes beside the next one's first, but for the last one's, and for variables that are read first.
        ways = 2.0 if scheme == "tf-ps" else 1 + 1 / len(sizes)
        busiest_bytes = 4.0 * sum(sizes) * busiest_share(scheme, sizes, servers)
        if rested_bytes < busiest_bytes < steady_bytes:
            continue
        lines.append((1.0, ways * len(sizes), ways * max(busiest_bytes - rested_bytes, 0.0), us))
    latency_us, message_us, us_per_byte = _least_squares(lines)
    return Exchange(latency_us=latency_us, message_us=message_us, us_per_byte=us_per_byte, link_us_per_byte=0.0, servers=servers)


def _among_workers(scheme: str, row: dict[str, Any]) -> Exchange:
    """Times of units by size; of large ones from bursts, as their share of the bytes, or from an exchange that was the first.

    A first exchange can only take longer than others, and a byte of a larger unit no longer than that of a smaller one.
    """
    singles = dict(zip(map(float, row["sizes_bytes"]), row["us"], strict=True))
    known = {size: us for size, us in singles.items() if is_warm(size)}
    for sizes, us in zip(row["bursts"], row["bursts_us"], strict=True):
        at_once = Step(waits_us=(0.0, 0.0), moments=(tuple(sizes),))
        largest = max(size for _, size in _units(scheme, at_once, _by_size(known)))
        if not is_warm(largest):
            known[largest] = us * largest / (4 * sum(sizes))
    for size, us in singles.items():
        if not is_warm(size):
            known[size] = min(us, _by_size(known).unit_us(size))
    return _by_size(known)


def _by_size(known: Mapping[float, float]) -> Exchange:
    lines = [(1.0, size, us) for size, us in sorted(known.items())]
    message_us, us_per_byte = _least_squares(lines)
    _, sizes_bytes, sizes_us = zip(*lines, strict=True)
    return Exchange(
        latency_us=0.0,
        message_us=message_us,
        us_per_byte=us_per_byte,
        link_us_per_byte=0.0,
        sizes_bytes=sizes_bytes,
        sizes_us=sizes_us,
    )


def _least_squares(lines: Sequence[tuple[float, ...]]) -> list[float]:
    """Factors of all columns but the last, which they add up to; of relative errors."""
    matrix = np.array(lines)
    found, _ = nnls(matrix[:, :-1] / matrix[:, -1:], np.ones(len(matrix)))
    return [float(each) for each in found]


def _link_us_per_byte(scheme: str, workers: int) -> float:
    """What a worker's own link takes for a byte of a gradient: once each way, at the same time."""
    return (1.0 if scheme in STORES else 2 * (workers - 1) / workers) / _BYTES_PER_US


def _busiest_us_per_byte(scheme: str, workers: int) -> float:
    """What the busiest link takes: a server's, if bytes are spread evenly, or a worker's own."""
    per_server = workers / SCHEMES[scheme].servers(workers) if scheme in STORES else 1.0
    return per_server * _link_us_per_byte(scheme, workers)


def _between(scheme: str, workers: int, counts: Sequence[int], rest: Sequence[Exchange], copied: float) -> Exchange:
    """Constants for a number of workers from those of others: linear in workers, latency in their logarithm."""
    x = np.array(counts, np.float64)

    def at(values: Sequence[float], log: bool) -> float:
        where, to = (np.log2(x), np.log2(workers)) if log else (x, float(workers))
        return max(float(np.polyval(np.polyfit(where, values, 1), to)), 0.0)

    of_link = at([one.us_per_byte / _busiest_us_per_byte(scheme, n) for n, one in zip(counts, rest, strict=True)], False)
    us_per_byte = max(of_link, 1.0) * _busiest_us_per_byte(scheme, workers)  # no byte is faster than the link
    return Exchange(
        latency_us=at([one.latency_us for one in rest], True),
        message_us=at([one.message_us for one in rest], False),
        us_per_byte=us_per_byte,
        link_us_per_byte=min(_link_us_per_byte(scheme, workers), us_per_byte),
        copied_us_per_byte=copied,
        servers=SCHEMES[scheme].servers(workers),
    )


def _copied_us_per_byte(journal: Journal, scheme: str, workers: int) -> float:
    """What one worker, which exchanges with nobody, takes longer than its computation; workers that share cores wait for them."""
    row = journal.rows.get(Case(scheme=scheme, workers=1, network="resnet-50", batch=4).key)
    if scheme in STORES or row is None:
        return 0.0
    step = measured_step(journal, Case(scheme=scheme, workers=1, network="resnet-50", batch=4))
    over_us = float(np.median(row["steps_us"])) - float(row["compute_us"])
    return max(over_us, 0.0) / step.size_bytes * max(workers / _CORES, 1.0)


def _units(scheme: str, step: Step, exchange: Exchange) -> list[tuple[float, float]]:
    """(us since the start of the step from which it can go, bytes) of each unit."""
    made = [(at, 4.0 * elements) for at, some in ready(step) for elements in some]
    if scheme == "tf-ring":
        return [(step.compute_us, float(step.size_bytes))]
    if scheme.startswith("ddp"):
        return _buckets(made)
    if scheme.startswith("horovod"):
        return _fused(made, exchange)
    return made


def _buckets(made: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """DDP closes a bucket when it has at least its size."""
    found, size, most = [], 0.0, _FIRST_BUCKET
    for number, (at, one) in enumerate(made):
        size += one
        if size >= most or number == len(made) - 1:
            found.append((at, size))
            size, most = 0.0, _BUCKET
    return found


def _fused(made: Sequence[tuple[float, float]], exchange: Exchange) -> list[tuple[float, float]]:
    """Horovod sums together what is there at a cycle."""
    found: list[tuple[float, float]] = []
    free, at = 0.0, 0
    while at < len(made):
        begin = max(free, made[at][0])
        begin = np.ceil(begin / _CYCLE_US) * _CYCLE_US
        size, first = 0.0, at
        while at < len(made) and made[at][0] <= begin and (at == first or size + made[at][1] <= _FUSED):
            size += made[at][1]
            at += 1
        found.append((made[at - 1][0], size))
        free = begin + exchange.unit_us(size)
    return found


def _replayed(step: Step, units: Sequence[tuple[float, float]], exchange: Exchange, *, returned: bool) -> float:
    """Computation on one device, units on another, their way back (of stores) on a third; the next step needs all."""
    ends = np.cumsum(step.waits_us)
    pieces, ways = len(step.waits_us), 2 if returned else 1
    # A unit that can go between two pieces' ends waits for the rest of that time.
    after = [min(int(np.searchsorted(ends, at - 1e-6, side="left")), pieces - 1) for at, _ in units]
    taken = [exchange.unit_us(size) for _, size in units]
    durations = np.array([*step.waits_us, *taken * ways, exchange.latency_us if units else 0.0])
    count = pieces + ways * len(units)
    needs = [(piece - 1, piece) for piece in range(1, pieces)]
    needs += [(piece, pieces + number) for number, piece in enumerate(after)]
    needs += [(op - len(units), op) for op in range(pieces + len(units), count)]
    needs += [(op, count) for op in range(count - len(units), count)] + [(pieces - 1, count)]
    before, op = np.array(needs, np.int32).T
    pred_ptr, pred_idx = csr(op, before, count + 1)
    device = [0] * pieces + [1 + way for way in range(ways) for _ in units] + [ways + 1]
    policies = [OrderPolicy.PROGRAM, *[OrderPolicy.FIFO] * ways, OrderPolicy.PROGRAM]
    graph = ReplayGraph(
        duration_us=durations,
        device=np.array(device, np.int32),
        pred_ptr=pred_ptr,
        pred_idx=pred_idx,
        policy=np.array(policies, np.int8),
        rank_of_device=np.zeros(len(policies), np.int32),
        carry_src=np.array([count], np.int32),
        carry_dst=np.array([0], np.int32),
    )
    return _distance(graph)


def _pulled_and_pushed(step: Step, exchange: Exchange) -> float:
    """Variables are read in the order of the forward pass, gradients are sent in that of the backward pass: a way each."""
    pieces = len(step.moments)
    forward = [step.waits_us[0] * us / sum(step.waits_us[1:]) for us in step.waits_us[1:]][::-1]
    pushes = [sum(exchange.unit_us(4.0 * one) for one in some) for some in step.moments]
    pulls = pushes[::-1]
    durations = np.array([*pulls, *forward, *step.waits_us[1:], *pushes, exchange.latency_us])
    pull, front, back, push = (range(i * pieces, (i + 1) * pieces) for i in range(4))
    last = 4 * pieces
    needs = [(pull[i], front[i]) for i in range(pieces)] + [(front[i - 1], front[i]) for i in range(1, pieces)]
    needs += [(front[-1], back[0])] + [(back[i - 1], back[i]) for i in range(1, pieces)]
    needs += [(back[i], push[i]) for i in range(pieces)] + [(push[-1], last)]
    before, op = np.array(needs, np.int32).T
    pred_ptr, pred_idx = csr(op, before, last + 1)
    device = [1] * pieces + [0] * (2 * pieces) + [1] * pieces + [2]
    graph = ReplayGraph(
        duration_us=durations,
        device=np.array(device, np.int32),
        pred_ptr=pred_ptr,
        pred_idx=pred_idx,
        policy=np.array([OrderPolicy.PROGRAM, OrderPolicy.FIFO, OrderPolicy.PROGRAM], np.int8),
        rank_of_device=np.zeros(3, np.int32),
        carry_src=np.array([last] * (pieces + 1), np.int32),
        carry_dst=np.array([*pull, front[0]], np.int32),
    )
    return _distance(graph)


def _distance(graph: ReplayGraph) -> float:
    """Between the ends of two steps in a row."""
    ends: Floats = Engine(graph, _ITERATIONS).first.times().end_us
    per_step = ends.reshape(_ITERATIONS, -1).max(axis=1)
    return float(per_step[-1] - per_step[-2])
