"""Times a rank's own work, block by block, with no other rank: exchanges of a fake process group take no time.

`install` makes ``init_process_group`` start that group, `observe` times the steps of a planned model, and ends the process after
enough of them. Written: ``{"steps": [{"passes": [[block, forward, us], ...], "step_us": ..., "rest_us": ...}], "elements": ...}``,
what a core or a GPU reaches, and what a tensor parallel product costs beside a plain one; of a GPU its name and the most memory
that tensors had in those steps (``peak_bytes``). On a GPU times are those of its events: nothing waits for the host. PyTorch only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from dpro_search_blocks import Blocks

WARMUP, STEPS, STEPS_ON_GPU = 3, 7, 5
_CORE_BYTES, _GPU_BYTES = 1 << 26, 1 << 28  # of a copy that no cache holds
_CORE_SIZE, _GPU_SIZE = 768, 8192  # of a square matrix


def install() -> None:
    """Start a fake process group in place of any other."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    original = torch.distributed.init_process_group

    def init_process_group(*_: Any, **__: Any) -> None:
        torch.set_flush_denormal(True)  # what was never exchanged holds any numbers
        original("fake", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), store=FakeStore())

    torch.distributed.init_process_group = init_process_group
    if torch.cuda.is_available():
        _keep_own_parts("CUDA")


_KEPT: list[Any] = []  # a library's ops are those of PyTorch again when it is freed


def _keep_own_parts(device: str) -> None:
    """Let a reduce-scatter give a rank its own part of its own input, where the fake group leaves any numbers.

    A GPU takes less power, and so less time, for products of numbers that are not finite.
    """
    import torch

    def own_part(given: Any, reduction: str, ranks: int, group: Any) -> Any:
        return given.narrow(0, 0, given.shape[0] // ranks).clone()

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("reduce_scatter_tensor", own_part, device)  # tensor parallel ranks (DTensor)
    _KEPT.append(library)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # `fully_shard` until PyTorch 2.12, and later
        original = getattr(torch.distributed, name, None)
        if original is not None:
            setattr(torch.distributed, name, _with_own_part(original))


def _with_own_part(original: Any) -> Any:
    def reduce_scatter(*args: Any, **options: Any) -> Any:
        work = original(*args, **options)
        output, given = (options[name] if name in options else args[place] for place, name in enumerate(("output", "input")))
        output.view(-1).copy_(given.view(-1)[: output.numel()])
        return work

    return reduce_scatter


def observe(planned: Any, layers_path: str, file: str) -> None:
    """Time the steps of a model that is no pipeline."""
    if len(planned.parts) != 1 or planned._schedule is not None:
        raise ValueError("blocks are timed without a pipeline")
    _Timed(planned, layers_path, Path(file))


class _Host:
    """Moments of this process."""

    steps = STEPS

    def now(self) -> Any:
        return time.perf_counter_ns() / 1e3

    def us(self, began: Any, ended: Any) -> float:
        return float(ended - began)

    def begin(self) -> None:
        """The steps that count begin."""

    def facts(self) -> dict[str, Any]:
        """Facts of the device, when all steps are over; times can be read from then on."""
        return {}


class _Gpu(_Host):
    """Moments of the GPU, in the order of its own work."""

    steps = STEPS_ON_GPU

    def now(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def us(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) * 1e3

    def begin(self) -> None:
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def facts(self) -> dict[str, Any]:
        import torch

        torch.cuda.synchronize()
        peak_bytes = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "peak_bytes": peak_bytes}


class _Timed:
    def __init__(self, planned: Any, layers_path: str, file: Path) -> None:
        self._file, self._device = file, planned._device
        self._clock = _Gpu() if self._device.type == "cuda" else _Host()
        self._dtype = planned._plan["parameter_dtype"]
        self._steps: list[dict[str, Any]] = []  # with moments in place of times
        self._passes: list[tuple[int, bool, Any, Any]] = []
        self._began: dict[tuple[int, bool], Any] = {}
        self._elements = sum(_own(each) for each in planned.parameters())
        self._original = planned.step
        planned.step = self._step
        Blocks(planned, layers_path, self)

    def begins(self, part: int, block: int, forward: bool) -> None:
        self._began[block, forward] = self._clock.now()

    def ends(self, part: int, block: int, forward: bool) -> None:
        began = self._began.pop((block, forward), None)
        if began is not None:
            self._passes.append((block, forward, began, self._clock.now()))

    def _step(self, inputs: Any, targets: Any) -> Any:
        if len(self._steps) == WARMUP:
            self._clock.begin()
        began = self._clock.now()
        if self._steps:
            self._steps[-1]["next"] = began
        if len(self._steps) == WARMUP + self._clock.steps:
            self._write()
        self._passes = []
        loss = self._original(inputs, targets)
        self._embedding_ends()
        self._steps.append({"passes": self._passes, "began": began, "ended": self._clock.now(), "loss": loss})
        return loss

    def _embedding_ends(self) -> None:
        """End the embedding of the last micro-batch; the others' ends where the next one begins."""
        self.ends(0, 0, False)

    def _write(self) -> None:
        facts = self._clock.facts()
        content = {
            "steps": [self._times(step) for step in self._steps[WARMUP:]],
            "elements": self._elements,
            **facts,
            "memory_bytes_per_s": _copied_bytes_per_s(self._clock, self._device),
            "flops_per_s": _flops_per_s(self._clock, self._device, self._dtype),
            **_split_product_us(self._device),
        }
        temporary = self._file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(content))
        temporary.rename(self._file.with_suffix(f".{os.getpid()}.json"))
        sys.exit(0)

    def _times(self, step: dict[str, Any]) -> dict[str, Any]:
        us = self._clock.us
        return {
            "passes": [[block, forward, us(began, ended)] for block, forward, began, ended in step["passes"]],
            "step_us": us(step["began"], step["ended"]),
            "rest_us": us(step["ended"], step["next"]),
            "finite": bool(step["loss"].isfinite()),
        }


