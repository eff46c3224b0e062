"""A job on CPUs whose compute is a sleep; the rank SLOW_RANK sleeps longer in its backward pass from the 20th step on.

PARALLEL: "ddp", or "tensor" (DTensor, whose collectives are functional ones).
"""

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS = 60


class Sleeping(torch.autograd.Function):
    seconds = 0.005

    @staticmethod
    def forward(ctx, x):
        time.sleep(0.005)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(Sleeping.seconds)
        return gradient


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x):
        return Sleeping.apply(self.linear(x))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(*[Block() for _ in range(4)])
    if os.environ["PARALLEL"] == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=0.01)
    else:
        styles = {f"{block}.linear": RowwiseParallel() if block % 2 else ColwiseParallel() for block in range(4)}
        model = parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), styles)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        if step == 20 and os.environ.get("SLOW_RANK") == str(dist.get_rank()):
            Sleeping.seconds = 0.02
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
