"""A rank of a small fully sharded job as people write it, with no line for the recorder: ``fsdp_job.py HOW [STEPS]``.

HOW: ``plain``; ``prefetch``, units gather their parameters while the unit before them computes; ``keep``, units keep them after the
forward pass; ``grouped``, two layers are one unit; ``accumulate``, two backward passes a step of which the last communicates;
``by-hand``, an update without torch.optim. Several can be joined by commas. The last line printed is the loss, to the last bit.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch_training import batch, begun, ended, step

how, steps = begun()
layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)]
model = nn.Sequential(*layers, nn.Linear(64, 10))  # the last layer is left to the root
if "grouped" in how:
    fully_shard(layers[:2])
for layer in layers[2:] if "grouped" in how else layers:
    fully_shard(layer, reshard_after_forward="keep" not in how)
fully_shard(model)
if "prefetch" in how:
    model._set_unshard_async_op(True)
    for unit, following in zip([model, *layers], layers):
        unit.set_modules_to_forward_prefetch([following])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, labels = batch()

for _ in range(steps):
    optimizer.zero_grad()
    if "accumulate" in how:
        model.set_requires_gradient_sync(False)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        model.set_requires_gradient_sync(True)
    loss = step(model, optimizer, inputs, labels, "by-hand" in how)
del model
ended(loss)
