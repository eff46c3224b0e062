"""Everything recorded of one job, as values: `TraceValues`. A `Trace` is one that can be written and read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dpro_search.collect.modules import ModuleCalls, ModuleInfo
from dpro_search.collect.trace_columns import (
    Dependencies,
    Events,
    Floats,
    MemorySamples,
    NodeGraph,
    ProcessGroup,
    Shapes,
    Steps,
    TensorInfo,
)
from dpro_search.collect.trace_meta import CommSettings, TraceMeta
from dpro_search.errors import InputError

SETTLING_STEPS = 4  # the first steps of a job also allocate memory and fill caches


@dataclass(frozen=True, kw_only=True)
class TraceValues:
    """One recorded job.

    Attributes
    ----------
    names, tensors, groups, dtypes, shapes
        What columns of `events` index: names of events, communicated gradients, process groups, element types ("float32"), and
        distinct shapes of ops' inputs. An input that is no tensor, or a tensor without dimensions, has the shape (); the tensors of
        a list follow each other.
    graph_of_rank
        Of each rank, which of `graphs` it ran: ranks that run the same graph share it.
    memory
        Where the recorder counted it.
    modules, module_calls
        Of PyTorch's DDP; none where they were not recorded.
    """

    meta: TraceMeta
    names: tuple[str, ...]
    events: Events
    steps: Steps
    tensors: tuple[TensorInfo, ...]
    graphs: tuple[NodeGraph, ...]
    graph_of_rank: tuple[int, ...]
    dependencies: Dependencies = field(default_factory=Dependencies.none)
    modules: tuple[ModuleInfo, ...] = ()
    module_calls: ModuleCalls = field(default_factory=ModuleCalls.none)
    groups: tuple[ProcessGroup, ...] = ()
    dtypes: tuple[str, ...] = ()
    shapes: tuple[Shapes, ...] = ()
    memory: MemorySamples = field(default_factory=MemorySamples.none)

    @property
    def horovod_settings(self) -> CommSettings:
        """Horovod's knobs; raises `InputError` for a trace of another kind."""
        if self.meta.settings is None:
            raise InputError(f"the trace ({self.meta.format}) is not of a Horovod job: its knobs are not known")
        return self.meta.settings

    def iterations_us(self, *, traced: bool = False) -> Floats:
        """Distances between the starts of consecutive steps on rank 0: the measured iterations, without the job's first steps.

        Iterations beside a start or a stop of the profiler are left out, for they hold its own work. MXNet's engine runs behind the
        script, and has nothing left to do after such a switch: there, the iteration after it is short, and left out as well.
        """
        rank_steps = self.steps.select(self.steps.rank == 0)
        kind = rank_steps.traced
        steady = (kind[:-1] == kind[1:]) & (kind[:-1] == traced) & (rank_steps.index[:-1] >= SETTLING_STEPS)
        if self.meta.framework == "mxnet":
            steady[1:] &= kind[:-2] == kind[1:-1]
        distances: Floats = np.diff(rank_steps.start_us)[steady]
        return distances
