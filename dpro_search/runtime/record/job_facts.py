"""Description of a job as one rank sees it: where it runs, with which software and settings, and the model if it is known.

Standard library and PyTorch only. A fact that cannot be read is left out.
"""

from __future__ import annotations

import gc
import os
import re
import resource
import socket
import sys
import time
from typing import Any, Callable, Iterator

# Environment variables that a recording may hold, by the begin of their names; never one that may hold a secret.
_PUBLIC = re.compile(
    r"(?:NCCL_|TORCH_NCCL_|GLOO_|UCX_|FI_|OMP_NUM_THREADS$|MKL_NUM_THREADS$|CUDA_VISIBLE_DEVICES$|CUDA_DEVICE_MAX_CONNECTIONS$"
    r"|CUDA_LAUNCH_BLOCKING$|PYTORCH_(?:CUDA_)?ALLOC_CONF$|TORCH_|RANK$|LOCAL_RANK$|GROUP_RANK$|WORLD_SIZE$|LOCAL_WORLD_SIZE$)"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
_LIBRARIES = ("transformers", "lightning", "pytorch_lightning", "accelerate", "torchtitan", "deepspeed")
_MOST_PARAMETERS = 50_000


def public_environment(environment: Any) -> dict[str, str]:
    """The variables that a recording may hold."""
    return {name: environment[name] for name in sorted(environment) if _PUBLIC.match(name) and not _SECRET.search(name)}


def clock_pair() -> dict[str, int]:
    """This host's wall clock and its monotonic clock, read one after the other."""
    return {"wall_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}


def place_in_job() -> dict[str, int]:
    """Rank, number of ranks, rank within the host: those of torch.distributed, else the launcher's, else 0, 1, 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, world = distributed.get_rank(), distributed.get_world_size()
    else:
        rank, world = _launched("RANK", 0), _launched("WORLD_SIZE", 1)
    return {"rank": rank, "world_size": world, "local_rank": _launched("LOCAL_RANK", 0)}


def _launched(name: str, otherwise: int) -> int:
    """A number that torchrun, Open MPI or Slurm set."""
    names = {
        "RANK": ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
        "WORLD_SIZE": ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"),
        "LOCAL_RANK": ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"),
    }[name]
    return next((int(os.environ[each]) for each in names if os.environ.get(each, "").isdigit()), otherwise)


def job_facts(model: Any = None) -> dict[str, Any]:
    """Facts of this process; `model` is the one that trains (None: those that DDP or FSDP wrapped are looked for)."""
    facts: dict[str, Any] = {"host": socket.gethostname(), "environment": public_environment(os.environ)}
    readers: dict[str, Callable[[], Any]] = {
        "versions": _versions,
        "device": _device,
        "groups": _groups,
        "memory": _memory,
        "models": lambda: [_model(each) for each in _models(model)],
        "parameters": lambda: _parameters(_models(model)),
    }
    for name, read in readers.items():
        try:
            facts[name] = read()
        except Exception as error:  # a version of PyTorch that keeps it elsewhere
            facts.setdefault("unread", {})[name] = "%s: %s" % (type(error).__name__, error)
    return facts


def _versions() -> dict[str, str]:
    import torch

    known = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    if torch.cuda.is_available():
        known["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        known["cudnn"] = torch.backends.cudnn.version()
    for name in _LIBRARIES:
        known[name] = getattr(sys.modules.get(name), "__version__", None)
    return {name: str(version) for name, version in known.items() if version}


def _device() -> dict[str, Any] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"name": properties.name, "memory_bytes": properties.total_memory, "count": torch.cuda.device_count()}


def _memory() -> dict[str, int]:
    import torch

    peaks = {"rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        peaks["allocated_bytes"] = torch.cuda.max_memory_allocated()
        peaks["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return peaks


def _groups() -> list[dict[str, Any]]:
    """Process groups, as PyTorch lists them in its own profiles: names, backend, ranks."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return []
    return list(distributed.distributed_c10d._world.pg_config_info)


def _models(model: Any) -> list[Any]:
    """The models that DDP or FSDP wrapped, outermost first; without any, `model`."""
    from torch import nn

    ddp, fsdp = nn.parallel.DistributedDataParallel, None
    if "torch.distributed.fsdp" in sys.modules:
        fsdp = getattr(sys.modules["torch.distributed.fsdp"], "FSDPModule", None)
    kinds = {ddp, fsdp} - {None}
    roots = [each for each in gc.get_objects() if kinds.intersection(type(each).__mro__)]
    inner = {id(part) for each in roots for part in each.modules() if part is not each}
    outermost = [each for each in roots if id(each) not in inner]
    return outermost or ([] if model is None else [model])


def _model(model: Any) -> dict[str, Any]:
    parameters = list(model.parameters())
    facts: dict[str, Any] = {
        "class": type(model).__name__,
        "parameters": sum(each.numel() for each in parameters),
        "trained_parameters": sum(each.numel() for each in parameters if each.requires_grad),
        "dtypes": sorted({str(each.dtype).replace("torch.", "") for each in parameters}),
    }
    names = [each.__name__ for each in type(model).__mro__]
    if "DistributedDataParallel" in names:
        facts["kind"] = "ddp"
        facts["bucket_cap_bytes"] = int(model.bucket_bytes_cap)
        facts.update({name: bool(getattr(model, name)) for name in _DDP_SWITCHES if hasattr(model, name)})
    elif "FSDPModule" in names:
        facts["kind"] = "fsdp"
        facts["units"] = list(_units(model))
    return facts


_DDP_SWITCHES = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters", "broadcast_buffers")


def _units(model: Any) -> Iterator[dict[str, Any]]:
    """Units of a model that `fully_shard` divided: settings of each."""
    for name, module in model.named_modules():
        if "FSDPModule" not in [each.__name__ for each in type(module).__mro__]:
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in filter(None, [state._fsdp_param_group] if groups is None else groups):
            policy = group.mp_policy
            yield {
                "name": name,
                "parameters": len(group.fsdp_params),
                "ranks": getattr(group.mesh_info, "shard_mesh_size", 1),
                "reshard_after_forward": group.post_forward_mesh_info is not None,
                "param_dtype": policy.param_dtype,
                "reduce_dtype": policy.reduce_dtype,
            }


def _parameters(models: list[Any]) -> list[list[Any]] | None:
    """[name, shape, dtype] of each trained parameter, as `dpro-search import --parameters` takes them; of one model only."""
    if len(models) != 1:
        return None
    model = getattr(models[0], "module", models[0]) if type(models[0]).__name__ == "DistributedDataParallel" else models[0]
    rows = [[name, list(each.shape), str(each.dtype)] for name, each in model.named_parameters() if each.requires_grad]
    return rows if len(rows) <= _MOST_PARAMETERS else None
