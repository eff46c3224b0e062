"""One rank of a job whose compute is a sleep, so that two cores carry 16 ranks; schedules and exchanges are PyTorch's own.

Reads ``job.json`` (see `launch.py`) and slows itself down as the rank's part of the schedule says. PyTorch only.
"""

import contextlib
import json
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, os.environ["STAMPS_CODE"])
from collective_stamps import CollectiveStamps


class Pace:
    """Sleeps in place of compute, longer in the steps that the schedule names."""

    def __init__(self, job, rank):
        self._job = job
        self._disturbances = [each for each in job["schedule"] if rank in each["ranks"] and each["kind"] != "link"]
        self._draws = random.Random(job["seed"] * 1000 + rank)
        self._hit_block, self._delays, self._active = -1, [], []
        self._spread = job.get("spread", 0.02)

    def begins_step(self, step):
        self._active = [each for each in self._disturbances if each["first"] <= step < each["end"]]
        self._hit_block = self._draws.randrange(self._job["blocks"])
        self._delays = [each for each in self._active if each["kind"] == "jitter" and self._draws.random() < each["share"]]

    def reads_input(self):
        extra = sum(each["size"] * self._job["step_us"] for each in self._active if each["kind"] == "input")
        time.sleep((self._job["input_us"] + extra) / 1e6)

    def computes(self, us, block, backward):
        us *= max(self._draws.gauss(1.0, self._spread), 0.5)
        for each in self._active:
            if each["kind"] in ("compute", "host"):
                us *= 1 + each["size"]
        if backward and block == self._hit_block:
            us += sum(self._draws.expovariate(1.0) * each["size"] * self._job["step_us"] for each in self._delays)
            self._delays = []
        time.sleep(us / 1e6)


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, pace, block, us):
        ctx.arguments = pace, block, us
        pace.computes(us, block, False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        pace, block, us = ctx.arguments
        pace.computes(2 * us, block, True)
        return gradient, None, None, None


class Block(torch.nn.Module):
    def __init__(self, pace, block, us, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self._arguments = pace, block, us

    def forward(self, x):
        return Wait.apply(self.linear(x), *self._arguments)


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    stamped = os.environ.get("STAMPED", "1") == "1"
    with CollectiveStamps(job["stamps"]) if stamped else contextlib.nullcontext():
        dist.init_process_group("gloo", init_method=os.environ["MEET"], rank=rank, world_size=job["ranks"])
        run(job, rank)
        dist.barrier()
        dist.destroy_process_group()


def run(job, rank):
    torch.manual_seed(0)
    pace = Pace(job, rank)
    step_of = {"ddp": ddp, "fsdp": fsdp, "pipeline": pipeline}[job["kind"]](job, rank, pace)
    for step in range(job["steps"]):
        if rank == 0:
            print(step, flush=True)
        pace.begins_step(step)
        pace.reads_input()
        step_of()


def blocks(job, pace, count):
    return torch.nn.Sequential(*[Block(pace, block, job["block_us"], job["width"]) for block in range(count)])


def ddp(job, rank, pace):
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(blocks(job, pace, job["blocks"]), bucket_cap_mb=job["width"] ** 2 * 4 / 2**20 * 0.9)
    return trained(model, job)


def fsdp(job, rank, pace):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (job["ranks"],))
    model = blocks(job, pace, job["blocks"])
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, job)


def trained(model, job):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    inputs = torch.randn(4, job["width"])

    def step():
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipeline(job, rank, pace):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stages = job["stages"]
    mesh = init_device_mesh("cpu", (job["ranks"] // stages, stages), mesh_dim_names=("dp", "pp"))
    stage_number, replicas = mesh["pp"].get_local_rank(), job["ranks"] // stages
    module = blocks(job, pace, 1)
    stage = PipelineStage(module, stage_number, stages, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, job["micro_batches"], loss_fn=lambda output, target: (output - target).pow(2).mean())
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6)
    rows = torch.randn(job["micro_batches"] * job["rows"], job["width"])

    def step():
        if stage_number == 0:
            schedule.step(rows)
        elif stage_number == stages - 1:
            schedule.step(target=rows)
        else:
            schedule.step()
        if replicas > 1:
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