def _own(parameter: Any) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(local.numel())


def _copied_bytes_per_s(clock: _Host, device: Any) -> float:
    """Read and written by a copy that no cache holds."""
    import torch

    size_bytes = _GPU_BYTES if device.type == "cuda" else _CORE_BYTES
    source = torch.rand(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / (_median_us(clock, lambda: target.copy_(source)) / 1e6)


def _flops_per_s(clock: _Host, device: Any, dtype: str) -> float:
    """FLOP/s of a large product; a GPU's is in the job's precision."""
    import torch

    on_gpu = device.type == "cuda"
    size = _GPU_SIZE if on_gpu else _CORE_SIZE
    options = {"device": device, "dtype": getattr(torch, dtype) if on_gpu else torch.float32}
    one, other = (torch.randn(size, size, **options) for _ in range(2))
    return 2 * size**3 / (_median_us(clock, lambda: one @ other) / 1e6)


def _median_us(clock: _Host, run: Any, times: int = 7) -> float:
    run()
    moments = []
    for _ in range(times):
        began = clock.now()
        run()
        moments.append((began, clock.now()))
    clock.facts()
    return sorted(clock.us(began, ended) for began, ended in moments)[times // 2]


def _split_product_us(device: Any, calls: int = 40) -> dict[str, float]:
    """Host time, us, that sharing a weight (DTensor) adds to a linear layer in each pass, on small tensors."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    width = 8 * torch.distributed.get_world_size()
    plain, split = (torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(2)]).to(device) for _ in range(2))
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    parallelize_module(split, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    inputs = torch.ones(1, width, device=device, requires_grad=True)
    host = _Host()
    rows: dict[Any, list[tuple[float, float]]] = {plain: [], split: []}
    for _ in range(calls):
        for model, passes in rows.items():
            began = host.now()
            total = model(inputs).sum()
            middle = host.now()
            total.backward()
            passes.append((middle - began, host.now() - middle))
    medians = [[sorted(each)[calls // 2] for each in zip(*rows[model], strict=True)] for model in (plain, split)]
    forward_us, backward_us = ((after - before) / 2 for before, after in zip(*medians, strict=True))
    return {"split_forward_us": forward_us, "split_backward_us": backward_us}
