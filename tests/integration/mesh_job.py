"""A small transformer-like model on the ranks of a mesh, in plain PyTorch: `python mesh_job.py pipeline|tensor|sharded STEPS`."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed import device_mesh

WIDTH, LAYERS, BATCH, MICRO_BATCHES = 256, 4, 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def loss_of(outputs, targets):
    return F.mse_loss(outputs, targets)


def pipeline(model, mesh):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks = mesh.get_local_rank(), mesh.size()
    own = nn.Sequential(*list(model)[rank * LAYERS // ranks : (rank + 1) * LAYERS // ranks])
    stage = PipelineStage(own, rank, ranks, torch.device("cpu"), group=mesh.get_group())
    schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)

    def step(inputs, targets):
        last = {"target": targets, "losses": []} if stage.is_last else {}
        schedule.step(*([inputs] if stage.is_first else []), **last)

    return own, step


def tensor(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {f"{layer}.up": ColwiseParallel() for layer in range(LAYERS)}
    parallelize_module(model, mesh, plan | {f"{layer}.down": RowwiseParallel() for layer in range(LAYERS)})
    return model, lambda inputs, targets: loss_of(model(inputs), targets).backward()


def sharded(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, lambda inputs, targets: loss_of(model(inputs), targets).backward()


def main():
    kind, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    axis = {"pipeline": "pp", "tensor": "tp", "sharded": "dp_shard"}[kind]
    mesh = device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(axis,))
    model, step = globals()[kind](nn.Sequential(*(Block() for _ in range(LAYERS))), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        inputs = torch.randn(BATCH, WIDTH)
        step(inputs, inputs.flip(0))
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


main()
