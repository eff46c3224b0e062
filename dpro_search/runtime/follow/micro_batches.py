"""Computes a step's batch in micro-batches and communicates once, by a plan. Copy beside `micro_batches.json` and import it.

PyTorch: forward and backward pass come below a loop; the gradients are then those of the mean of the parts' losses.

    for inputs, labels in planned_parts(model, inputs, labels):     # from micro_batches import planned_parts
        loss_of(model(inputs), labels).backward()
    optimizer.step()

TensorFlow: `compute` gives the loss and its gradients of a part; the result is their mean, still to be averaged over the ranks.

    loss, gradients = planned_gradients(compute, inputs, labels)    # from micro_batches import planned_gradients

Every part is as large as the others, or the mean of the parts would not be that of the batch. Layers that look at the whole batch
(batch normalisation) see the parts. Needs the framework, nothing else; Python 3.8 and later.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


def planned_parts(model: Any, *batch: Any) -> Iterator[Sequence[Any]]:
    """Parts of a batch of tensors whose first extent is the samples; `model`'s gradients are averaged over the ranks at the last.

    `model` is a DistributedDataParallel module (or any other, which communicates nothing). To be exhausted: the gradients are
    divided by the number of parts behind the last one, so they must have been set to zero before the first.
    """
    count = _count()
    for number, part in enumerate(_split(count, batch)):
        silent = number + 1 < count and hasattr(model, "no_sync")
        with model.no_sync() if silent else contextlib.nullcontext():
            yield part if len(batch) > 1 else part[0]
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(count)


def planned_gradients(compute: Callable[..., Any], *batch: Any) -> tuple[Any, list[Any]]:
    """Loss and gradients of a batch of tensors, computed part after part.

    Parameters
    ----------
    compute
        Called with a part of each tensor; returns the loss and a list of gradients (None where none exists).
    """
    import tensorflow as tf

    count = _count()
    loss: Any = None
    sums: list[Any] = []
    with tf.name_scope("micro_batches"):  # so that the first part's ops have the names which they have without parts
        parts = [[tf.identity(tensor) for tensor in part] for part in _split(count, batch)]
    for number, part in enumerate(parts):
        if number:
            # One after the other: that is what saves memory.
            with tf.name_scope("micro_batches"), tf.control_dependencies([loss, *(one for one in sums if one is not None)]):
                part = [tf.identity(tensor) for tensor in part]
        with tf.name_scope(f"micro_batch_{number}") if number else contextlib.nullcontext():  # where `xla.py` looks for its ops
            of_part, gradients = compute(*part)
        with tf.name_scope("micro_batches"):
            dense = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
            loss = of_part if loss is None else loss + of_part
            sums = dense if not sums else [None if new is None else sums[i] + new for i, new in enumerate(dense)]
    with tf.name_scope("micro_batches"):
        return loss / count, [None if tensor is None else tensor / count for tensor in sums]


def _split(count: int, batch: Sequence[Any]) -> Iterator[list[Any]]:
    samples = int(batch[0].shape[0])
    if any(int(tensor.shape[0]) != samples for tensor in batch) or samples % count:
        raise ValueError(f"the plan computes a batch in {count} equal parts, and it has {samples} samples")
    size = samples // count
    for number in range(count):
        yield [tensor[number * size : (number + 1) * size] for tensor in batch]


def _count() -> int:
    _report_used()
    return int(json.loads(Path(__file__).resolve().with_name("micro_batches.json").read_text())["micro_batches"])


def _report_used() -> None:
    """Let `dpro-search validate` know that the script follows the plan."""
    folder = os.environ.get("DPRO_SEARCH_REPORT")
    if folder:
        Path(folder, "used-" + Path(__file__).name).touch()
