"""How much of a cluster's ring bandwidth published all-reduces reach: ``python -m experiments.costmodel.topology FILE.csv.gz``.

FILE has measured collectives with the columns `system`, `collective`, `message_bytes`, `n_ranks`, `n_nodes`, `measured_by` and
`time_us` (nccl-tests and OSU logs of public repositories). For each system with a bundled machine: the median over
messages of at least 64 MiB of bus bandwidth over `Cluster.bandwidth_bytes_per_us`. `RING_EFFICIENCY` of
`kinds/_at_scale.py` is the median and the range over systems.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from dpro_search.cluster import parse_cluster

MACHINES = {  # of systems in the file
    "ABCI2.0-A": "abci-a",
    "ABCI2.0-V": "abci-v",
    "AWS-p4d-A100": "p4d.24xlarge",
    "AWS-p4de-A100": "p4de.24xlarge",
    "AWS-g4dn-T4": "g4dn.8xlarge",
    "NVIDIA-DGX-H100": "hgx-h100",
    "SimuMax-H100-8": "hgx-h100",
    "xxrjun-example-cluster00-H100": "hgx-h100",
    "xxrjun-example-cluster01-H100": "hgx-h100",
    "vTrain-a100": "dgx-a100-40",
}
LEAST_BYTES = 64 * 2**20


def main(path: Path) -> None:
    """Print a row for each system and number of nodes, then the median and the range over systems."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            machine = MACHINES.get(row["system"])
            if machine is None or row["collective"] != "all_reduce" or int(row["message_bytes"]) < LEAST_BYTES:
                continue
            ranks, nodes, time_us = int(row["n_ranks"]), int(row["n_nodes"]), float(row["time_us"])
            cluster = parse_cluster(f"{nodes}x{machine}")
            if ranks != cluster.ranks or row["measured_by"].endswith("(MPI host buffers, OpenMPI 4.0.5/UCX)"):
                continue  # part of a host's devices, or buffers that are not on devices
            bus_bytes_per_us = 2 * (ranks - 1) / ranks * int(row["message_bytes"]) / time_us
            found[row["system"], nodes].append(bus_bytes_per_us / cluster.bandwidth_bytes_per_us(range(ranks)))
    print("| system | nodes | messages | measured / ring bound |\n|---|---:|---:|---:|")
    for (system, nodes), ratios in sorted(found.items()):
        print(f"| {system} | {nodes} | {len(ratios)} | {median(ratios):.2f} |")
    medians = {system: median([median(values) for (name, _), values in found.items() if name == system]) for system, _ in found}
    print(f"\nmedian over systems {median(medians.values()):.2f}, from {min(medians.values()):.2f} to {max(medians.values()):.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
