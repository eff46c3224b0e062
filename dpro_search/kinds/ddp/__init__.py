"""PyTorch's DistributedDataParallel: gradients in buckets, all-reduced beside the backward pass."""

from __future__ import annotations

from dataclasses import replace

from dpro_search.collect.assemble.torch.files import FORMAT
from dpro_search.collect.trace import Trace
from dpro_search.deploy.parts.part import JobFacts
from dpro_search.deploy.parts.pytorch import DDP, PYTORCH
from dpro_search.deploy.parts.synchronisation import SYNCHRONISATION
from dpro_search.kinds._kind import Kind


class DdpKind(Kind):
    """Jobs that were recorded with DistributedDataParallel."""

    title = "a DistributedDataParallel job"
    formats = (FORMAT,)
    targets = (DDP, PYTORCH, SYNCHRONISATION)
    job_name = "dpro_search.kinds.ddp.job:Ddp"
    launcher_names = ("dpro_search.collect.launchers.torch:PYTORCH_DDP",)

    def facts(self, trace: Trace) -> JobFacts:
        """With the gradients in the order in which they become ready: buckets are cut from it."""
        from dpro_search.graph.ddp import build_ddp_graph

        return replace(super().facts(trace), tensors=build_ddp_graph(trace).tensors, ready_order=True)


KIND = DdpKind()
