"""A rank of a small DistributedDataParallel job as people write it, with no line for the recorder: ``ddp_job.py HOW [STEPS]``.

HOW: ``plain``; ``accumulate``, two backward passes a step of which the last communicates; ``by-hand``, an update without
torch.optim; ``unused``, DDP looks for parameters without gradients, and keeps its first buckets; ``static``, it is told that its
graph never changes; ``view``, gradients are views of their buckets; ``half``, buckets are compressed to half precision; ``alone``,
no DDP at all. Several can be joined by commas. The last line printed is the loss, to the last bit.
"""

import contextlib
import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

how, steps = sys.argv[1].split(","), int(sys.argv[2]) if len(sys.argv) > 2 else 14
dist.init_process_group("gloo")
torch.manual_seed(1)
layers = []
for _ in range(3):
    layers += [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(64, 10))
if "alone" not in how:
    model = DistributedDataParallel(
        model,
        bucket_cap_mb=0.03,
        find_unused_parameters="unused" in how,
        static_graph="static" in how,
        gradient_as_bucket_view="view" in how,
    )
if "half" in how:
    model.register_comm_hook(None, fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(dist.get_rank())
inputs, labels = torch.randn((32, 64), generator=generator), torch.randint(10, (32,), generator=generator)

for _ in range(steps):
    optimizer.zero_grad()
    if "accumulate" in how:
        with model.no_sync():
            nn.functional.cross_entropy(model(inputs), labels).backward()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    if "by-hand" in how:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    else:
        optimizer.step()
    with torch.no_grad(), contextlib.suppress(AttributeError):
        model.module.eval()(inputs)  # an evaluation is no step
        model.module.train()
print(float(loss.detach()).hex())
del model  # it holds on to the group, whose threads then now and then abort a process that ends (seen in 2 of 14 runs)
gc.collect()
dist.destroy_process_group()
