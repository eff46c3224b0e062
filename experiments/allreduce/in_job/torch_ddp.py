"""PyTorch's DistributedDataParallel on Gloo, or with the communication hook of `dpro_search_all_reduce` (on MPI)."""

import os
import time

import torch
import torch.distributed as dist


class _Moment(torch.autograd.Function):
    """A piece of the backward pass: after a wait, the gradients of its parameters are there."""

    @staticmethod
    def forward(ctx, x, wait_us, *parameters):
        ctx.wait_us, ctx.sizes = wait_us, [each.numel() for each in parameters]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.wait_us / 1e6)
        return (gradient, None, *[torch.zeros(size) for size in ctx.sizes])


class _Network(torch.nn.Module):
    """The parameters in the order of the forward pass, the reverse of their moments."""

    def __init__(self, waits_us, moments):
        super().__init__()
        self.waits_us = waits_us
        self.pieces = torch.nn.ModuleList(
            torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(size)) for size in reversed(sizes)) for sizes in reversed(moments)
        )

    def forward(self, x):
        time.sleep(self.waits_us[0] / 1e6)
        for piece, wait_us in zip(self.pieces, reversed(self.waits_us[1:])):
            x = _Moment.apply(x, wait_us, *piece)
        return x


class Job:
    """Attributes: `reports`, whether this process writes results; `version`."""

    def __init__(self, scheme, folder):
        torch.set_num_threads(1)
        for ours, theirs in (("RANK", ("OMPI_COMM_WORLD_RANK", "PMI_RANK")), ("WORLD_SIZE", ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))):
            for name in theirs:
                if name in os.environ:
                    os.environ[ours] = os.environ[name]
        dist.init_process_group("gloo")
        self.reports = dist.get_rank() == 0
        self.version = "torch " + torch.__version__
        self._all_reduce = None
        if scheme != "ddp-gloo":
            from dpro_search_all_reduce import AllReduce
            from mpi4py import MPI

            self._all_reduce = AllReduce(choice=os.environ.get("DPRO_SEARCH_ALL_REDUCES") or None)
            self.version += ", " + MPI.Get_library_version().split(",")[0].split("\n")[0]

    def training(self, waits_us, moments):
        network = torch.nn.parallel.DistributedDataParallel(_Network(waits_us, moments))
        if self._all_reduce is not None:
            from dpro_search_all_reduce.ddp import hook

            network.register_comm_hook(None, hook(self._all_reduce))
        x = torch.zeros(1, requires_grad=True)

        def step():
            network.zero_grad()
            network(x).sum().backward()

        return step

    def exchange(self, elements):
        tensor = torch.zeros(elements)
        if self._all_reduce is not None:
            return lambda: self._all_reduce.sum(tensor)
        return lambda: dist.all_reduce(tensor)

    def stop(self):
        dist.barrier()
        if self._all_reduce is not None:
            self._all_reduce.close()
        dist.destroy_process_group()
