"""Trains one of the workloads with PyTorch's DistributedDataParallel, or sharded by FSDP, as a user's script for torchrun would.

dpro-search collect --framework pytorch --comm ddp --out T -- python experiments/workloads/torch_train.py --model bert
dpro-search collect --framework pytorch --comm fsdp --out T -- python experiments/workloads/torch_train.py --model bert --fsdp

With DPRO_SEARCH_PLAN set to a folder that `dpro-search export` wrote, DistributedDataParallel follows that plan's buckets, FSDP its
units and gathers, and the plan's modules are computed again. With --profile DIR each rank writes a profile of a few steps there, as
PyTorch's own profiler exports it, for `dpro-search import`.
"""

import argparse
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch_models import BUILDERS, blocks

PLAN = os.environ.get("DPRO_SEARCH_PLAN", "")


def replicated(model, **options):
    """DistributedDataParallel, as a plan says if there is one."""
    if PLAN:
        sys.path.insert(0, PLAN)
    if PLAN and os.path.exists(os.path.join(PLAN, "modules.py")):
        from modules import planned_modules

        model = planned_modules(model)
    if not PLAN or not os.path.exists(os.path.join(PLAN, "ddp.py")):
        return DistributedDataParallel(model, **options)
    from ddp import planned_ddp

    with open(os.path.join(PLAN, "ddp.json")) as file:
        planned = {name.replace("_list", "") for name in json.load(file)["options"]}
    return planned_ddp(model, **{name: value for name, value in options.items() if name not in planned})


def sharded(model, prefetch, reshard):
    """The model with each block as a unit of FSDP, and the rest as one; as a plan says if there is one."""
    from torch.distributed.fsdp import fully_shard

    planned = bool(PLAN) and os.path.exists(os.path.join(PLAN, "fsdp.py"))
    if PLAN:
        sys.path.insert(0, PLAN)
    if PLAN and os.path.exists(os.path.join(PLAN, "modules.py")):
        from modules import planned_modules

        model = planned_modules(model)
    if planned:
        from fsdp import planned_fsdp, planned_shard, shards_itself

        if shards_itself():
            return planned_shard(model)
    units = [fully_shard(block, reshard_after_forward=reshard) for block in blocks(model)]
    fully_shard(model)
    if planned:
        return planned_fsdp(model)
    if prefetch:
        model._set_unshard_async_op(True)  # else a CPU rank waits for each all-gather where it begins
        for unit, following in zip([model, *units], units):
            unit.set_modules_to_forward_prefetch([following])
    return model


def profiled(folder):
    """A running profiler, as the documentation of PyTorch has it."""
    from torch.profiler import ProfilerActivity, profile, schedule

    os.makedirs(folder, exist_ok=True)
    devices = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiler = profile(
        activities=[ProfilerActivity.CPU, *devices],
        schedule=schedule(wait=3, warmup=2, active=5),
        record_shapes=True,
        profile_memory=True,
        on_trace_ready=lambda p: p.export_chrome_trace(os.path.join(folder, f"rank{dist.get_rank()}.json.gz")),
    )
    profiler.start()
    return profiler


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(BUILDERS), required=True)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--batch", type=int, help="samples per rank (default: the workload's own)")
    parser.add_argument("--bucket-cap-mb", type=float, help="DDP's largest bucket (default: PyTorch's own)")
    parser.add_argument("--bucket-view", action="store_true", help="gradients are views of their buckets")
    parser.add_argument("--fsdp", action="store_true", help="shard each block with FSDP instead of DistributedDataParallel")
    parser.add_argument("--prefetch", action="store_true", help="FSDP gathers a block's parameters while the one before computes")
    parser.add_argument("--no-reshard", action="store_true", help="FSDP keeps parameters from the forward to the backward pass")
    parser.add_argument("--profile", metavar="DIR", help="write Kineto profiles of steps 5 to 9 here")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    model, inputs, labels = BUILDERS[options.model](**({"batch": options.batch} if options.batch else {}))
    if options.fsdp:
        parallel = sharded(model, options.prefetch, not options.no_reshard)
    else:
        bucket = {} if options.bucket_cap_mb is None else {"bucket_cap_mb": options.bucket_cap_mb}
        parallel = replicated(model, gradient_as_bucket_view=options.bucket_view, **bucket)
    if options.model in ("bert", "gpt"):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = torch.nn.CrossEntropyLoss()
    profiler = profiled(options.profile) if options.profile else None
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = loss_of(parallel(inputs), labels)
        loss.backward()
        optimizer.step()
        if profiler is not None:
            profiler.step()
        if dist.get_rank() == 0 and (step < 20 or step % 10 == 0):
            print(f"step {step} loss {loss.item():.6f}", flush=True)
    if profiler is not None:
        profiler.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
