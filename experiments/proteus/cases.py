"""Jobs like those of Proteus: its clusters, its models, and strategies of every kind that it compares.

The clusters are those of the paper and of the topology files that its authors released (JF-D/Proteus on GitHub, folder
examples/clusters): a host of 8 Titan Xp on PCIe; 4 hosts of 8 V100 with one and with two InfiniBand cards; 2 hosts of 8 A100.
Models train as PyTorch trained them then: fp32 (TF32 on A100), unfused attention, DistributedDataParallel with buckets of 25 MiB
and a first one of 1 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from dpro_search.cluster import Cluster, parse_cluster
from dpro_search.errors import InputError
from dpro_search.parallel.gpu_ops import AttentionKernels, Kernels, LossKernels
from dpro_search.parallel.legality import check_strategy
from dpro_search.parallel.model import Model, Network, model
from dpro_search.parallel.model.networks import dlrm
from dpro_search.parallel.runtime import Runtime
from dpro_search.parallel.strategy import Recompute, Strategy
from dpro_search.parallel.workload import Workload

RUNTIME = Runtime(
    name="PyTorch",
    kernels=Kernels(fused=False, attention=AttentionKernels.SCORES, loss=LossKernels.LOG_SOFTMAX),
    bucket_bytes=25 * 2**20,
    overlap_tensor=False,
    clip_gradients=False,
    accumulate_bytes=12.0,  # fp32 gradients: the new one and the sum are read, the sum is written
)
SEQUENCE = 1024


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model and how much of the batch each GPU has under data parallelism."""

    model: Model
    each: int  # Sequences, images or samples.
    sequence: int = 1


def dlrm_of_proteus() -> Network:
    """Eight tables of a million rows, of each of which a sample reads a hundred (JF-D/Proteus, examples/dlrm.py)."""
    return dlrm(
        tables=8, rows=8_000_000, width=64, numbers=128, bottom=(512, 512, 512, 64), top=(1024, 1024, 1024, 1024, 1), lookups=100
    )


MODELS = {
    "ResNet-50": Trained(model=model("resnet50"), each=32),
    "Inception-v3": Trained(model=model("inception-v3"), each=32),
    "VGG-19": Trained(model=model("vgg19"), each=32),
    "DLRM": Trained(model=dlrm_of_proteus(), each=128),
    "GPT-2 (124M)": Trained(model=model("gpt2"), each=4, sequence=SEQUENCE),
    "GPT-2 XL (1.5B)": Trained(model=model("gpt2-xl"), each=1, sequence=SEQUENCE),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job."""

    cluster: str
    model: str
    strategy: str
    workload: Workload


def clusters() -> dict[str, tuple[Cluster, str]]:
    """Clusters, and the precision of their matmuls."""
    v100 = parse_cluster("4xdgx-1-v100")
    return {
        "8 x Titan Xp, PCIe": (parse_cluster("titan-xp-pcie-8"), "fp32"),
        "4 x 8 V100, 1 card": (_with_cards(v100, 1), "fp32"),
        "4 x 8 V100, 2 cards": (_with_cards(v100, 2), "fp32"),
        "2 x 8 A100": (parse_cluster("2xdgx-a100-40"), "tf32"),
    }


def _with_cards(cluster: Cluster, count: int) -> Cluster:
    """The same with another number of network cards on each host."""
    replace = msgspec.structs.replace
    (group,) = cluster.groups
    nics = replace(group.host.nics, count=count)
    return replace(cluster, groups=(replace(group, host=replace(group.host, nics=nics)),))


def strategies(devices: int, trained: Trained) -> Iterator[tuple[str, Strategy]]:
    """Strategies that use all devices; networks are split over data parallel ranks only, embedding tables over ranks as well."""
    each, batch = trained.each, devices * trained.each
    yield f"dp {devices}", Strategy(dp=devices, micro_batch=each, global_batch=batch)
    if isinstance(trained.model, Network) and trained.model.tables:
        yield f"dp {devices}, tables over 8", Strategy(dp=devices, ep=8, micro_batch=each, global_batch=batch)
        return
    for stage in (1, 3):
        yield f"dp {devices}, ZeRO-{stage}", Strategy(dp=devices, micro_batch=each, global_batch=batch, zero_stage=stage)
    if isinstance(trained.model, Network):
        return
    recompute = Strategy(dp=devices, micro_batch=each, global_batch=batch, recompute=Recompute.FULL)
    yield f"dp {devices}, recomputation", recompute
    for tp in (2, 4, 8):
        dp = devices // tp
        yield f"tp {tp} x dp {dp}", Strategy(dp=dp, tp=tp, micro_batch=each * tp, global_batch=batch)
    for pp in (2, 4):
        dp = devices // pp
        yield f"pp {pp} x dp {dp}", Strategy(dp=dp, pp=pp, micro_batch=each, global_batch=batch)
    if devices > 8:
        dp = devices // 8
        yield f"tp 4 x pp 2 x dp {dp}", Strategy(dp=dp, tp=4, pp=2, micro_batch=each, global_batch=batch)


def cases() -> Iterator[Case]:
    """All jobs that can be split so."""
    for cluster_name, (cluster, precision) in clusters().items():
        for model_name, trained in MODELS.items():
            for strategy_name, strategy in strategies(cluster.ranks, trained):
                try:
                    check_strategy(strategy, trained.model, trained.sequence)
                except InputError:  # heads that do not divide
                    continue
                workload = Workload(
                    model=trained.model,
                    sequence=trained.sequence,
                    strategy=strategy,
                    cluster=cluster,
                    precision=precision,
                    runtime=RUNTIME,
                )
                yield Case(cluster=cluster_name, model=model_name, strategy=strategy_name, workload=workload)
