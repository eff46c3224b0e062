"""A rank of a small DistributedDataParallel job as people write it, with no line for the recorder: ``ddp_job.py HOW [STEPS]``.

HOW: ``plain``; ``accumulate``, two backward passes a step of which the last communicates; ``by-hand``, an update without
torch.optim; ``unused``, DDP looks for parameters without gradients, and keeps its first buckets; ``static``, it is told that its
graph never changes; ``view``, gradients are views of their buckets; ``half``, buckets are compressed to half precision; ``alone``,
no DDP at all. Several can be joined by commas. The last line printed is the loss, to the last bit.
"""

import contextlib

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch_training import batch, begun, ended, step

how, steps = begun()
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
inputs, labels = batch()

for _ in range(steps):
    optimizer.zero_grad()
    if "accumulate" in how:
        with model.no_sync():
            nn.functional.cross_entropy(model(inputs), labels).backward()
    loss = step(model, optimizer, inputs, labels, "by-hand" in how)
    with torch.no_grad(), contextlib.suppress(AttributeError):
        model.module.eval()(inputs)  # an evaluation is no step
        model.module.train()
del model
ended(loss)
