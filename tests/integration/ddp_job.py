"""A rank of a small DistributedDataParallel job as people write it, with no line for the recorder: ``ddp_job.py HOW [STEPS]``.

HOW: ``plain``; ``accumulate``, two backward passes a step of which the last communicates; ``by-hand``, an update without
torch.optim; ``unused``, DDP looks for parameters without gradients, and keeps its first buckets; ``alone``, no DDP at all. The last
line printed is the loss, to the last bit.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

how, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 14
dist.init_process_group("gloo")
torch.manual_seed(1)
layers = []
for _ in range(3):
    layers += [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(64, 10))
if how != "alone":
    model = DistributedDataParallel(model, bucket_cap_mb=0.03, find_unused_parameters=how == "unused")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(dist.get_rank())
inputs, labels = torch.randn((32, 64), generator=generator), torch.randint(10, (32,), generator=generator)

for _ in range(steps):
    optimizer.zero_grad()
    if how == "accumulate":
        with model.no_sync():
            nn.functional.cross_entropy(model(inputs), labels).backward()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    if how == "by-hand":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    else:
        optimizer.step()
    with torch.no_grad(), contextlib.suppress(AttributeError):
        model.module.eval()(inputs)  # an evaluation is no step
        model.module.train()
print(float(loss.detach()).hex())
dist.destroy_process_group()
