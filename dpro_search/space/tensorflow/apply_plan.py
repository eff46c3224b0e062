"""``apply(plan, graph, costs, cluster) -> HorovodJob``: the job as the plan would have it; `HorovodJobs` for many plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dpro_search.collect.trace import CommSettings, Floats, Ints
from dpro_search.costmodel.collectives.horovod import CommCosts, at_cluster
from dpro_search.errors import GraphError, InputError
from dpro_search.graph.dataflow import DataflowGraph, RankProfile
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.plan import Plan
from dpro_search.space.rank_classes import alike
from dpro_search.space.schemes import HorovodSettings
from dpro_search.space.tensorflow.horovod_job import LONGEST_US, HorovodJob
from dpro_search.space.tensorflow.tensor_units import enqueues_of_units, releases_of_units

if TYPE_CHECKING:
    from dpro_search.costmodel.collectives.all_reduce_choice import AllReduceChoice


def apply(
    plan: Plan,
    graph: DataflowGraph,
    costs: CommCosts,
    recorded: tuple[CommSettings, ClusterSpec],
    cluster: ClusterSpec | None = None,
) -> HorovodJob:
    """The job under a plan on a cluster (the recorded one if None).

    Ranks beyond the recorded ones repeat the recorded ones round-robin; those that behave alike are one class.

    Raises
    ------
    InputError
        The plan names a tensor that the graph does not have.
    """
    return HorovodJobs(graph, costs, recorded, cluster).under(plan)


class HorovodJobs:
    """The jobs that plans make of one recorded step on one cluster: what does not depend on the plan is prepared once.

    What a plan changes is the unit of each tensor, an array of numbers; all that follows from it is compiled (`units.py`).

    Parameters
    ----------
    choice
        What all-reduces by other algorithms take on the cluster; None: plans that name algorithms are refused.

    Raises
    ------
    GraphError
        A core time is negative, not finite or longer than `LONGEST_US`.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        costs: CommCosts,
        recorded: tuple[CommSettings, ClusterSpec],
        cluster: ClusterSpec | None = None,
        choice: AllReduceChoice | None = None,
    ) -> None:
        self._settings, recorded_cluster = recorded
        cluster = cluster or recorded_cluster
        self._choice = choice
        profile = np.arange(cluster.ranks) % graph.ranks
        self._classes = alike(profile, np.array(cluster.cores))
        profiles = [graph.profiles[number] for number in profile[self._classes.first_rank]]
        self._tensors = graph.tensors
        self._number = {tensor.name: number for number, tensor in enumerate(graph.tensors)}
        self._bytes = np.array([tensor.size_bytes for tensor in graph.tensors], dtype=np.float64)
        self._main_us = np.stack([profile.main_us for profile in profiles], axis=1)
        # Between two steps the script runs on the same core: it is the first part of the compute thread's work.
        self._host_us = np.stack([profile.host_us for profile in profiles], axis=1)
        self._post_us = np.ascontiguousarray(np.stack([profile.post_us for profile in profiles], axis=1), dtype=np.float64)
        self._releases = _releases(profiles, len(graph.tensors))
        for name, core_us in (("compute", self._main_us), ("script", self._host_us), ("update", self._releases[1])):
            if not np.all((core_us >= 0) & (core_us <= LONGEST_US)):
                raise GraphError(f"a recorded step has a core time ({name}) that is no duration; record the job again")
        self._comm = at_cluster(
            costs,
            float(np.mean([profile.concurrency for profile in graph.profiles])),
            (recorded_cluster.rate_bps, recorded_cluster.ranks),
            (cluster.rate_bps, cluster.ranks),
        )

    def under(self, plan: Plan) -> HorovodJob:
        """The job under a plan; raises `InputError` if the plan names a tensor that the graph does not have."""
        settings = self._settings
        unit_of = self._units(plan)
        units = int(unit_of.max()) + 1
        post_us, post_order, number = enqueues_of_units(self._post_us, unit_of, units)
        unit_of = number[unit_of]
        owner, work_us, ptr, unit = releases_of_units(*self._releases, unit_of, len(self._classes.core), units)
        planned = HorovodSettings.of(plan)
        exact = plan.tensor_groups is not None or (planned.fusion_threshold_bytes is None and settings.groups is not None)
        threshold = settings.fusion_threshold_bytes if planned.fusion_threshold_bytes is None else planned.fusion_threshold_bytes
        slower: dict[str, Floats] = {}
        if planned.allreduce_algorithms is not None:
            if self._choice is None:
                raise InputError("plan: allreduce_algorithms: nothing is known of what other algorithms take")
            slower = dict(zip(("ratio_from_bytes", "ratio"), self._choice.ratios(planned.allreduce_algorithms), strict=True))
        return HorovodJob(
            class_of_rank=self._classes.class_of_rank,
            core=self._classes.core,
            on_core=self._classes.on_core,
            main_us=self._main_us,
            host_us=self._host_us,
            post_us=post_us,
            post_order=post_order,
            unit_bytes=np.bincount(unit_of, weights=self._bytes, minlength=units).astype(np.float64),
            unit_tensors=np.bincount(unit_of, minlength=units),
            release_class=owner,
            release_work_us=work_us,
            release_ptr=ptr,
            release_unit=unit,
            fusion_threshold_bytes=float(threshold),
            exact_groups=exact,
            cycle_us=settings.cycle_time_us if planned.cycle_time_us is None else planned.cycle_time_us,
            comm=self._comm,
            **slower,
        )

    def _units(self, plan: Plan) -> Ints:
        """Unit of every tensor, [tensors], numbered from 0."""
        groups = plan.tensor_groups
        if groups is None and HorovodSettings.of(plan).fusion_threshold_bytes is None:
            groups = self._settings.groups
        if groups is None:
            return np.arange(len(self._tensors))
        unit_of = [-1] * len(self._tensors)
        for unit, group in enumerate(groups):
            for name in group:
                tensor = self._number.get(name)
                if tensor is None:
                    raise InputError(f"plan: the trace has no tensor '{name}' (its first is '{self._tensors[0].name}')")
                unit_of[tensor] = unit
        units = np.array(unit_of, dtype=np.int64)
        alone = np.flatnonzero(units < 0)
        units[alone] = len(groups) + np.arange(len(alone))
        return units


def _releases(profiles: list[RankProfile], tensors: int) -> tuple[Ints, Floats, Ints, Ints]:
    """Releases of all classes: class, core time [samples, releases], and the tensors waited for, CSR; equal waits are one.

    Tensors whose update took no time have a release without work: a step ends no earlier than its all-reduces.
    """
    merged: dict[tuple[int, tuple[int, ...]], Floats] = {}
    for number, profile in enumerate(profiles):
        for release in profile.releases:
            key = number, tuple(sorted(set(release.tensors)))
            merged[key] = merged.get(key, np.zeros(len(release.work_us))) + release.work_us
        awaited = {tensor for release in profile.releases for tensor in release.tensors}
        merged |= {(number, (tensor,)): np.zeros(len(profile.main_us)) for tensor in range(tensors) if tensor not in awaited}
    samples = len(profiles[0].main_us)
    return (
        np.array([number for number, _ in merged], dtype=np.int64),
        np.ascontiguousarray(np.stack(list(merged.values()), axis=1)) if merged else np.zeros((samples, 0)),
        np.cumsum([0, *(len(tensors) for _, tensors in merged)]),
        np.array([tensor for _, tensors in merged for tensor in tensors], dtype=np.int64),
    )
