"""Measured NCCL calls of public sources, with the cluster that each ran on: ``measured(folder, aiconfigurator)``."""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from dpro_search.cluster import Cluster, parse_cluster
from dpro_search.costmodel.collectives.nccl import Placement

MACHINES = {
    "ABCI2.0-A": "abci-a",
    "ABCI2.0-V": "abci-v",
    "AWS-g4dn-T4": "g4dn.8xlarge",
    "AWS-p3dn-V100": "p3dn.24xlarge",
    "AWS-p4d-A100": "p4d.24xlarge",
    "AWS-p4de-A100": "p4de.24xlarge",
    "OCI-BM.GPU.B4.8-A100": "dgx-a100-40",  # eight A100 and NICs of 1.6 Tbit/s in all, as a DGX has
    "NVIDIA-DGX-H100": "hgx-h100",
    "SimuMax-H100-8": "hgx-h100",
    "mlperf-Oracle": "hgx-h100",
    "mlperf-smc": "hgx-h100",
    "xxrjun-example-cluster00-H100": "hgx-h100",
    "xxrjun-example-cluster01-H100": "hgx-h100",
    "ALCF-Polaris": "polaris",
    "ALCF-Sirius": "polaris",  # its test system: the same nodes
    "vTrain-a100": "dgx-a100-80",
    "vidur-a100_dgx": "dgx-a100-80",
    "vidur-h100_dgx": "hgx-h100",
    "AIC-a100_sxm": "dgx-a100-80",
    "AIC-h100_sxm": "hgx-h100",
    "AIC-h200_sxm": "hgx-h200",
    "AIC-b200_sxm": "hgx-b200",
    "AIC-b300_sxm": "hgx-b300",
    "AIC-gb200": "gb200-nvl72",
    "AIC-gb300": "gb300-nvl72",
    "AIC-l40s": "l40s-pcie-8",
    "AIC-rtx_pro_6000_server": "rtx-pro-6000",
}
NIC_UNKNOWN = ("xxrjun-example-cluster00-H100", "vidur-a100_dgx", "vidur-h100_dgx")  # calls among their nodes count for nothing
OF_FITS = ("ALCF-Polaris", "ALCF-Sirius", "AWS-p3dn-V100", "OCI-BM.GPU.B4.8-A100")  # of which only lines through the logs are given
NAMES = {"alltoall": "all_to_all", "sendrecv": "send_recv"}
FITTED_SIZES = (16 * 2**20, 2**27, 2**30)  # at which a line through large messages is taken as measured
SMALL_FIT_BYTES = 1024
_ITEM_BYTES = {"half": 2, "int8": 1}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The median of all calls of one sort and size on one system."""

    system: str
    collective: str
    ranks: int
    nodes: int
    bytes: float
    time_us: float

    @property
    def placement(self) -> Placement:
        return Placement(ranks_per_node=self.ranks // self.nodes, nodes=self.nodes)


def measured(folder: Path, aiconfigurator: Path | None) -> list[Measured]:
    """All that can be used, weighted by nothing yet."""
    times: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for key, time_us in (*_logs(folder / "collectives.csv.gz"), *_fits(folder / "fits.csv"), *_aiconfigurator(aiconfigurator)):
        times[key].append(time_us)
    found = []
    for (system, collective, ranks, nodes, size), values in sorted(times.items()):
        if system in MACHINES and size >= 512 and ranks % nodes == 0 and not (nodes > 1 and system in NIC_UNKNOWN):
            one = Measured(system=system, collective=collective, ranks=ranks, nodes=nodes, bytes=size, time_us=median(values))
            found.append(one)
    return found


def cluster_of(system: str, nodes: int) -> Cluster:
    """The machines that a system consists of."""
    name = MACHINES[system]
    if name == "rtx-pro-6000":  # no bundled machine: eight GPUs on PCIe 5.0 x16, as the package's own table of systems has them
        cluster = parse_cluster("l40s-pcie-8")
        group = cluster.groups[0]
        links = tuple(msgspec.structs.replace(link, rate_bps=504e9 if link.level == "pcie" else 320e9) for link in group.host.links)
        host = msgspec.structs.replace(group.host, links=links)
        return msgspec.structs.replace(cluster, groups=(msgspec.structs.replace(group, host=host),))
    cluster = parse_cluster(name)
    return cluster if cluster.hosts >= nodes else parse_cluster(f"{nodes}x{name}")


Row = tuple[tuple[Any, ...], float]


def _logs(path: Path) -> Iterator[Row]:
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            if row["kind"] == "gpu-collective" and float(row["time_us"]) > 0:
                yield _key(row, float(row["message_bytes"])), float(row["time_us"])


def _fits(path: Path) -> Iterator[Row]:
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["system"] not in OF_FITS or (row["system"].startswith("ALCF") and row["collective"] != "all_reduce"):
                continue  # sizes of Polaris' other collectives are of one rank's part
            if row["small_alpha_us"]:
                yield _key(row, SMALL_FIT_BYTES), float(row["small_alpha_us"])
            if row["large_busbw_GBps"]:
                ranks, alpha_us = int(row["n_ranks"]), max(float(row["large_alpha_us"]), 0.0)
                per_byte = 2 * (ranks - 1) / ranks / (float(row["large_busbw_GBps"]) * 1e3)
                for size in FITTED_SIZES:
                    yield _key(row, size), alpha_us + size * per_byte


def _aiconfigurator(folder: Path | None) -> Iterable[Row]:
    if folder is None:
        return
    from pyarrow import parquet

    for path in sorted(folder.rglob("nccl_perf.parquet")):
        parts = path.relative_to(folder).parts
        system = "AIC-" + parts[parts.index("data") + 1]
        for row in parquet.read_table(path).to_pylist():
            if row["num_gpus"] > 1 and row["latency"] > 0:
                size = row["message_size"] * _ITEM_BYTES[row["nccl_dtype"]]
                collective = NAMES.get(row["op_name"], row["op_name"])
                yield (system, collective, int(row["num_gpus"]), 1, float(size)), row["latency"] * 1e3


def _key(row: dict[str, str], size: float) -> tuple[Any, ...]:
    collective = NAMES.get(row["collective"], row["collective"])
    return row["system"], collective, int(row["n_ranks"]), int(row["n_nodes"]), float(size)
