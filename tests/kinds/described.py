"""A kind of job without a recording, in one file: a transformer, a mesh and a cluster in a ``job.toml``.

Layers compute at a share of their device's peak, and DistributedDataParallel all-reduces their gradients over the mesh's axis `dp`.
A plan says how large buckets are.

    [model]
    layers = 24
    hidden = 2048
    [mesh]
    dp = 16
    [run]
    cluster = "2xhgx-h100"
    sequence = 2048
    batch = 4                     # of each rank
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpro_search.cluster import Cluster, parse_cluster
from dpro_search.collect.trace import TensorInfo
from dpro_search.deploy.parts.part import JobFacts as DeployedFacts
from dpro_search.deploy.parts.pytorch import DDP
from dpro_search.errors import InputError
from dpro_search.kinds import DescribedKind, Description, Job, PlanOptions
from dpro_search.kinds._gpu_cluster import DataParallelReplay, GpuClusterJob, RankWorkload, members
from dpro_search.space.data_parallel import layered_step
from dpro_search.space.plan import Plan
from dpro_search.space.programs.ddp_job import bucket_assignment
from dpro_search.space.transformations import BucketSize, PlanningFacts, PlanSpace

SHARE_OF_PEAK = 0.4  # that layers reach, in bf16 (assumed)
BUCKET_BYTES = 25 * 2**20  # PyTorch's default
KEYS = {"model": ("layers", "hidden"), "mesh": ("dp",), "run": ("cluster", "sequence", "batch")}


@dataclass(frozen=True, kw_only=True)
class Transformer(Description):
    """What the file says."""

    layers: int
    hidden: int
    sequence: int
    batch: int
    dp: int
    cluster: Cluster

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Gradients in bf16, the last layer's first: 12 h^2 parameters a layer (Narayanan et al. 2021)."""
        count = 12 * self.hidden**2
        return tuple(
            TensorInfo(name=name, node=name, dtype="bfloat16", shape=(count,), size_bytes=2 * count)
            for name in (f"layer{number}" for number in reversed(range(self.layers)))
        )

    @property
    def forward_flops(self) -> float:
        """Of one layer: 24 b s h^2 + 4 b s^2 h."""
        tokens = self.batch * self.sequence
        return 24 * tokens * self.hidden**2 + 4 * tokens * self.sequence * self.hidden


class DescribedJob(GpuClusterJob):
    """The job on a cluster, its own or another."""

    def __init__(self, description: Transformer, cluster: Cluster, ranks: int | None) -> None:
        tensors = description.tensors
        facts = PlanningFacts(name=KIND.title, tensors=tensors, values={"bucket_cap_bytes": BUCKET_BYTES})

        def workload(plan: Plan, machines: Cluster) -> RankWorkload:
            """Layers take what they take on the machines' devices."""
            layer_us = description.forward_flops / (peak_flops_per_s(machines) * SHARE_OF_PEAK) * 1e6
            step = layered_step(
                [tensor.size_bytes for tensor in tensors],
                forward_us=description.layers * layer_us,
                backward_us=2 * layer_us,
                update_us=0.0,
                tensor_names=[tensor.name for tensor in tensors],
            )
            limit = plan.get("bucket_cap_bytes") or BUCKET_BYTES
            return RankWorkload(steps=(step,), groups=members(bucket_assignment(tensors, [limit])))

        super().__init__(
            title=KIND.title,
            tensors=tensors,
            space=PlanSpace(facts, [BucketSize(facts)]),
            workload=workload,
            cluster=cluster,
            ranks=ranks,
            questions={"bucket_cap_bytes=100MiB": Plan.of(bucket_cap_bytes=100 * 2**20)},
        )

    def _assumptions(self, replayable: DataParallelReplay) -> tuple[str, ...]:
        return (f"layers reach {SHARE_OF_PEAK:.0%} of their device's peak",)


def peak_flops_per_s(machines: Cluster) -> float:
    """FLOP/s of the machines' devices in bf16; raises `InputError` if they are of several kinds, or it is not known."""
    devices = {group.host.device.name: group.host.device for group in machines.groups}
    if len(devices) > 1:
        raise InputError(f"{machines.name}: a described job needs devices of one kind, not {' and '.join(devices)}")
    (device,) = devices.values()
    peak = device.peak_flops_per_s("bf16")
    if peak is None:
        raise InputError(f"{device.name}: its peak in bf16 is not known: name it in the cluster's file")
    return peak


class TransformerKind(DescribedKind[Transformer]):
    title = "a described transformer"
    targets = (DDP,)
    job_type = DescribedJob
    source_type = Transformer

    def read(self, path: Path) -> Transformer | None:
        if path.suffix != ".toml":
            return None
        try:
            table = tomllib.loads(path.read_text())
        except ValueError as error:
            raise InputError(f"{path}: {error}") from error
        if "model" not in table:
            return None
        values: dict[str, Any] = {}
        for part, keys in KEYS.items():
            for key in keys:
                if key not in table.get(part, {}):
                    raise InputError(f"{path}: [{part}] has no '{key}'")
                values[key] = table[part][key]
        name = values.pop("cluster")
        cluster = parse_cluster(name)
        files = {"cluster_file": Path(name)} if Path(name).is_file() else {}
        provenance = (
            ("model", f"{values['layers']} layers of {values['hidden']}"),
            ("ranks", f"{values['dp']} on {cluster.describe()}"),
        )
        return Transformer(framework="pytorch", provenance=provenance, files=files, cluster=cluster, **values)

    def job(self, source: Transformer, /, options: PlanOptions) -> Job:
        if options.compute or options.all_reduce_model is not None:
            raise InputError(f"{self.title} has plans for buckets only")
        return DescribedJob(source, source.cluster, source.dp)

    def facts(self, source: Transformer) -> DeployedFacts:
        return DeployedFacts(framework="pytorch", tensors=source.tensors, ready_order=True, ranks=source.dp)


KIND = TransformerKind()
