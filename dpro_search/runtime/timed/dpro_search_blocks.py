"""Begins and ends of the blocks of a planned model in each pass, for the observers beside it. See `parallel_plan.Planned`.

A model has a block before its layers, one for each layer, and one behind them with the loss. PyTorch only; Python 3.8 and later.
"""

from __future__ import annotations

from functools import partial
from typing import Any


class Blocks:
    """Calls the methods of a listener at the boundaries of blocks, of every part (pipeline stage) of a planned model.

    ``begins(part, block, forward)`` and ``ends(part, block, forward)``; blocks are numbered from 0, the one before the layers, to
    layers + 1, the one behind them, and of a stage only what it has counts. A layer that is computed again in the backward pass is
    within the backward pass of its block.
    """

    def __init__(self, planned: Any, layers_path: str, listener: Any) -> None:
        self._listener = listener
        self._backward: set[int] = set()  # parts that are in a backward pass
        for number, part in enumerate(planned.parts):
            self._watch_part(number, part, list(part.get_submodule(layers_path).children()))
        self._planned, self._loss = planned, planned._loss
        self._last = len(planned.parts) - 1
        planned._loss = self._watched_loss
        if planned._schedule is not None:
            planned._schedule._loss_fn = self._watched_loss

    def _watch_part(self, number: int, part: Any, layers: list[Any]) -> None:
        count = len(layers)
        part.register_forward_pre_hook(lambda *_: self._passes(number, 0, begins=True), prepend=True)
        for position, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._enters, number, position), prepend=True)
            layer.register_forward_hook(partial(self._leaves, number, position, count))
        part.register_forward_hook(lambda *_: self._passes(number, count + 1, begins=None))

    def _passes(self, part: int, block: int, *, begins: bool | None) -> None:
        """The forward pass of a part begins (block 0), or ends without a loss."""
        self._backward.discard(part)
        if begins:
            self._listener.ends(part, 0, False)  # of the micro-batch before
            self._listener.begins(part, 0, True)
        elif part != self._last or not self._has_loss:
            self._listener.ends(part, block, True)

    @property
    def _has_loss(self) -> bool:
        schedule = self._planned._schedule
        return schedule is None or any(stage.is_last for stage in self._planned._stages)

    def _enters(self, part: int, position: int, module: Any, inputs: Any) -> None:
        if part in self._backward:
            return
        self._listener.ends(part, position, True)
        self._listener.begins(part, position + 1, True)
        if position == 0 and getattr(inputs[0], "requires_grad", False):
            inputs[0].register_hook(lambda gradient: self._below(part))

    def _leaves(self, part: int, position: int, count: int, module: Any, inputs: Any, outputs: Any) -> None:
        if part in self._backward:
            return
        if position == count - 1:
            self._listener.ends(part, count, True)
            self._listener.begins(part, count + 1, True)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: self._reaches(part, position, count))

    def _reaches(self, part: int, position: int, count: int) -> None:
        """The gradient of a layer's output is there."""
        self._backward.add(part)
        self._listener.ends(part, position + 2, False)
        self._listener.begins(part, position + 1, False)

    def _below(self, part: int) -> None:
        """The gradient of the first layer's input is there."""
        self._listener.ends(part, 1, False)
        self._listener.begins(part, 0, False)

    def _watched_loss(self, outputs: Any, targets: Any) -> Any:
        loss = self._loss(outputs, targets)
        part, block = self._last, self._head
        self._listener.ends(part, block, True)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: self._listener.begins(part, block, False))
        return loss

    @property
    def _head(self) -> int:
        counts, stages = self._planned._plan["stage_layers"], self._planned._plan["stages"]
        return int(counts[-1]) + 1 if len(stages) > 1 else int(sum(counts)) + 1
