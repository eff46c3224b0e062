"""A rank of a DistributedDataParallel job that follows the plan in DPRO_SEARCH_PLAN: buckets, parts of a batch, modules.

MODEL=blocks: of blocks with batch normalisation and dropout, whose statistics STATE_TO is to hold at the end. With SENT_TO each
rank has data of its own, and writes there the bytes of its last step's all-reduces by Python, and the sums of its parameters.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PLAN = os.environ.get("DPRO_SEARCH_PLAN", "")
sys.path.insert(0, PLAN)


def planned(name):
    return bool(PLAN) and Path(PLAN, name).exists()


def counted(tensor, *arguments, **options):
    sent.append(tensor.numel() * tensor.element_size())
    return all_reduce(tensor, *arguments, **options)


sent, all_reduce, dist.all_reduce = [], dist.all_reduce, counted
dist.init_process_group("gloo")
torch.manual_seed(1)
if os.environ.get("MODEL") == "blocks":
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64)) for _ in range(3))
    model = nn.Sequential(*blocks, nn.Linear(64, 10))
else:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())), nn.Linear(64, 10))
if planned("modules.py"):
    from modules import planned_modules

    model = planned_modules(model)
if planned("ddp.py"):
    from ddp import planned_ddp

    model = planned_ddp(model)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_of = nn.CrossEntropyLoss()
inputs, labels = torch.randn(16, 64), torch.randint(10, (16,))
if os.environ.get("SENT_TO"):
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
for step in range(12):
    optimizer.zero_grad()
    sent.clear()
    with torch.no_grad():
        value = loss_of(model.module(inputs), labels).item()
    if planned("micro_batches.py"):
        from micro_batches import planned_parts

        for part, of_part in planned_parts(model, inputs, labels):
            loss_of(model(part), of_part).backward()
    else:
        loss_of(model(inputs), labels).backward()
    optimizer.step()
    print("step", step, "loss", value.hex(), flush=True)
found = model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
if os.environ.get("BUCKETS_TO") and dist.get_rank() == 0:
    Path(os.environ["BUCKETS_TO"]).write_text(found)
if os.environ.get("STATE_TO") and dist.get_rank() == 0:
    sums = {name: value.double().sum().item().hex() for name, value in model.module.state_dict().items()}
    Path(os.environ["STATE_TO"]).write_text(json.dumps(sums))
if os.environ.get("SENT_TO"):
    found = {"bytes": sent, "parameters": [value.double().sum().item() for value in model.parameters()]}
    Path(f"{os.environ['SENT_TO']}-{dist.get_rank()}").write_text(json.dumps(found))
dist.destroy_process_group()
