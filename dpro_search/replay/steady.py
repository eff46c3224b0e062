"""Several iterations of a graph, and the distance between them once it has settled."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.space.graph_builder import Labels
from dpro_search.space.replay_graph import Int32s, ReplayGraph, SharedCores, csr

_SAME = 1e-3  # distances that differ by less, relatively, are one
_LONG = 4  # distances of a cycle that need not be equal one by one
_AGREE = 0.01  # halves of a run whose medians differ by less, relatively and beyond their noise, agree


def unrolled(graph: ReplayGraph, iterations: int) -> ReplayGraph:
    """A graph of several iterations, joined by the carried dependencies: op i of iteration k becomes op ``k * n + i``.

    Samples and buffers stay with the graph of one iteration.
    """
    if iterations == 1:
        return graph
    count = len(graph)
    first = np.repeat(np.arange(iterations, dtype=np.int32) * count, count)
    pred_ptr, pred_idx = _predecessors(graph, iterations)
    collective = np.tile(graph.collective, iterations)
    if len(collective):
        collective = np.where(collective >= 0, collective + first // count * (graph.collective.max() + 1), -1).astype(np.int32)
    return replace(
        graph,
        duration_us=np.tile(graph.duration_us, iterations),
        device=np.tile(graph.device, iterations),
        kind=np.tile(graph.kind, iterations),
        priority=np.tile(graph.priority, iterations),
        pred_ptr=pred_ptr,
        pred_idx=pred_idx,
        collective=collective,
        flow_bytes=np.tile(graph.flow_bytes, iterations),
        link_ptr=_tiled_ptr(graph.link_ptr, iterations),
        link_idx=np.tile(graph.link_idx, iterations),
        cores=None if graph.cores is None else _repeated_cores(graph.cores, iterations),
        carry_src=graph.carry_src[:0],
        carry_dst=graph.carry_dst[:0],
        samples_us=graph.samples_us[:0, :0],
        buffer_op=graph.buffer_op[:0],
        buffer_bytes=graph.buffer_bytes[:0],
        buffer_ptr=graph.buffer_ptr[:0],
        buffer_use=graph.buffer_use[:0],
        names=_repeated(graph.names, iterations) if len(graph.names) else (),
    )


def _repeated_cores(cores: SharedCores, iterations: int) -> SharedCores:
    columns = {name: np.tile(getattr(cores, name), iterations) for name in ("idle_us", "core_us", "finish_us")}
    return replace(cores, **columns)


def _repeated(names: Sequence[str], iterations: int) -> Labels:
    """Names of the ops of several iterations: "name#iteration"."""
    labels = Labels("op")
    labels.add("{1}#{0}", (range(iterations), names), (iterations, len(names)))
    return labels


def settled_distance(end_us: Floats) -> tuple[float, bool]:
    """Distance between iterations that end at these times, [iterations >= 2], and whether it has settled.

    Max-plus systems end in a cycle: the distances repeat after some iterations, often after one. Settled: the last distances are
    equal to those one cycle before, for a cycle of at most a third of the iterations; the distance is then the cycle's mean. Where
    thousands of messages meet, the turns of a cycle differ a little for good: of a cycle of `_LONG` the means have to be equal.
    Otherwise it is the mean of the last half. The last iteration does not count, if there are others: no next one takes cores and
    links from its end, so that it is shorter however often the cycle has repeated.
    """
    distance = np.diff(end_us[:-1] if len(end_us) > 2 else end_us)
    close = _SAME * max(float(np.abs(distance).mean()), 1e-12)
    for cycle in range(1, len(end_us) // 3 + 1):
        last, before = distance[-cycle:], distance[-2 * cycle : -cycle]
        if len(before) < cycle:
            break
        apart = abs(last.mean() - before.mean()) if cycle >= _LONG else np.abs(last - before).max()
        if apart <= close:
            return float(last.mean()), True
    return float(distance[len(distance) // 2 :].mean()), False


def halves_agree(distances_us: Floats) -> bool:
    """Whether iterations that vary have settled: the two halves of a run have one median, up to 1 % and their noise.

    Plain Python: for the few dozen iterations of a replay it is faster than NumPy, and to compile it takes longer than a search.
    """
    half = len(distances_us) // 2
    if half < 2:
        return True
    every: list[float] = distances_us.tolist()
    first, second = every[:half], every[half:]
    allowed = 2 * np.hypot(_error_of_mean(first), _error_of_mean(second)) + _AGREE * statistics.median(every)
    return bool(abs(statistics.median(first) - statistics.median(second)) <= allowed)


def _error_of_mean(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return deviation / math.sqrt(len(values))


def _predecessors(graph: ReplayGraph, iterations: int) -> tuple[Int32s, Int32s]:
    """Dependencies of all iterations: those of one, and from the second on the carried ones."""
    count = len(graph)
    source, destination = graph.edges()
    with_carried = np.concatenate((source, graph.carry_src - count)), np.concatenate((destination, graph.carry_dst))
    ptr, idx = csr(with_carried[1], with_carried[0], count)
    later = np.arange(1, iterations, dtype=np.int32)
    all_ptr = np.concatenate((graph.pred_ptr[:-1], *(graph.pred_ptr[-1] + (k - 1) * ptr[-1] + ptr[:-1] for k in later)))
    all_idx = np.concatenate((graph.pred_idx, (idx + later[:, None] * count).ravel()))
    return np.append(all_ptr, len(all_idx)).astype(np.int32), all_idx.astype(np.int32)


def _tiled_ptr(ptr: Int32s, iterations: int) -> Int32s:
    if not len(ptr):
        return ptr
    return np.append(np.concatenate([ptr[:-1] + k * ptr[-1] for k in range(iterations)]), iterations * ptr[-1]).astype(np.int32)
