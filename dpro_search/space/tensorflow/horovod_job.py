"""`HorovodJob`: what the machine of `replay/horovod` eats. Arrays only; times in microseconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.collectives.horovod import CommCosts

LONGEST_US = 1e12  # of any core time and of a replay: eleven days, of which float64 holds a thousandth of a microsecond


@dataclass(frozen=True, kw_only=True)
class HorovodJob:
    """A job under one plan on one cluster.

    A *unit* is what is enqueued and negotiated as a whole: a tensor, or an exact group. A *class* is a set of ranks that behave
    alike (see `space/rank_classes.py`).
    """

    class_of_rank: Ints  # Class of each rank, [ranks]; classes are numbered by their first rank.
    # core, on_core: Core of each class, numbered from 0, and how many of its ranks are on each of its cores, [classes].
    core: Ints
    on_core: Ints
    # main_us, host_us: Core time of the compute thread and of the script between two steps, [samples, classes].
    main_us: Floats
    host_us: Floats
    post_us: Floats  # Main core time used up when a rank enqueues a unit, ascending in `post_order`, [samples, classes, units].
    post_order: Ints  # Units in the order in which each rank enqueues them, [samples, classes, units].
    # unit_bytes, unit_tensors: Size and number of tensors, [units]. Units are in the order in which Horovod lists them within a
    # cycle.
    unit_bytes: Floats
    unit_tensors: Ints
    # release_class, release_work_us, release_ptr, release_unit: Update work: class [releases], core time [samples, releases], and
    # the units that it waits for in CSR form.
    release_class: Ints
    release_work_us: Floats
    release_ptr: Ints
    release_unit: Ints
    # fusion_threshold_bytes, exact_groups, cycle_us: Horovod's knobs; exact groups do not fuse with anything.
    fusion_threshold_bytes: float
    exact_groups: bool
    cycle_us: float
    comm: CommCosts  # What communication costs on this cluster.
    # ratio_from_bytes, ratio: What all-reduces of at least so many bytes take over that, ascending from 0, [ranges] each.
    ratio_from_bytes: Floats = field(default_factory=lambda: np.zeros(1))
    ratio: Floats = field(default_factory=lambda: np.ones(1))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.class_of_rank)

    @property
    def classes(self) -> int:
        """Number of classes of ranks."""
        return len(self.core)

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self.unit_bytes)

    @property
    def samples(self) -> int:
        """Number of recorded steps whose durations are kept."""
        return len(self.main_us)
