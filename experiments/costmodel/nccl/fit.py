"""Fits the constants of `dpro_search.costmodel.collectives.nccl` to measured calls, every system with the same weight."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from dpro_search.costmodel.collectives.nccl.constants import PROTOCOLS, NcclConstants, constants_of
from dpro_search.costmodel.collectives.nccl.lines import lines
from dpro_search.costmodel.collectives.nccl.placement import Paths, paths
from experiments.costmodel.nccl.data import Measured, cluster_of

SMALL_BYTES = 2**20
LOSS_SCALE = 0.1  # errors beyond it count linearly: single systems with a fault of their own do not decide
STEP = 1e-3  # of a constant's logarithm, for derivatives
PRIOR = 0.2  # weight of a constant's start, NCCL's own: decides only what the measurements leave open

START: dict[str, float] = {  # NCCL's src/graph/tuning.cc where it has them
    "launch.ampere": 6.6, "launch.hopper": 6.6, "launch.blackwell": 6.6, "launch.other": 6.6,
    "hop.ampere": 0.6, "hop.hopper": 0.6, "hop.blackwell": 0.6, "hop.other": 0.8,
    "launch_more.LL128": 4.0, "launch_more.Simple": 10.0,  # each over the protocol before
    "hop_more.LL128": 0.6, "hop_more.Simple": 1.5,
    "net_hop.LL": 2.0, "net_hop.LL128": 2.5, "net_hop.Simple": 5.0,
    "nvlink.Simple": 0.78, "pcie.Simple": 0.6, "net.Simple": 0.96,
    "part.LL128": 0.85, "nvlink.LL": 0.35, "pcie.LL": 0.35, "net.LL": 0.35,  # of Simple's
    "direct": 0.95, "pair": 1.0, "own_part": 0.35, "tree_ratio": 0.9, "switch_ratio": 0.6, "switch_us": 15.0,
    "peer.LL": 0.5, "peer.Simple": 0.5, "direct_us": 4.0, "net_peer": 1.0,
    "pipeline.LL128": 2.0, "pipeline.Simple": 10.0, "staged": 0.5, "slingshot": 0.8,
}  # fmt: skip
BOUNDS = {"part.LL128": (0.3, 0.95), "net.LL": (0.01, 1.0)}
FIXED = ("tree_ratio", "net.Simple")
"""Not fitted, for few systems would pull them apart: NCCL's own. Rings: it counts 12 of 12.5 GB/s of a NIC (src/graph/topo.h), and
its authors expect 48 to 49 of 50 (NVIDIA/nccl-tests, issue 267)."""
DEVICES = {
    "ampere": r"\bA(10|30|40|100|800)|RTX (3|A)",
    "hopper": r"\bG?H(20|100|200|800)",
    "blackwell": r"\bG?B(100|200|300)",
    "other": "",
}
TREE_CHANNELS = {"ampere": [23.6e3, 17.8e3], "hopper": [41.4e3, 36e3], "blackwell": [82.8e3, 72e3], "other": [18.5e3, 10e3]}
"""What a channel of a tree moves at most between two nodes and more: perChMaxTreeBws of NCCL's src/graph/tuning.cc."""


REGIMES = ("in.small", "in.large", "out.small", "out.large", "far.small", "far.large")
"""Calls that have an interval of their own: within a node, between nodes, among more than `MANY_DOMAINS` nodes; by size."""


def constants(values: dict[str, float], intervals: dict[str, float] | None = None, source: str = "-") -> NcclConstants:
    """Constants of flat values, as `START` names them."""
    return constants_of(table(values, intervals or dict.fromkeys(REGIMES, 2.0), source))


def table(values: dict[str, float], intervals: dict[str, float], source: str) -> dict[str, Any]:
    """The content of ``constants.toml``."""

    def more(name: str) -> list[float]:
        first = values[f"{name}.LL128"]
        return [0.0, first, first + values[f"{name}.Simple"]]

    def ratio(name: str) -> list[float]:
        best = values[f"{name}.Simple"]
        return [best * values[f"{name}.LL"], best * values["part.LL128"], best]

    kinds = [
        {
            "name": name,
            "devices": devices,
            "launch_us": values[f"launch.{name}"],
            "hop_us": values[f"hop.{name}"],
            "tree_channel_bytes_per_us": TREE_CHANNELS[name],
        }
        for name, devices in DEVICES.items()
    ]
    return {
        "source": source,
        "launch_more": more("launch_more"),
        "hop_more": more("hop_more"),
        "net_hop": [values[f"net_hop.{one}"] for one in PROTOCOLS],
        "nvlink_ratio": ratio("nvlink"),
        "pcie_ratio": ratio("pcie"),
        "net_ratio": ratio("net"),
        "pair_ratio": values["pair"],
        "own_part": values["own_part"],
        "tree_ratio": values["tree_ratio"],
        "direct_ratio": values["direct"],
        "direct_us": values["direct_us"],
        "switch_ratio": values["switch_ratio"],
        "switch_us": values["switch_us"],
        "peer_us": [values["peer.LL"], values["peer.Simple"]],
        "net_peer": values["net_peer"],
        "pipeline_us": [0.0, values["pipeline.LL128"], values["pipeline.Simple"]],
        "staged_ratio": values["staged"],
        "slingshot_ratio": values["slingshot"],
        "inside_interval": {"small": intervals["in.small"], "large": intervals["in.large"]},
        "between_interval": {"small": intervals["out.small"], "large": intervals["out.large"]},
        "far_interval": {"small": intervals["far.small"], "large": intervals["far.large"]},
        "architectures": kinds,
    }


