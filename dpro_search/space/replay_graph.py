"""`ReplayGraph`: what the simulator eats. Arrays only; times in microseconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.horovod import CommCosts


@dataclass(frozen=True, kw_only=True)
class ReplayGraph:
    """A job under one plan on one cluster. A *unit* is what is posted and negotiated as a whole: a tensor, or an exact group.

    Attributes
    ----------
    core
        Core of each rank, numbered from 0, [ranks].
    main_us, host_us
        Core time of the main stream and of the script between two steps, [samples, ranks].
    post_us
        Main core time used up when a rank posts a unit, ascending in `post_order`, [samples, ranks, units].
    post_order
        Units in the order in which each rank posts them, [samples, ranks, units].
    unit_bytes, unit_tensors
        Size and number of tensors, [units]. Units are in the order in which Horovod lists them within a cycle.
    release_rank, release_work_us, release_ptr, release_unit
        Update work: rank [releases], core time [samples, releases], and the units that it waits for in CSR form.
    fusion_threshold_bytes, exact_groups, cycle_us
        Horovod's knobs; exact groups do not fuse with anything.
    comm
        What communication costs on this cluster.
    """

    core: Ints
    main_us: Floats
    host_us: Floats
    post_us: Floats
    post_order: Ints
    unit_bytes: Floats
    unit_tensors: Ints
    release_rank: Ints
    release_work_us: Floats
    release_ptr: Ints
    release_unit: Ints
    fusion_threshold_bytes: float
    exact_groups: bool
    cycle_us: float
    comm: CommCosts

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.core)

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self.unit_bytes)

    @property
    def samples(self) -> int:
        """Number of recorded steps whose durations are kept."""
        return len(self.main_us)
