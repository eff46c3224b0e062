"""A rank of a small job that PyTorch's profiler records: ``profiled_job.py ddp|fsdp|hsdp``; follows the plan in DPRO_SEARCH_PLAN.

With PROFILE_TO each rank writes a Kineto profile there. With MADE_TO rank 0 writes what one more step did: the names of its ops.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

PLAN = os.environ.get("DPRO_SEARCH_PLAN", "")
sys.path.insert(0, PLAN)
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(1)
layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]
model = nn.Sequential(*layers, nn.Linear(256, 10))
if PLAN and Path(PLAN, "modules.py").exists():
    from modules import planned_modules

    model = planned_modules(model)
followed = bool(PLAN) and Path(PLAN, f"{sys.argv[1]}.py").exists()
if sys.argv[1] == "ddp":
    if followed:
        from ddp import planned_ddp

        model = planned_ddp(model)
    else:
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.25)
else:
    from torch.distributed.fsdp import fully_shard

    if followed:
        from fsdp import planned_fsdp, planned_shard, shards_itself
    if followed and shards_itself():
        model = planned_shard(model)
    else:
        mesh = {}
        if sys.argv[1] == "hsdp":  # pairs of ranks share the parameters
            pairs = (dist.get_world_size() // 2, 2)
            mesh = {"mesh": dist.device_mesh.init_device_mesh("cpu", pairs, mesh_dim_names=("replicate", "shard"))}
        for layer in layers:
            fully_shard(layer, **mesh)
        fully_shard(model, **mesh)
        model = planned_fsdp(model) if followed else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_of = nn.CrossEntropyLoss()
inputs, labels = torch.randn(32, 256), torch.randint(10, (32,))


def step():
    optimizer.zero_grad()
    loss = loss_of(model(inputs), labels)
    loss.backward()
    optimizer.step()
    print(f"loss: {loss.item()}", flush=True)


if os.environ.get("PROFILE_TO"):
    path = str(Path(os.environ["PROFILE_TO"], f"rank{dist.get_rank()}.json"))
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=3, warmup=2, active=5),
        record_shapes=True,
        on_trace_ready=lambda found: found.export_chrome_trace(path),
    ) as profiler:
        for _ in range(10):
            step()
            profiler.step()
else:
    for _ in range(10):
        step()
if os.environ.get("MADE_TO"):
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    if dist.get_rank() == 0:
        Path(os.environ["MADE_TO"]).write_text(json.dumps([event.name for event in found.events()]))
dist.barrier()
dist.destroy_process_group()
