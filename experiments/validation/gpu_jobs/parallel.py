"""DistributedDataParallel and FSDP2, with the settings that plans change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from experiments.validation.gpu_jobs.jobs import blocks_of, recompute

Wrap = Callable[[nn.Module], nn.Module]

DDP_VARIANTS: dict[str, dict[str, Any]] = {
    "as recorded": {},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "bucket_cap_mb=1": {"bucket_cap_mb": 1},
    "bucket_cap_mb=100": {"bucket_cap_mb": 100},
}
FSDP_VARIANTS: dict[str, dict[str, Any]] = {
    "as recorded": {},
    "reshard_after_forward=False": {"reshard": False},
    "prefetch": {"prefetch": True},
    "half recomputed": {"recomputed": 0.5},
}


def replicated(*, averages: bool = False, **options: Any) -> Wrap:
    """DistributedDataParallel; `averages`: a hook has NCCL average the buckets.

    By default NCCL sums them, for which a group of one rank runs no kernel, so that no profile shows a collective.
    """

    def wrap(model: nn.Module) -> nn.Module:
        parallel = DistributedDataParallel(model, **options)
        if averages:
            parallel.register_comm_hook(None, _averaged)
        return parallel

    return wrap


def _averaged(_, bucket):  # without annotations: PyTorch refuses those that are texts
    operation = dist.ReduceOp.AVG if torch.cuda.is_available() else dist.ReduceOp.SUM  # Gloo has no average
    return dist.all_reduce(bucket.buffer(), op=operation, async_op=True).get_future().then(lambda done: done.value()[0])


def sharded(*, reshard: bool = True, prefetch: bool = False, recomputed: float = 0.0) -> Wrap:
    """Each block of a transformer, and what is left of it, as a unit of FSDP2 that computes in bf16.

    `recomputed`: the share of the blocks, from the first, whose activations are not kept.
    """

    def wrap(model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        blocks = blocks_of(model)
        recompute(blocks[: round(recomputed * len(blocks))])
        units = [fully_shard(block, reshard_after_forward=reshard, mp_policy=MixedPrecisionPolicy(**precision)) for block in blocks]
        fully_shard(model, mp_policy=MixedPrecisionPolicy(**precision, output_dtype=torch.float32))
        if prefetch:
            for unit, following in zip([model, *units], units, strict=False):
                unit.set_modules_to_forward_prefetch([following])
        return model

    return wrap
