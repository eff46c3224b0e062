"""Sets recomputation and precision of a model's modules by a plan. Copy beside `modules.json` and import it from the training
script:

    from modules import planned_modules

    model = planned_modules(model)     # before DistributedDataParallel(model), planned_ddp(model), or fully_shard

A recomputed module keeps only its inputs; its forward pass runs again, with the same random numbers, when its
backward pass begins. Batch normalisation's running statistics are changed once, as before; other state that a forward pass changes
is changed twice. A module in bfloat16 runs its forward pass under autocast, in evaluation as well, and gives float32 back; its
parameters and their gradients stay float32. Names of parameters stay as they are. Needs PyTorch, nothing else; Python 3.8 and
later.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def planned_modules(model: Any) -> Any:
    """The model, changed in place: the plan's modules compute in bfloat16, or again in their backward pass.

    Raises
    ------
    ValueError
        The model has no module of that path, or it is wrapped already.
    """
    from torch.nn.parallel import DistributedDataParallel

    plan = json.loads(Path(__file__).resolve().with_name("modules.json").read_text())
    if isinstance(model, DistributedDataParallel):
        raise ValueError("planned_modules comes before DistributedDataParallel: give it the model itself")
    modules = dict(model.named_modules())
    for change, names in (("again", plan["recomputed"]), ("in bfloat16", plan["bfloat16"])):
        for name in names:
            if name not in modules:
                known = [path for path in modules if path.rpartition(".")[0] == name.rpartition(".")[0] and path]
                raise ValueError(
                    f"the plan computes module '{name}' {change}, and the model has none; beside it: {', '.join(known) or '-'}"
                )
    for name in plan["recomputed"]:
        _compute_again(modules[name])
    for name in plan["bfloat16"]:
        _compute_in_bfloat16(modules[name])
    _report_used()
    return model


def _compute_in_bfloat16(module: Any) -> None:
    import torch

    forward = module.forward

    def planned_forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = forward(*args, **kwargs)
        return _in_float32(outputs)

    module.forward = planned_forward


def _in_float32(value: Any) -> Any:
    """A module's result with the tensors that autocast left in bfloat16 as what follows had them."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype == torch.bfloat16 else value
    if isinstance(value, dict):
        return type(value)({key: _in_float32(part) for key, part in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_in_float32, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(_in_float32, value))
    return value


def _compute_again(module: Any) -> None:
    import torch
    from torch.utils.checkpoint import checkpoint

    forward = module.forward

    def contexts() -> tuple[Any, Any]:
        return contextlib.nullcontext(), _same_statistics(module)

    def planned_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    module.forward = planned_forward


@contextlib.contextmanager
def _same_statistics(module: Any) -> Iterator[None]:
    """Leave the running statistics of batch normalisation as the first forward pass made them."""
    import torch
    from torch.nn.modules.batchnorm import _BatchNorm

    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.training and part.track_running_stats]
    kept = [(part, part.momentum, None if part.num_batches_tracked is None else int(part.num_batches_tracked)) for part in norms]
    for part in norms:
        part.momentum = 0.0  # of the new statistics
    try:
        yield
    finally:
        with torch.no_grad():
            for part, momentum, batches in kept:
                part.momentum = momentum
                if batches is not None:
                    part.num_batches_tracked.fill_(batches)


def _report_used() -> None:
    """Let `dpro-search validate` know that the script follows the plan."""
    folder = os.environ.get("DPRO_SEARCH_REPORT")
    if folder:
        Path(folder, "used-" + Path(__file__).name).touch()
