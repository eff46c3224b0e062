"""Random steps of a rank, for tests that compare two ways to replay a job."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpro_search.collect.trace import Floats
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.data_parallel import RankStep


def random_step(
    seed: int, tensor_bytes: Floats, policies: Sequence[int], durations_us: Sequence[float], *, barrier: bool = False
) -> RankStep:
    """A step on two devices whose first ops make gradients and whose last ops use them, with random dependencies.

    `barrier`: the next iteration waits for all of this one, not only its first op for the last of this one.
    """
    rng = np.random.default_rng(seed)
    tensors = len(tensor_bytes)
    count = 2 * tensors
    edges = [(a, b) for a in range(count) for b in range(a + 1, count) if rng.random() < 0.25]
    if barrier:
        edges += [(op, count - 1) for op in range(count - 1)]
    sources = sorted(set(range(count)) - {b for _, b in edges})
    carried = [(count - 1, op) for op in (sources if barrier else [0])]
    return RankStep(
        duration_us=rng.choice(durations_us, count),
        kind=np.repeat([int(OpKind.BACKWARD), int(OpKind.UPDATE)], tensors),
        device=rng.integers(0, 2, count),
        policy=rng.choice(policies, 2),
        priority=rng.integers(0, 3, count),
        tensor_bytes=tensor_bytes,
        edge_src=np.array([a for a, _ in edges], np.int64),
        edge_dst=np.array([b for _, b in edges], np.int64),
        maker_op=rng.integers(0, tensors, tensors),
        maker_tensor=np.arange(tensors),
        user_tensor=np.arange(tensors),
        user_op=np.append(rng.integers(tensors, count - 1, tensors - 1), count - 1),
        carry_src=np.array([a for a, _ in carried]),
        carry_dst=np.array([b for _, b in carried]),
    )
