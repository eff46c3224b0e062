"""Where calls of left-out systems change from one way to another, measured and predicted.

No log names an algorithm or a protocol, so that a change of either shows in times only:

* *start*: the size at which a call takes twice as long as the smallest one of its group. Below, latency decides (LL, trees);
* *half rate*: the size at which half of the bus bandwidth of the largest one is reached. Above, bandwidth decides (Simple, rings);
* *beyond the NICs*: an all-reduce between two nodes whose bus bandwidth exceeds the NICs' can only be a tree, whose bytes leave a
  node once; a ring's leave almost twice. A prediction is right if it says the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.costmodel.collectives.nccl.placement import paths
from experiments.costmodel.nccl.data import OF_FITS, Measured, cluster_of

Floats = npt.NDArray[np.float64]
FEWEST = 8  # sizes of a group, for a curve
LARGE_BYTES = 128 * 2**20  # where an all-reduce reaches its rate
MORE = 1.05  # times the NICs' rate: beyond the noise of a run


@dataclass(frozen=True)
class Group:
    """Calls of one collective among the same ranks, by size."""

    name: str
    nodes: int
    bytes: Floats
    measured_us: Floats
    predicted_us: Floats


def groups(rows: Sequence[Measured], errors: Any) -> list[tuple[Measured, Group]]:
    """Groups with one of their calls; systems of which only lines through the logs are given have no curve."""
    of: dict[tuple[str, str, int, int], list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        of[row.system, row.collective, row.nodes, row.ranks].append(number)
    found = []
    for (system, collective, nodes, ranks), numbers in sorted(of.items()):
        order = sorted(numbers, key=lambda number: rows[number].bytes)
        measured_us = np.array([rows[number].time_us for number in order])
        group = Group(
            name=f"{system}, {collective}, {ranks} ranks",
            nodes=nodes,
            bytes=np.array([rows[number].bytes for number in order]),
            measured_us=measured_us,
            predicted_us=measured_us * np.exp([errors[number] for number in order]),
        )
        found.append((rows[order[0]], group))
    return found


def start_bytes(size: Floats, us: Floats) -> float | None:
    """Where a call takes twice as long as the smallest; None: it never does, or the smallest is large already."""
    return _reached(size, us / us[0], 2.0) if size[0] <= 2**14 else None


def half_rate_bytes(size: Floats, us: Floats) -> float | None:
    """Where half of the largest call's rate is reached; None: the smallest reaches it already, or the largest is small."""
    return _reached(size, size / us, 0.5 * size[-1] / us[-1]) if size[-1] >= 2**26 else None


def _reached(size: Floats, values: Floats, wanted: float) -> float | None:
    """The least size from which on all values are above a limit, interpolated between logarithms."""
    below = np.flatnonzero(values < wanted)
    if not len(below) or below[-1] == len(values) - 1:
        return None
    at = int(below[-1])
    share = np.log(wanted / values[at]) / np.log(values[at + 1] / values[at])
    return float(np.exp(np.log(size[at]) + share * np.log(size[at + 1] / size[at])))


def show(rows: Sequence[Measured], errors: Any) -> None:
    """Tables of where curves change, and of what exceeds the NICs."""
    found = groups(rows, errors)
    print("\n| change | nodes | systems | groups | predicted / measured size, median | within 2x, % | within 4x, % |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for title, where in (("start", start_bytes), ("half rate", half_rate_bytes)):
        for label, several in (("1", False), ("2 and more", True)):
            by_system: dict[str, list[float]] = defaultdict(list)
            for row, group in found:
                if len(group.bytes) < FEWEST or row.system in OF_FITS or (group.nodes > 1) != several:
                    continue
                sizes = where(group.bytes, group.measured_us), where(group.bytes, group.predicted_us)
                if sizes[0] is not None and sizes[1] is not None:
                    by_system[row.system].append(float(np.log2(sizes[1] / sizes[0])))
            _line(title, label, by_system)
    print(
        "\n| all-reduce between two nodes, from 128 MiB on | bus bandwidth over the NICs', measured | predicted | same side of 1 |"
    )
    print("|---|---:|---:|---|")
    for row, group in found:
        if row.collective != "all_reduce" or row.nodes != 2 or group.bytes[-1] < LARGE_BYTES:
            continue
        nic = paths(cluster_of(row.system, row.nodes), row.placement).nic_bytes_per_us
        moved = 2 * (row.ranks - 1) / row.ranks * group.bytes[-1]
        ratios = moved / group.measured_us[-1] / nic, moved / group.predicted_us[-1] / nic
        same = "yes" if (ratios[0] > MORE) == (ratios[1] > MORE) else "no"
        print(f"| {group.name} | {ratios[0]:.2f} | {ratios[1]:.2f} | {same} |")


def _line(title: str, nodes: str, by_system: dict[str, list[float]]) -> None:
    """Every system with the same weight."""
    if not by_system:
        return
    middle = 2 ** median(median(values) for values in by_system.values())
    within = [np.mean([np.mean(np.abs(values) <= limit) for values in by_system.values()]) * 100 for limit in (1, 2)]
    count = sum(map(len, by_system.values()))
    print(f"| {title} | {nodes} | {len(by_system)} | {count} | {middle:.2f} | {within[0]:.0f} | {within[1]:.0f} |")