class Calls:
    """Measured calls as arrays, by group of ranks."""

    def __init__(self, measured: Sequence[Measured]) -> None:
        self.rows = list(measured)
        groups: dict[tuple[str, str, int, int], list[int]] = defaultdict(list)
        for number, row in enumerate(self.rows):
            groups[row.system, row.collective, row.ranks, row.nodes].append(number)
        self.groups: list[tuple[str, Paths, Any]] = []
        for (system, collective, _, nodes), numbers in groups.items():
            where = paths(cluster_of(system, nodes), self.rows[numbers[0]].placement)
            self.groups.append((collective, where, np.array(numbers)))
        self.bytes = np.array([row.bytes for row in self.rows])
        self.log_us = np.log([row.time_us for row in self.rows])
        cells = [(row.system, row.collective, row.nodes, row.bytes < SMALL_BYTES) for row in self.rows]
        rows_of, cells_of = Counter(cells), Counter(cell[0] for cell in set(cells))
        self.weight = np.array([1.0 / rows_of[cell] / cells_of[cell[0]] for cell in cells])

    def log_errors(self, of: NcclConstants, sharpness: float = math.inf, among: Sequence[int] | None = None) -> Any:
        """log(predicted / measured) of each call, [calls]; the less sharp the minimum over lines, the more slower lines count.

        `among`: numbers of the groups that are of interest, None: all. Calls of others are as if they had taken 1 us.
        """
        found = np.zeros(len(self.rows))
        for collective, where, numbers in self.groups if among is None else [self.groups[number] for number in among]:
            ways = np.array([way[2:] for way in lines(collective, where, of)])
            logs = np.log(ways[:, :1] + ways[:, 1:] * self.bytes[numbers])
            least = logs.min(axis=0)
            if math.isfinite(sharpness):
                least = least - np.log(np.exp(-sharpness * (logs - least)).sum(axis=0)) / sharpness
            found[numbers] = least
        return found - self.log_us

    def depending(self, of: NcclConstants, other: NcclConstants) -> list[int]:
        """Numbers of the groups of which any way differs between two sets of constants."""
        return [
            number
            for number, (collective, where, _) in enumerate(self.groups)
            if lines(collective, where, of) != lines(collective, where, other)
        ]

    def calls_of(self, groups: Sequence[int]) -> Any:
        """Numbers of the calls of groups, [calls]."""
        return np.concatenate([self.groups[number][2] for number in groups] or [np.zeros(0, np.int64)])


def for_fit(measured: Sequence[Measured]) -> list[Measured]:
    """Without L40S beyond two GPUs, which wait for the host's memory."""
    return [row for row in measured if not (row.system == "AIC-l40s" and row.ranks > 2)]


def thinned(measured: Sequence[Measured]) -> list[Measured]:
    """Of each group of ranks about one call for each power of two."""
    found: dict[tuple[Any, ...], Measured] = {}
    for row in measured:
        found.setdefault((row.system, row.collective, row.ranks, row.nodes, round(math.log2(row.bytes))), row)
    return list(found.values())


def fitted(calls: Calls, start: dict[str, float] = START, fixed: Sequence[str] = FIXED) -> dict[str, float]:
    """Constants with the least robust error of log times; first with a soft minimum over lines, so that none is lost early."""
    names = [name for name in start if name not in fixed]
    first = np.log([start[name] for name in names])
    bounds = [np.log(BOUNDS.get(name, (start[name] / 20, start[name] * 20))) for name in names]
    low, high = np.array(bounds).T
    root, at = np.sqrt(calls.weight), first

    def of(at: Any) -> NcclConstants:
        return constants({**start, **dict(zip(names, np.exp(at).tolist(), strict=True))})

    steps = np.eye(len(names)) * STEP
    groups = [calls.depending(of(first), of(first + step)) for step in steps]  # a constant concerns few of them
    rows = [calls.calls_of(numbers) for numbers in groups]
    for sharpness in (6.0, math.inf):

        def residual(errors: Any) -> Any:
            scaled = errors / LOSS_SCALE
            return root * np.sign(scaled) * np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1))  # soft L1 by row

        def residuals(at: Any, sharpness: float = sharpness) -> Any:
            return np.concatenate((residual(calls.log_errors(of(at), sharpness)), PRIOR * (at - first)))

        def jacobian(at: Any, sharpness: float = sharpness) -> Any:
            found, here = np.zeros((len(calls.rows), len(names))), residual(calls.log_errors(of(at), sharpness))
            for name, step in enumerate(steps):
                step = step if at[name] + STEP <= high[name] else -step
                moved = residual(calls.log_errors(of(at + step), sharpness, groups[name]))
                found[rows[name], name] = (moved - here)[rows[name]] / step[name]
            return np.concatenate((found, PRIOR * np.eye(len(names))))

        at = least_squares(residuals, at, jacobian, method="trf", max_nfev=30, bounds=(low, high)).x
    return {**start, **dict(zip(names, np.exp(at).tolist(), strict=True))}
