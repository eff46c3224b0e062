"""PyTorch's FSDP, FSDP2 and HSDP as PyTorch's profiler shows them: units gather parameters and reduce-scatter gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dpro_search.collect.trace import CollectiveKind, EventKind, Trace
from dpro_search.deploy.parts.part import JobFacts
from dpro_search.deploy.parts.pytorch import FSDP, PYTORCH
from dpro_search.kinds._kind import Kind

_MARKS = ("FSDP::", "FullyShardedDataParallel")
_OWN = {CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER}
_BESIDE = {CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST}


class ProfiledFsdpKind(Kind):
    """Profiles in which FSDP marked itself, or whose ranks gather and reduce-scatter tensors of known sizes and nothing else."""

    title = "a profiled fully sharded job"
    formats = ("kineto",)
    targets = (FSDP, PYTORCH)
    job_name = "dpro_search.kinds.profiled_fsdp.job:ProfiledFsdp"
    profile_launcher_name = "dpro_search.collect.launchers.torch:PYTORCH_FSDP"

    def recognises(self, trace: Trace) -> bool:
        if trace.meta.format not in self.formats or not len(trace.steps.index):
            return False
        events = trace.events
        moves = (events.kind == EventKind.COLLECTIVE) & np.isin(events.step, trace.steps.index)
        kinds = {CollectiveKind(kind) for kind in np.unique(events.collective_kind[moves]).tolist()}
        if not kinds >= _OWN:
            return False
        sized = bool((events.size_bytes[moves] > 0).all())
        return any(name.startswith(_MARKS) for name in trace.names) or (sized and not kinds - _OWN - _BESIDE)

    def facts(self, trace: Trace) -> JobFacts:
        """With a tensor for each unit, by its path in the model."""
        from dpro_search.graph.sharded_units import sharded_units_of

        return replace(super().facts(trace), tensors=sharded_units_of(trace).tensors)


KIND = ProfiledFsdpKind()
