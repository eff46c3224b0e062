"""What compressed gradients cost on CPU ranks beside their fewer bytes: casts, and sums that take longer.

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
from dpro_search.costmodel.horovod import CommCosts

# Core time per byte of a float32 bucket: PyTorch 2.13, one thread of an AMD EPYC, buckets of 16 MiB, which no cache keeps (1 MiB:
# 0.07e-3 and 0.024e-3). A half of 32 MiB and more is fresh memory at each call, for glibc maps and unmaps it: buckets of 64 MiB.
_CAST_US_PER_BYTE, _CAST_MAPPED_US_PER_BYTE, _BACK_US_PER_BYTE = 0.125e-3, 0.385e-3, 0.09e-3
_MAPPED_BYTES = 2 * 32 * 2**20
# Core time of an all-reduce of halves beside one of as many bytes of float32, per byte, two ranks: means over 4 and 16 MiB and over
# links without limit, of 2 Gbit/s and of 500 Mbit/s, 0.3 to 0.4e-3. On the limited links it took 0 to 3 % longer: sums hide there.
_SUM_US_PER_BYTE = 0.35e-3
# Core time per byte of a float32 gradient: least durations of QuantizeCPU (0.61 and 0.64e-3 on two workers) and of DequantizeCPU,
# for the part of each worker, in six profiled steps of ResNet-50 with 2-bit gradients (MXNet 1.9.1, one thread of an AMD EPYC).
TWO_BIT_QUANTIZE_US_PER_BYTE, TWO_BIT_DEQUANTIZE_US_PER_BYTE = 0.625e-3, 0.6e-3
# Core time of a worker for each float32 gradient and each of its bytes, both ways together: MXNet 1.9.1 and BytePS 0.2.5, two
# workers and two servers on two cores of an AMD EPYC. Where these only add up arrays (`experiments.costmodel.byteps_halves`), a
# gradient of 4 KB takes 440 us more as a half, 360 among large ones; a byte 2.1, 1.7, 1.6 and 2.4e-3 at 0.64, 5, 26 and 80 MB:
# 400 us and 1.9e-3. Jobs (`experiments.costmodel.byteps_halves_in_jobs`) take 0.62 of that, the mean of three pairs of runs of
# ResNet-50 (0.26 to 0.72) and three of Inception-v3 (0.68 to 1.06). Servers took -0.13 to 0.13e-3 more for each byte of halves that
# they added, 0.25e-3 for subnormal ones: left out.
BYTEPS_CAST_CALL_US, BYTEPS_CAST_US_PER_BYTE = 250.0, 1.2e-3


def half_cast_us(bucket_bytes: Floats) -> Floats:
    """Core time of the main thread for the half of each float32 bucket, [buckets]."""
    return bucket_bytes * np.where(bucket_bytes < _MAPPED_BYTES, _CAST_US_PER_BYTE, _CAST_MAPPED_US_PER_BYTE)


def half_back_us(bucket_bytes: Floats) -> Floats:
    """Core time of Gloo's thread to copy each reduced half back into its float32 bucket, [buckets]."""
    return bucket_bytes * _BACK_US_PER_BYTE


def of_halves(costs: CommCosts, ranks: int) -> CommCosts:
    """What all-reduces of halves cost where those of float32 cost this, on so many ranks; per byte that is reduced."""
    cpu_us = costs.cpu_us + _SUM_US_PER_BYTE * 2 * (ranks - 1) / ranks
    return replace(costs, cpu_us=cpu_us, beta_busy_us=max(costs.beta_busy_us, cpu_us), beta_tail_us=max(costs.beta_tail_us, cpu_us))
