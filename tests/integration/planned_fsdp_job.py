"""A rank of a fully sharded job that follows the plan in DPRO_SEARCH_PLAN, with steps and losses that tests compare.

With GATHERS_TO, rank 0 writes there how many all-gathers one more step made.
"""

import gc
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

PLAN = os.environ.get("DPRO_SEARCH_PLAN", "")
sys.path.insert(0, PLAN)

dist.init_process_group("gloo")
torch.manual_seed(1)
layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)]
model = nn.Sequential(*layers, nn.Linear(64, 10))
for layer in layers:
    fully_shard(layer)
fully_shard(model)
if PLAN and Path(PLAN, "fsdp.py").exists():
    from fsdp import planned_fsdp

    model = planned_fsdp(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_of = nn.CrossEntropyLoss()
inputs, labels = torch.randn(16, 64), torch.randint(10, (16,))


def step(model, optimizer):
    optimizer.zero_grad()
    loss = loss_of(model(inputs), labels)
    loss.backward()
    optimizer.step()
    print(f"loss: {loss.item()}", flush=True)


for _ in range(12):
    step(model, optimizer)
if "GATHERS_TO" in os.environ:
    with torch.profiler.profile() as recorded:
        step(model, optimizer)
    gathers = sum(event.name == "c10d::_allgather_base_" for event in recorded.events())
    if dist.get_rank() == 0:
        Path(os.environ["GATHERS_TO"]).write_text(str(gathers))
del model, optimizer
gc.collect()
dist.destroy_process_group()
