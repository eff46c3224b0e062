"""Ranks that wait in place of computing, so that few cores carry many: schedules and exchanges are the framework's own.

Ops on tensors of floating-point numbers give memory of the right shape with any content; views, exchanges and small ops are carried
out. At the end of each pass of a block the rank waits until the block's recorded time is over, without what the rank spent on
exchanges meanwhile. Losses mean nothing. What each rank waited for is written beside the file (`dpro_search_spans`).

The file: ``{"layers": [[forward_us, backward_us, reduce_us, spread], ...], "embedding": [...], "head": [...], "update_us": [fixed,
of an element]}``; ``reduce_us`` is what a rank does to exchange a block's gradients, ``spread`` the deviation of passes over their
mean: each rank draws its own. PyTorch only.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

from dpro_search_blocks import Blocks
from dpro_search_spans import Spans

_SMALL = 64  # elements, below which an op is carried out
_LEAST = 0.5  # of a pass's mean time, however it is drawn
_PRECISE_S = 2e-4  # before the end of a wait, from which on the clock is watched


def observe(planned: Any, layers_path: str, file: str) -> None:
    """Pace a planned model from now on."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    spans = Spans(planned, Path(file).parent)
    pacer = _Pacer(planned, json.loads(Path(file).read_text()), spans)
    Blocks(planned, layers_path, pacer)
    pretending = _pretending(spans)
    pretending.__enter__()  # until the process ends
    register_optimizer_step_post_hook(lambda *_: pacer.updates())


class _Pacer:
    def __init__(self, planned: Any, times: dict[str, Any], spans: Spans) -> None:
        plan = planned._plan
        counts = plan["stage_layers"]
        pipeline = len(plan["stages"]) > 1
        stages_of_rank = plan["stages"][planned.mesh["pp"].get_local_rank()] if pipeline else [0]
        firsts = [sum(counts[:stage]) if pipeline else 0 for stage in stages_of_rank]
        sizes = [counts[stage] if pipeline else sum(counts) for stage in stages_of_rank]
        last = len(counts) - 1
        nothing = [0.0, 0.0, 0.0, 0.0]
        self._us = []
        for stage, first, size in zip(stages_of_rank, firsts, sizes, strict=True):
            before = times["embedding"] if stage == 0 or not pipeline else nothing
            behind = times["head"] if stage == last or not pipeline else nothing
            self._us.append([before, *times["layers"][first : first + size], behind])
        self._zero_3, self._micro_batches = plan["zero_stage"] == 3, plan["micro_batches"]
        fixed_us, each_us = times["update_us"]
        elements = sum(_own(parameter) for parameter in planned.parameters())
        self._update_us = fixed_us + each_us * elements
        self._spans = spans
        self._draws = random.Random(int(os.environ["RANK"]))
        self._began: dict[tuple[int, int, bool], tuple[float, float]] = {}
        self._passed = 0.0, 0.0  # when the last pass of a step ended, and the time of exchanges until then
        self._original = planned.step
        planned.step = self._step

    def begins(self, part: int, block: int, forward: bool) -> None:
        self._began[part, block, forward] = time.perf_counter(), self._spans.exchanged_s
        if block == 0 and not forward:  # nothing tells its end
            self.ends(part, block, forward)

    def ends(self, part: int, block: int, forward: bool) -> None:
        began = self._began.pop((part, block, forward), None)
        if began is None:
            return
        forward_us, backward_us, reduce_us, spread = self._us[part][block]
        us = (forward_us if forward else backward_us) * max(self._draws.gauss(1.0, spread), _LEAST)
        us += reduce_us if self._zero_3 and not forward else 0.0
        start_s, exchanged_s = began
        self._spans.paced(us)
        _wait_until(lambda: start_s + self._spans.exchanged_s - exchanged_s + us / 1e6)

    def updates(self) -> None:
        """Wait until the recorded time between a step's passes and the next step is over; the optimizer's dispatch is within it."""
        passed_s, exchanged_s = self._passed
        self._spans.paced(self._update_us)
        _wait_until(lambda: passed_s + self._spans.exchanged_s - exchanged_s + self._update_us / 1e6)

    def _step(self, inputs: Any, targets: Any) -> Any:
        self._spans.begins_step()
        loss = self._original(inputs, targets)
        if not self._zero_3:
            self._waits(sum(block[2] for part in self._us for block in part))
        self._passed = time.perf_counter(), self._spans.exchanged_s
        return loss

    def _waits(self, us: float) -> None:
        end_s = time.perf_counter() + us / 1e6
        self._spans.paced(us)
        _wait_until(lambda: end_s)


def _own(parameter: Any) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(local.numel())


def _wait_until(end_s: Any) -> None:
    end = end_s()
    while True:
        left_s = end - time.perf_counter()
        if left_s <= 0:
            return
        time.sleep(max(left_s - _PRECISE_S, 0.0) or left_s)


def _pretending(spans: Spans) -> Any:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Pretending(TorchDispatchMode):
        """Carries out what exchanges or changes no content, and pretends the rest."""

        def __init__(self) -> None:
            super().__init__()
            self._known: dict[Any, Any] = {}  # shapes of results

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
                return NotImplemented  # it comes back with the tensors that are inside
            if any(issubclass(kind, FakeTensor) for kind in types):
                return func(*args, **kwargs)
            if "c10d" in func.namespace:
                return spans.called(func, args, kwargs)
            tensors = list(_tensors(args)) + list(_tensors(kwargs.values()))
            large = any(each.is_floating_point() and each.numel() > _SMALL for each in tensors)
            if not large or any(each.is_meta for each in tensors):
                return func(*args, **kwargs)
            schema = func._schema
            if schema.is_mutable:
                return _mutated(schema, args, kwargs)
            if any(argument.alias_info is not None for argument in schema.arguments):  # a view
                return func(*args, **kwargs)
            key = (func, _shapes(args), _shapes(tuple(kwargs.values())))
            if key not in self._known:
                result = func(*args, **kwargs)
                self._known[key] = _described(result)
                return result
            return _made(self._known[key])

    def _tensors(values: Any) -> Any:
        for value in values:
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, (list, tuple)):
                yield from _tensors(value)

    def _shapes(values: Any) -> Any:
        return tuple(
            (tuple(value.shape), value.stride(), value.dtype)
            if isinstance(value, torch.Tensor)
            else _shapes(value)
            if isinstance(value, (list, tuple))
            else repr(value)
            for value in values
        )

    def _mutated(schema: Any, args: Any, kwargs: Any) -> Any:
        """The values that an op returns which writes to its arguments: those, or nothing."""
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
        given.update(kwargs)
        written = [
            given.get(argument.name)
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return None if not schema.returns else written[0] if len(schema.returns) == 1 else tuple(written)

    def _described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.numel() <= _SMALL:
                return value.clone()
            return tuple(value.shape), value.stride(), value.dtype
        if isinstance(value, (list, tuple)):
            return [_described(each) for each in value]
        return lambda: value

    def _made(kept: Any) -> Any:
        if isinstance(kept, torch.Tensor):
            return kept.clone()
        if isinstance(kept, tuple):
            return torch.empty_strided(*kept[:2], dtype=kept[2])
        return [_made(each) for each in kept] if isinstance(kept, list) else kept()

    return Pretending()
