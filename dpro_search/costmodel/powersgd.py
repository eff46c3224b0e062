"""Matrices that PyTorch's PowerSGD hook makes of the gradients of a bucket, and their cost on CPU ranks.

``powerSGD_hook`` (`torch.distributed.algorithms.ddp_comm_hooks`; Vogels et al. 2019) views a gradient as a matrix M of n rows and m
columns, and in place of it all-reduces P = M Q, of n x r, and Q = M^T P, of m x r, where these are less than half as large. What is
not compressed goes before them, in one all-reduce. So a bucket has three all-reduces, which follow each other, and four stages of
compute: one before each, and one after the last. What earlier steps left over is added to a bucket, and what this step leaves over
is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpro_search.collect.trace import Floats, Ints, TensorInfo
from dpro_search.machine import machine_constants

RANKS = (4, 2, 1)  # r of the plans; what the hook takes for others was not measured
COMPRESSIONS = {f"powersgd-{rank}": rank for rank in RANKS}
SENT_PARTS = ("vectors", "P", "Q")  # what the hook sends of a bucket, in this order
_MIN_COMPRESSION_RATE = 2  # the hook's own
_ALIASED_BYTES = 4096  # rows that are multiples of it compete for the same lines of a cache


@dataclass(frozen=True, kw_only=True)
class LowRankBuckets:
    """Buckets under the hook."""

    sent_bytes: Floats  # Bytes of the three all-reduces of each bucket: what is not compressed, Ps, and Qs, [buckets, 3].
    stages_us: Floats  # Core time of the compute before each of them, and after the last, [buckets, 4].


def low_rank(tensors: Sequence[TensorInfo], bucket_of: Ints, rank: int) -> LowRankBuckets:
    """Buckets as the hook makes them of gradients, [tensors], with matrices P and Q of rank `rank`, one of `RANKS`."""
    factors = [factor_elements(tensor, rank) for tensor in tensors]
    size = np.array([tensor.size_bytes for tensor in tensors], dtype=np.float64)
    elements = np.array([max(math.prod(tensor.shape), 1) for tensor in tensors], dtype=np.float64)
    is_left = np.array([factor is None for factor in factors])
    parts = np.array([factor or (0, 0) for factor in factors], dtype=np.float64) * (size / elements)[:, None]
    sent = np.stack([_by_bucket(column, bucket_of) for column in (size * is_left, *parts.T)], axis=1)
    stages_us = machine_constants().powersgd.stages_us(rank)
    return LowRankBuckets(sent_bytes=sent, stages_us=features(tensors, bucket_of, rank) @ np.array(stages_us).T)


def factor_elements(tensor: TensorInfo, rank: int) -> tuple[int, int] | None:
    """Elements of a gradient's P and Q, [n, r] and [m, r]; None for one that the hook does not compress."""
    if not tensor.shape:
        return None
    rows, columns = tensor.shape[0], math.prod(tensor.shape[1:])
    least = min(rows, columns, rank)
    worth = (rows + columns) * least * _MIN_COMPRESSION_RATE < rows * columns
    return (rows * least, columns * least) if worth else None


def kept_bytes(tensors: Sequence[TensorInfo], bucket_of: Ints, rank: int) -> int:
    """Memory of a process that the hook takes: its tensors, and, a second time, what steps left over of each bucket.

    Either of Gloo's two threads makes what is left over of a bucket, and glibc keeps the room for it in a heap of each: with one
    heap for all threads (``MALLOC_ARENA_MAX=1``) a job of 730 MiB took 61 MiB less.
    """
    return allocated_bytes(tensors, bucket_of, rank) + sum(tensor.size_bytes for tensor in tensors)


def allocated_bytes(tensors: Sequence[TensorInfo], bucket_of: Ints, rank: int) -> int:
    """Bytes of the hook's tensors: Ps and Qs, two copies of the largest bucket, and what steps left over of each bucket."""
    buckets = _by_bucket(np.array([tensor.size_bytes for tensor in tensors], dtype=np.float64), bucket_of)
    factors = low_rank(tensors, bucket_of, rank).sent_bytes[:, 1:].sum()
    return int(buckets.sum() + factors + 2 * buckets.max())


def features(tensors: Sequence[TensorInfo], bucket_of: Ints, rank: int) -> Floats:
    """Quantities that the core time of a bucket's stages is linear in, [buckets, 8].

    The columns: 1; gradients that are compressed, and that are not; bytes of the former, and of the latter; bytes of a bucket that
    is copied to fresh memory; bytes of compressed gradients with many rows, and with rows that are aliased in a cache.
    """
    size = np.array([tensor.size_bytes for tensor in tensors], dtype=np.float64)
    is_matrix = np.array([factor_elements(tensor, rank) is not None for tensor in tensors])
    rows = np.array([tensor.shape[0] if tensor.shape else 1 for tensor in tensors], dtype=np.float64)
    is_aliased = np.where(rows > 0, size / np.maximum(rows, 1), 1) % _ALIASED_BYTES == 0
    bucket_bytes = _by_bucket(size, bucket_of)
    columns = (is_matrix, ~is_matrix, size * is_matrix, size * ~is_matrix)
    shaped = (size * is_matrix * (rows >= machine_constants().powersgd.tall_rows), size * is_matrix * is_aliased)
    return np.stack(
        [
            np.ones(len(bucket_bytes)),
            *(_by_bucket(column, bucket_of) for column in columns),
            bucket_bytes * (bucket_bytes >= machine_constants().host.mapped_bytes),
            *(_by_bucket(column, bucket_of) for column in shaped),
        ],
        axis=1,
    )


def _by_bucket(values: Floats, bucket_of: Ints) -> Floats:
    return np.asarray(np.bincount(bucket_of, weights=values), dtype=np.float64)
