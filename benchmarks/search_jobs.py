"""Jobs that searches are measured on: the tensors of real models, with durations that follow from their sizes.

Sizes and order of the gradients are those of the published architectures. Durations were not measured: floating-point operations at
the rate of a V100, batch 32, and a few microseconds for every small op. The network is 25 Gbit/s, message by message around a ring.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.ring_job import RingJob
from dpro_search.collect.trace import CollectiveKind
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.data_parallel import DataParallelJob, LinearCost, RankStep
from dpro_search.space.replay_graph import OrderPolicy

WORKERS = 16
_FLOPS_PER_US = 10e6
_BATCH = 32
_SMALL_OP_US = 8.0
_LINK_BYTES_PER_US, _MESSAGE_US = 3125.0, 30.0
_RESNET50 = ((64, 3, 1, 56), (128, 4, 2, 28), (256, 6, 2, 14), (512, 3, 2, 7))  # width, blocks, stride, pixels after it


def ring(step: RankStep, workers: int = WORKERS) -> RingJob:
    """Ranks that are alike, each on a host of its own, and message-by-message ring all-reduces."""
    return RingJob(step=step, ranks=workers, link_bytes_per_us=_LINK_BYTES_PER_US, message_us=_MESSAGE_US, reduce_us_per_byte=1e-5)


def replicated(step: RankStep, ranks: int, *, latency_us: float, us_per_byte: float) -> DataParallelJob:
    """All ranks run one step; an all-reduce is one op."""
    cost = LinearCost(kind=CollectiveKind.ALL_REDUCE, latency_us=latency_us, us_per_byte=us_per_byte)
    return DataParallelJob(steps=(step,), step_of_rank=np.zeros(ranks, np.int64), costs=(cost,))


def serial(step: RankStep, workers: int = WORKERS) -> DataParallelJob:
    """The same with an all-reduce as one op of the cost of a ring, one after the other."""
    messages = 2 * (workers - 1)
    us_per_byte = messages / workers / _LINK_BYTES_PER_US
    return replicated(step, workers, latency_us=messages * _MESSAGE_US, us_per_byte=us_per_byte)


def resnet50(ops_per_tensor: int = 1) -> RankStep:
    """ResNet-50 for 1,000 classes: 161 gradients, 102 MB."""
    names, elements, flops = [], list[float](), list[float]()

    def layer(name: str, inputs: int, outputs: int, kernel: int, pixels: int) -> None:
        names.extend((f"{name}.conv", f"{name}.gamma", f"{name}.beta"))
        elements.extend((inputs * outputs * kernel**2, outputs, outputs))
        flops.extend((2.0 * inputs * outputs * kernel**2 * pixels**2 * _BATCH, 0.0, 0.0))

    layer("stem", 3, 64, 7, 112)
    channels = 64
    for width, blocks, _, pixels in _RESNET50:
        for block in range(blocks):
            name = f"stage{width}.{block}"
            if block == 0:
                layer(f"{name}.shortcut", channels, 4 * width, 1, pixels)
            layer(f"{name}.reduce", channels, width, 1, pixels)
            layer(f"{name}.spatial", width, width, 3, pixels)
            layer(f"{name}.expand", width, 4 * width, 1, pixels)
            channels = 4 * width
    names += ["classes.kernel", "classes.bias"]
    elements += [channels * 1000, 1000]
    flops += [2.0 * channels * 1000 * _BATCH, 0.0]
    return _step(names, np.array(elements), np.array(flops), ops_per_tensor)


def bert(ops_per_tensor: int = 25, blocks: int = 12, width: int = 768, length: int = 128) -> RankStep:
    """BERT-base: 199 gradients, 438 MB; with 25 ops a tensor 4,975 ops."""
    names = ["embeddings.words", "embeddings.positions", "embeddings.types", "embeddings.gamma", "embeddings.beta"]
    elements = [30_522 * width, 512 * width, 2 * width, width, width]
    flops = [0.0] * 5
    per_weight = 2.0 * length * _BATCH
    for block in range(blocks):
        for part, inputs, outputs in (
            ("query", width, width), ("key", width, width), ("value", width, width), ("projection", width, width),
            ("norm1", 0, width), ("expand", width, 4 * width), ("contract", 4 * width, width), ("norm2", 0, width),
        ):  # fmt: skip
            names += [f"block{block}.{part}.kernel", f"block{block}.{part}.bias"]
            elements += [inputs * outputs or outputs, outputs]
            flops += [per_weight * inputs * outputs, 0.0]
    names += ["pooler.kernel", "pooler.bias"]
    elements += [width * width, width]
    flops += [2.0 * _BATCH * width * width, 0.0]
    return _step(names, np.array(elements), np.array(flops), ops_per_tensor)


def _step(names: list[str], elements: np.ndarray, flops: np.ndarray, ops_per_tensor: int) -> RankStep:
    """Forward, backward and updates on one stream in program order; a tensor's work is spread over its ops.

    Of each tensor's ops a third is forward, an eighth (at least one) its update, the others its backward pass.
    """
    count = len(names)
    forward = max(ops_per_tensor // 3, 1)
    update = max(ops_per_tensor // 8, 1)
    backward = max(ops_per_tensor - forward - update, 1)
    last_first = np.arange(count)[::-1]  # gradients come in this order, which is the one that tensors are numbered in
    sizes = 4.0 * elements[last_first]
    work_us = flops / _FLOPS_PER_US
    forward_us = np.repeat(work_us / forward + _SMALL_OP_US, forward)
    backward_us = np.repeat(2 * work_us[last_first] / backward + _SMALL_OP_US, backward)
    update_us = np.repeat(elements[last_first] * 2e-5 / update + _SMALL_OP_US / 2, update)
    first_backward, first_update = len(forward_us), len(forward_us) + len(backward_us)
    total = first_update + len(update_us)
    tensor = np.arange(count)
    return RankStep(
        duration_us=np.round(np.concatenate((forward_us, backward_us, update_us)), 3),
        kind=np.repeat(
            [int(OpKind.FORWARD), int(OpKind.BACKWARD), int(OpKind.UPDATE)], [count * forward, count * backward, count * update]
        ),
        device=np.zeros(total, np.int64),
        policy=np.array([int(OrderPolicy.PROGRAM)]),
        tensor_bytes=sizes,
        maker_op=first_backward + (tensor + 1) * backward - 1,
        maker_tensor=tensor,
        user_tensor=tensor,
        user_op=first_update + tensor * update,
        carry_src=np.array([total - 1]),
        carry_dst=np.array([0]),
        tensor_names=tuple(names[i] for i in last_first),
    )


def with_few_tensors(step: RankStep, count: int) -> RankStep:
    """The same step with `count` gradients: neighbours, of about equal bytes together, are one that is there with its last part."""
    so_far_bytes = np.cumsum(step.tensor_bytes)
    unit_of = np.minimum((so_far_bytes - step.tensor_bytes / 2) * count / so_far_bytes[-1], count - 1).astype(np.int64)
    unit_of = np.unique(unit_of, return_inverse=True)[1]
    return replace(
        step,
        tensor_bytes=np.bincount(unit_of, weights=step.tensor_bytes),
        maker_tensor=unit_of[step.maker_tensor],
        user_tensor=unit_of[step.user_tensor],
        tensor_names=tuple(f"part{unit}" for unit in range(unit_of.max() + 1)),
    )
