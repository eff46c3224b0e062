"""PyTorch's DistributedDataParallel: gradients in buckets, all-reduced beside the backward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dpro_search.collect.torch_files import FORMAT
from dpro_search.collect.trace import Trace
from dpro_search.deploy.parts.part import JobFacts
from dpro_search.deploy.parts.pytorch import DDP, PYTORCH
from dpro_search.kinds._base import Job, Kind

if TYPE_CHECKING:
    from dpro_search.collect.launchers._base import Launcher


class DdpKind(Kind):
    """Jobs that were recorded with DistributedDataParallel."""

    title = "a DistributedDataParallel job"
    formats = (FORMAT,)
    targets = (DDP, PYTORCH)

    @property
    def job_type(self) -> type[Job]:
        from dpro_search.kinds.ddp.job import Ddp

        return Ddp

    @property
    def launchers(self) -> tuple[Launcher, ...]:
        from dpro_search.collect.launchers.torch import PYTORCH_DDP

        return (PYTORCH_DDP,)

    def facts(self, trace: Trace) -> JobFacts:
        """With the gradients in the order in which they become ready: buckets are cut from it."""
        from dpro_search.graph.ddp import build_ddp_graph

        return replace(super().facts(trace), tensors=build_ddp_graph(trace).tensors, ready_order=True)


KIND = DdpKind()
