"""Times a rank's own work, block by block, with no other rank: exchanges of a fake process group take no time.

`install` makes ``init_process_group`` start that group, `observe` times the steps of a planned model, and ends the process after
enough of them. Written: ``{"steps": [{"passes": [[block, forward, us], ...], "step_us": ..., "rest_us": ...}], "elements": ...}``,
and what a core reaches and a tensor parallel product costs beside a plain one. PyTorch only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from dpro_search_blocks import Blocks

WARMUP, STEPS = 3, 7


def install() -> None:
    """Start a fake process group in place of any other."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    original = torch.distributed.init_process_group

    def init_process_group(*_: Any, **__: Any) -> None:
        torch.set_flush_denormal(True)  # what was never exchanged holds any numbers
        original("fake", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), store=FakeStore())

    torch.distributed.init_process_group = init_process_group


def observe(planned: Any, layers_path: str, file: str) -> None:
    """Time the steps of a model that is no pipeline."""
    if len(planned.parts) != 1 or planned._schedule is not None:
        raise ValueError("blocks are timed without a pipeline")
    _Timed(planned, layers_path, Path(file))


class _Timed:
    def __init__(self, planned: Any, layers_path: str, file: Path) -> None:
        self._file, self._steps, self._passes = file, [], []
        self._began: dict[tuple[int, bool], float] = {}
        self._ended_us = 0.0
        self._elements = sum(_own(each) for each in planned.parameters())
        self._original = planned.step
        planned.step = self._step
        Blocks(planned, layers_path, self)

    def begins(self, part: int, block: int, forward: bool) -> None:
        self._began[block, forward] = _now_us()

    def ends(self, part: int, block: int, forward: bool) -> None:
        began = self._began.pop((block, forward), None)
        if began is not None:
            self._passes.append([block, forward, _now_us() - began])

    def _step(self, inputs: Any, targets: Any) -> Any:
        began = _now_us()
        if self._steps:
            self._steps[-1]["rest_us"] = began - self._ended_us
        if len(self._steps) == WARMUP + STEPS:
            self._write()
        self._passes = []
        loss = self._original(inputs, targets)
        self._embedding_ends()
        self._ended_us = _now_us()
        self._steps.append({"passes": self._passes, "step_us": self._ended_us - began})
        return loss

    def _embedding_ends(self) -> None:
        """Of the last micro-batch; the others' ends where the next one begins."""
        self.ends(0, 0, False)

    def _write(self) -> None:
        content = {
            "steps": self._steps[WARMUP:],
            "elements": self._elements,
            "memory_bytes_per_s": _copied_bytes_per_s(),
            "flops_per_s": _flops_per_s(),
            **_split_product_us(),
        }
        temporary = self._file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(content))
        temporary.rename(self._file.with_suffix(f".{os.getpid()}.json"))
        sys.exit(0)


def _own(parameter: Any) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(local.numel())


def _copied_bytes_per_s() -> float:
    """Read and written by a copy that no cache holds."""
    import torch

    source = torch.ones(1 << 24)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return 2 * source.numel() * source.element_size() / sorted(times)[2]


def _flops_per_s(size: int = 768) -> float:
    import torch

    one, other = torch.rand(size, size), torch.rand(size, size)
    times = []
    for _ in range(7):
        began = time.perf_counter()
        one @ other
        times.append(time.perf_counter() - began)
    return 2 * size**3 / sorted(times)[3]


def _split_product_us(calls: int = 40) -> dict[str, float]:
    """What Python adds to a linear layer whose weight tensor parallel ranks share (DTensor), in each pass: on small tensors."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    width = 8 * torch.distributed.get_world_size()
    plain, split = (torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(2)]) for _ in range(2))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    parallelize_module(split, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    inputs = torch.ones(1, width, requires_grad=True)
    rows: dict[Any, list[tuple[float, float]]] = {plain: [], split: []}
    for _ in range(calls):
        for model, passes in rows.items():
            began = _now_us()
            total = model(inputs).sum()
            middle = _now_us()
            total.backward()
            passes.append((middle - began, _now_us() - middle))
    medians = [[sorted(each)[calls // 2] for each in zip(*rows[model], strict=True)] for model in (plain, split)]
    forward_us, backward_us = ((after - before) / 2 for before, after in zip(*medians, strict=True))
    return {"split_forward_us": forward_us, "split_backward_us": backward_us}


def _now_us() -> float:
    return time.perf_counter_ns() / 1e3
