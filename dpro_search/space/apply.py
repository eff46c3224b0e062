"""``apply(plan, graph, costs, cluster) -> HorovodJob``: the job as the plan would have it."""

from __future__ import annotations

import numpy as np

from dpro_search.collect.trace import CommSettings, Floats, Ints
from dpro_search.costmodel.horovod import CommCosts, at_cluster
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import DataflowGraph, RankProfile
from dpro_search.space.alike import alike
from dpro_search.space.cluster import ClusterSpec
from dpro_search.space.horovod_job import HorovodJob
from dpro_search.space.plan import Plan


def apply(
    plan: Plan,
    graph: DataflowGraph,
    costs: CommCosts,
    recorded: tuple[CommSettings, ClusterSpec],
    cluster: ClusterSpec | None = None,
) -> HorovodJob:
    """The job under a plan on a cluster (the recorded one if None).

    Ranks beyond the recorded ones behave like the recorded ones in turn; those that behave alike are one class.

    Raises
    ------
    InputError
        The plan names a tensor that the graph does not have.
    """
    settings, recorded_cluster = recorded
    cluster = cluster or recorded_cluster
    profile = np.arange(cluster.ranks) % graph.ranks
    classes = alike(profile, np.array(cluster.cores))
    profiles = [graph.profiles[number] for number in profile[classes.first_rank]]
    unit_of = _units(plan, settings, graph)
    units = int(unit_of.max()) + 1
    post = np.stack([_last_post(profile, unit_of, units) for profile in profiles], axis=1)
    # Between two steps the script runs on the same core: it is a part of the main stream that comes first.
    host = np.stack([profile.host_us for profile in profiles], axis=1)
    order = np.argsort(post, axis=2, kind="stable")
    listing = np.argsort(post.mean(axis=(0, 1)), kind="stable")  # Horovod lists units as they first came
    position = np.empty(units, dtype=np.int64)
    position[listing] = np.arange(units)
    sizes = np.array([tensor.size_bytes for tensor in graph.tensors], dtype=np.float64)
    release_class, release_work, release_ptr, release_unit = _releases(profiles, position[unit_of])
    exact = plan.tensor_groups is not None or (plan.fusion_threshold_bytes is None and settings.groups is not None)
    threshold = settings.fusion_threshold_bytes if plan.fusion_threshold_bytes is None else plan.fusion_threshold_bytes
    return HorovodJob(
        class_of_rank=classes.class_of_rank,
        core=classes.core,
        on_core=classes.on_core,
        main_us=np.stack([profile.main_us for profile in profiles], axis=1),
        host_us=host,
        post_us=np.take_along_axis(post, order, axis=2),
        post_order=position[order],
        unit_bytes=np.bincount(position[unit_of], weights=sizes, minlength=units).astype(np.float64),
        unit_tensors=np.bincount(position[unit_of], minlength=units),
        release_class=release_class,
        release_work_us=release_work,
        release_ptr=release_ptr,
        release_unit=release_unit,
        fusion_threshold_bytes=float(threshold),
        exact_groups=exact,
        cycle_us=settings.cycle_time_us if plan.cycle_time_us is None else plan.cycle_time_us,
        comm=at_cluster(
            costs,
            float(np.mean([profile.concurrency for profile in graph.profiles])),
            (recorded_cluster.rate_bps, recorded_cluster.ranks),
            (cluster.rate_bps, cluster.ranks),
        ),
    )


def _units(plan: Plan, settings: CommSettings, graph: DataflowGraph) -> Ints:
    """Unit of every tensor, [tensors], numbered from 0."""
    groups = plan.tensor_groups
    if groups is None and plan.fusion_threshold_bytes is None:
        groups = settings.groups
    if groups is None:
        return np.arange(len(graph.tensors))
    index = {tensor.name: i for i, tensor in enumerate(graph.tensors)}
    unit_of = np.full(len(graph.tensors), -1, dtype=np.int64)
    for number, group in enumerate(groups):
        for name in group:
            if name not in index:
                raise InputError(f"plan: the trace has no tensor '{name}' (its first is '{graph.tensors[0].name}')")
            unit_of[index[name]] = number
    alone = np.flatnonzero(unit_of < 0)
    unit_of[alone] = len(groups) + np.arange(len(alone))
    return unit_of


def _last_post(profile: RankProfile, unit_of: Ints, units: int) -> Floats:
    """Core time at which the last tensor of each unit is there, [samples, units]."""
    last = np.zeros((len(profile.main_us), units))
    for tensor, unit in enumerate(unit_of):
        last[:, unit] = np.maximum(last[:, unit], profile.post_us[:, tensor])
    return last


def _releases(profiles: list[RankProfile], unit_of: Ints) -> tuple[Ints, Floats, Ints, Ints]:
    """Update work of all classes by the units it waits for; work that waits for the same units is one release."""
    classes: list[int] = []
    works: list[Floats] = []
    ptr, waits = [0], list[int]()
    for number, profile in enumerate(profiles):
        merged: dict[tuple[int, ...], Floats] = {}
        for release in profile.releases:
            key = tuple(sorted(set(unit_of[list(release.tensors)].tolist())))
            merged[key] = merged.get(key, np.zeros(len(release.work_us))) + release.work_us
        for key, work in merged.items():
            classes.append(number)
            works.append(work)
            waits += key
            ptr.append(len(waits))
    return (
        np.array(classes, dtype=np.int64),
        np.stack(works, axis=1) if works else np.zeros((len(profiles[0].main_us), 0)),
        np.array(ptr, dtype=np.int64),
        np.array(waits, dtype=np.int64),
    )
