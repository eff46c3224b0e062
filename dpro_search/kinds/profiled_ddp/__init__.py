"""PyTorch's DistributedDataParallel as PyTorch's profiler shows it: buckets of gradients, all-reduced beside the backward pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dpro_search.collect.trace import CollectiveKind, EventKind, Trace
from dpro_search.deploy.parts.part import JobFacts
from dpro_search.deploy.parts.pytorch import DDP
from dpro_search.kinds._kind import Kind

_MARK = "DistributedDataParallel.forward"
_OTHER_SCHEMES = ("FSDP::", "FullyShardedDataParallel")


class ProfiledDdpKind(Kind):
    """Profiles whose ranks all-reduce the same buckets in every step."""

    title = "a profiled DistributedDataParallel job"
    formats = ("kineto",)
    targets = (DDP,)
    job_name = "dpro_search.kinds.profiled_ddp.job:ProfiledDdp"
    profile_launcher_name = "dpro_search.collect.launchers.torch:PYTORCH_DDP"

    def recognises(self, trace: Trace) -> bool:
        """Nothing but all-reduces (and broadcasts of buffers) is communicated, and DDP marked itself or their sizes are known."""
        if trace.meta.format not in self.formats or not len(trace.steps.index):
            return False
        if any(name.startswith(_OTHER_SCHEMES) for name in trace.names):
            return False
        events = trace.events
        moves = (events.kind == EventKind.COLLECTIVE) & np.isin(events.step, trace.steps.index)
        kinds = {CollectiveKind(kind) for kind in np.unique(events.collective_kind[moves]).tolist()}
        if CollectiveKind.ALL_REDUCE not in kinds or kinds - {CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST}:
            return False
        from dpro_search.graph.gradient_events import gradients_of

        gradients = gradients_of(trace)
        return gradients is not None and (bool(gradients.tensors) or _MARK in trace.names)

    def facts(self, trace: Trace) -> JobFacts:
        """With the gradients in the order in which they become ready."""
        from dpro_search.graph.gradient_events import gradients_of

        gradients = gradients_of(trace)
        return replace(
            super().facts(trace), tensors=() if gradients is None else gradients.tensors, ready_order=gradients is not None
        )


KIND = ProfiledDdpKind()
