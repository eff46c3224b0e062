"""Makes DistributedDataParallel follow a plan's buckets and compression. Copy beside `ddp.json` and import it from the script:

    from ddp import planned_ddp

    model = planned_ddp(model)     # in place of DistributedDataParallel(model)

Needs PyTorch, nothing else; Python 3.8 and later.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def planned_ddp(module: Any, **options: Any) -> Any:
    """`DistributedDataParallel` of a module, with the plan's buckets and compression; `options` are its other arguments.

    Raises
    ------
    ValueError
        `options` has an argument that the plan sets, or this PyTorch has no buckets of given sizes (2.13 and later do).
    """
    import inspect

    from torch.nn.parallel import DistributedDataParallel

    plan = json.loads(Path(__file__).resolve().with_name("ddp.json").read_text())
    twice = sorted(set(plan["options"]) & set(options))
    if twice:
        raise ValueError(f"the plan sets {twice[0]}: leave it out of planned_ddp")
    unknown = sorted(set(plan["options"]) - set(inspect.signature(DistributedDataParallel.__init__).parameters))
    if unknown:
        raise ValueError(f"this PyTorch's DistributedDataParallel has no {unknown[0]}, which the plan's buckets need")
    parallel = DistributedDataParallel(module, **plan["options"], **options)
    if plan["compression"] in ("fp16", "bf16"):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        parallel.register_comm_hook(None, getattr(default_hooks, plan["compression"] + "_compress_hook"))
    if "powersgd" in plan:
        _compress_by_powersgd(parallel, plan["powersgd"])
    _report_used()
    return parallel


def _compress_by_powersgd(parallel: Any, options: dict[str, Any]) -> None:
    """Register PyTorch's PowerSGD with the given options, a bucket at a time.

    The hook enqueues a bucket's second and third all-reduce from callbacks. Gloo runs callbacks on its own threads in any order,
    so ranks may enqueue the all-reduces of two buckets in different orders. Then they reduce different tensors together, or abort
    ("Received data size doesn't match expected size"). The wait separates the buckets.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    def powersgd_in_sequence(state, bucket):  # type: ignore[no-untyped-def] # DDP wants its own types, or none
        done = powerSGD_hook(state, bucket)
        done.wait()
        return done

    parallel.register_comm_hook(PowerSGDState(None, **options), powersgd_in_sequence)


def _report_used() -> None:
    """Let `dpro-search validate` know that the script follows the plan."""
    folder = os.environ.get("DPRO_SEARCH_REPORT")
    if folder:
        Path(folder, "used-" + Path(__file__).name).touch()
