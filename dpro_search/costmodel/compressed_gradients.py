"""Cost of compressed gradients on CPU ranks beside their fewer bytes: casts, and sums that take longer.

PyTorch's ``fp16_compress_hook`` (`torch.distributed.algorithms.ddp_comm_hooks.default_hooks`) makes a half of a bucket and divides
it by the number of ranks before it calls the all-reduce; the callback of the all-reduce's future copies the result back into the
bucket. Gloo adds halves more slowly than float32. MXNet's KVStore pushes what it quantizes of a gradient and of what
earlier steps left over; its servers dequantize each worker's part. BytePS's trainer has MXNet make a half of a gradient, and of the
sum of halves a whole in new memory, which is copied into the gradient (`byteps.mxnet.compression.FP16Compressor`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.costmodel.collectives.horovod import CommCosts
from dpro_search.machine import machine_constants


def half_cast_us(bucket_bytes: Floats) -> Floats:
    """Core time of the main thread for the half of each float32 bucket, [buckets]."""
    known, half_bytes = machine_constants().half_gradients, bucket_bytes / 2
    is_fresh = half_bytes >= machine_constants().host.mapped_bytes
    return bucket_bytes * np.where(is_fresh, known.cast_mapped_us_per_byte, known.cast_us_per_byte)


def half_back_us(bucket_bytes: Floats) -> Floats:
    """Core time of Gloo's thread to copy each reduced half back into its float32 bucket, [buckets]."""
    return bucket_bytes * machine_constants().half_gradients.back_us_per_byte


def of_halves(costs: CommCosts, ranks: int) -> CommCosts:
    """Costs of all-reduces of float16 from those of float32, on so many ranks; per byte that is reduced."""
    cpu_us = costs.cpu_us + machine_constants().half_gradients.sum_us_per_byte * 2 * (ranks - 1) / ranks
    return replace(costs, cpu_us=cpu_us, beta_busy_us=max(costs.beta_busy_us, cpu_us), beta_tail_us=max(costs.beta_tail_us, cpu_us))
