"""Makes a fully sharded model follow a plan. Copy beside `fsdp.json` and import it from the script:

    from fsdp import planned_fsdp

    model = planned_fsdp(model)     # after fully_shard(model)

or, where the plan changes what `fully_shard` is called with (its README says so),

    from fsdp import planned_shard

    model = planned_shard(model)    # in place of all calls of fully_shard; takes their arguments, as mesh=...

A plan that shards over fewer ranks makes the mesh itself.

Needs PyTorch with ``torch.distributed.fsdp.fully_shard``, nothing else; Python 3.8 and later.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def planned_fsdp(model: Any) -> Any:
    """The model, changed in place: its units prefetch, or keep their parameters after the forward pass, by the plan.

    Units are taken in the order of the plan, or in that in which the model registers them, as a forward pass may run them.

    Raises
    ------
    ValueError
        The model has no unit that ``fully_shard`` made, or not those of the plan.
    """
    plan = _plan()
    if shards_itself():
        raise ValueError("the plan changes what fully_shard is called with: use planned_shard(model) in place of its calls")
    return _follow(model, plan)


def shards_itself() -> bool:
    """Whether the plan changes what ``fully_shard`` is called with, so that `planned_shard` must take the place of its calls."""
    plan = _plan()
    return bool(plan.get("groups") or plan.get("reduce_dtype") or plan.get("shard_ranks"))


def planned_shard(model: Any, **options: Any) -> Any:
    """The model, whose units ``fully_shard`` makes as the plan groups them; `options` are its arguments.

    Raises
    ------
    ValueError
        The plan does not name the units, or the model has not what it names.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plan = _plan()
    if not plan.get("units"):
        raise ValueError("the plan does not name the units: call fully_shard as before, then planned_fsdp")
    if plan.get("reduce_dtype"):
        given = options.get("mp_policy", MixedPrecisionPolicy())
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=given.param_dtype,
            reduce_dtype=getattr(torch, plan["reduce_dtype"]),
            output_dtype=given.output_dtype,
            cast_forward_inputs=given.cast_forward_inputs,
        )
    if plan.get("shard_ranks"):
        options["mesh"] = _mesh(plan["shard_ranks"])
    for group in plan.get("groups") or [[unit] for unit in plan["units"]]:
        modules = [_module(model, name) for name in group]
        fully_shard(modules if len(modules) > 1 else modules[0], **options)
    fully_shard(model, **options)
    return _follow(model, plan)


def _mesh(shard_ranks: int) -> Any:
    """All ranks, of which so many neighbours share the parameters, and the others have copies."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    ranks = dist.get_world_size()
    if ranks % shard_ranks:
        raise ValueError(f"the plan shares parameters among {shard_ranks} ranks, which does not divide {ranks}")
    device = "cpu" if dist.get_backend() == "gloo" else "cuda"
    return init_device_mesh(device, (ranks // shard_ranks, shard_ranks), mesh_dim_names=("replicate", "shard"))


def _follow(model: Any, plan: dict[str, Any]) -> Any:
    import torch

    units = _units(model, plan)
    if plan["reshard_after_forward"] is not None:
        for unit in units:
            unit.set_reshard_after_forward(plan["reshard_after_forward"], recurse=False)
    for name in plan.get("kept") or ():
        _module(model, name).set_reshard_after_forward(False, recurse=False)
    ahead, back = plan.get("prefetch_depth") or 1, plan.get("backward_prefetch_depth") or 1
    if (plan["prefetch"] or back > 1) and not torch.cuda.is_available():
        model._set_unshard_async_op(True)  # without streams a gather would be waited for where it is enqueued
    if plan["prefetch"]:
        for number, unit in enumerate(units[:-1]):
            unit.set_modules_to_forward_prefetch(units[number + 1 : number + 1 + ahead])
    if back > 1:
        order = [units[0], *units[:0:-1]] if units[0] is model else units[::-1]
        for number, unit in enumerate(order[:-1]):
            unit.set_modules_to_backward_prefetch(order[number + 1 : number + 1 + back])
    _report_used()
    return model


def _units(model: Any, plan: dict[str, Any]) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise ValueError("planned_fsdp comes after fully_shard: the model has no sharded unit")
    groups = plan.get("groups") or [[name] for name in plan.get("units") or ()]
    # Of modules that are wrapped together, the first counts: all of them have the same state.
    named = [_module(model, group[0]) for group in groups]
    first = [model] if isinstance(model, FSDPModule) else []
    return [*first, *named] if named and all(isinstance(module, FSDPModule) for module in named) else units


def _module(model: Any, name: str) -> Any:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ValueError(f"the model has no module {name!r}, which the plan names") from error


def _plan() -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(Path(__file__).resolve().with_name("fsdp.json").read_text())
    return plan


def _report_used() -> None:
    """Let `dpro-search validate` know that the script follows the plan."""
    folder = os.environ.get("DPRO_SEARCH_REPORT")
    if folder:
        Path(folder, "used-" + Path(__file__).name).touch()
