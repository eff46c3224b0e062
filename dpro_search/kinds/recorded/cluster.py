"""Recorded steps on a cluster, in another precision, without a profiler: ``steps_on(recorded, change, unprofiled_us, precision)``.

A profiler notes each op, launch and shape on the thread that it profiles, so that host-bound jobs take 1.2 to 2.2 times as long in
their profiles (experiments/validation/gpu_jobs.md), while kernels take as long as ever. One number that any script measures, the
step without the profiler, tells by how much: the work of host threads is scaled alike until the replay takes that long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np

from dpro_search.cluster import Cluster, Device, bundled
from dpro_search.collect.trace import TraceMeta
from dpro_search.errors import InputError
from dpro_search.kinds.recorded.replay import RecordedReplay
from dpro_search.kinds.recorded.steps import RecordedSteps
from dpro_search.quantities import time_text
from dpro_search.space.recorded.cluster_change import Placed, Recorded, moved_ops
from dpro_search.space.recorded.precision_change import precision_change
from dpro_search.space.scenario import ClusterChange

_ALIKE = 0.03
"""Tolerance between a step and its replay for other reasons than the profiler's work on the host (empirical: kernels of GPU-bound
jobs took up to 2 % longer in their profiles)."""
_PRECISION = 0.002  # of the factor


@dataclass(frozen=True, kw_only=True)
class StepsOnCluster:
    """Recorded steps as they would run on a cluster."""

    steps: RecordedSteps
    moved_to: Placed | None = None  # Another cluster; None: the recorded one.
    # With the durations at the low and high ends of their 90 % intervals; None: as they were measured.
    model_ends: tuple[RecordedSteps, RecordedSteps] | None = None
    assumed: tuple[str, ...] = ()  # Assumptions, a sentence each.
    # A step without the profiler, and the ratio of the host threads' time in it to that in the profile; None: as in the profile.
    unprofiled_us: float | None = None
    host_factor: float = 1.0
    precision: str | None = None  # None: as recorded.

    @cached_property
    def place(self) -> Placed | None:
        """The cluster; None: it is not known."""
        if self.moved_to is not None:
            return self.moved_to
        recorded, _ = self._recorded_place
        return None if recorded.cluster is None else Placed(cluster=recorded.cluster, ranks=recorded.ranks)

    @property
    def device(self) -> Device | None:
        """The GPU of the first rank; None: it is not known."""
        return self._recorded_place[0].known_device if self.moved_to is None else self.moved_to.cluster.devices[0]

    @property
    def recorded_on(self) -> str:
        """A sentence that says how the recorded cluster is known, or why it is not."""
        return self._recorded_place[1]

    @cached_property
    def _recorded_place(self) -> tuple[Recorded, str]:
        return recorded_place(self.steps.trace.meta, needed=False)


def steps_on(
    recorded: RecordedSteps, change: ClusterChange, unprofiled_us: float | None = None, precision: str | None = None
) -> StepsOnCluster:
    """The steps of a recording under a change of its cluster, and then of the precision.

    Parameters
    ----------
    unprofiled_us
        A step of the same job, measured without a profiler; None: host threads are as slow as in the profile.
    precision
        One of `precision_change.TARGETS`; None: as recorded.

    Raises
    ------
    InputError
        The recorded cluster is not known, the ranks do not fit, the change is of processors, no work of the host could make a step
        that long, or the GPU or the recorded precision is not known.
    """
    on_cluster = _steps_on_cluster(recorded, change, unprofiled_us)
    return on_cluster if precision is None else _in_precision(on_cluster, precision)


def _in_precision(on_cluster: StepsOnCluster, precision: str) -> StepsOnCluster:
    """Steps on a cluster in another precision."""
    steps, device = on_cluster.steps, on_cluster.device
    if not steps.has_launches:
        raise InputError(f"precision={precision}: the trace ({steps.trace.meta.format}) has no kernels with launches")
    if device is None:
        raise InputError(
            f"precision={precision}: the trace does not say on what GPUs it was recorded, or no device file describes them; "
            "name the machine: --set recorded_on=hgx-h100, or a file"
        )
    change = precision_change(steps.trace, steps.ops, device, precision)
    ends = (steps, *((steps, steps) if on_cluster.model_ends is None else on_cluster.model_ends))
    middle, low, high = map(steps.with_ops, change.applied([one.ops for one in ends]))
    return replace(
        on_cluster, steps=middle, model_ends=(low, high), assumed=(*on_cluster.assumed, *change.assumed), precision=precision
    )


def _steps_on_cluster(recorded: RecordedSteps, change: ClusterChange, unprofiled_us: float | None) -> StepsOnCluster:
    """The steps of a recording under a change of its cluster."""
    steps, host_factor = (recorded, 1.0) if unprofiled_us is None else without_profiler(recorded, unprofiled_us)
    if change == ClusterChange():
        return StepsOnCluster(steps=steps, unprofiled_us=unprofiled_us, host_factor=host_factor)
    meta = recorded.trace.meta
    if change.cores is not None:
        raise InputError(f"cores={change.cores}: the trace is of GPUs; leave cores out")
    if change.machines is not None and not change.on_gpus:
        raise InputError(f"{change.machines.name} has no GPUs: a profile of kernels says nothing of processors")
    if not recorded.has_launches:
        raise InputError(f"the trace ({meta.format}) has no kernels with launches: no other cluster can be predicted from it")
    origin, how = recorded_place(meta, change.recorded_on, needed=change.machines is None)
    ranks = change.ranks
    if change.machines is None:
        assert origin.cluster is not None, "needed"
        ranks = origin.ranks if ranks is None else ranks
        target = _with_ranks(origin.cluster, ranks)
    else:
        target = change.machines
    if change.rate_bps is not None:
        target = target.at_nic_rate(None if math.isinf(change.rate_bps) else change.rate_bps, "given as rate=")
    place = Placed(cluster=target, ranks=target.ranks if ranks is None else ranks)
    ops = moved_ops(recorded.trace, steps.ops, origin, place)
    return StepsOnCluster(
        steps=steps.with_ops(ops.middle),
        moved_to=place,
        model_ends=(steps.with_ops(ops.low), steps.with_ops(ops.high)),
        assumed=(how, *ops.assumed),
        unprofiled_us=unprofiled_us,
        host_factor=host_factor,
    )


def recorded_place(meta: TraceMeta, given: Cluster | None = None, *, needed: bool = True) -> tuple[Recorded, str]:
    """The place where all ranks of a recorded job ran, with a sentence that says how that is known.

    Ranks fill hosts in their order. The machine is the one that their GPUs usually are part of, unless one is given.

    Raises
    ------
    InputError
        It is needed, and the GPUs were not recorded, or are of no bundled machine: the option that names one is shown.
    """
    ranks = max(meta.world_size or 0, meta.ranks)
    machine, why = (given, "") if given is not None else _usual_machine(meta)
    if machine is None:
        if needed:
            raise InputError(f"the trace {why}; name the machine: --set recorded_on=hgx-h100, or a file")
        device = _device(meta)
        links = (
            "" if device is None else f"; its kernels are scaled from the data sheet of {device.name}, its transfers are predicted"
        )
        return Recorded(cluster=None, ranks=ranks, device=device), f"the trace {why}{links}; recorded_on=MACHINE names the machine"
    hosts = len(set(meta.hosts))
    devices = machine.ranks_per_host
    if len(meta.hosts) == ranks and hosts > 1 and ranks % hosts == 0 and devices is not None and ranks // hosts < devices:
        group = machine.groups[0]
        part = msgspec.structs.replace(group, host=group.host.with_devices(ranks // hosts))
        machine = msgspec.structs.replace(machine, groups=(part,))
    place = Recorded(cluster=_with_ranks(machine, ranks), ranks=ranks)
    if given is not None:
        return place, f"the job was recorded on {given.name}, as given"
    return (
        place,
        f"the job was recorded on {machine.name}, going by its GPUs ({meta.devices[0]}); recorded_on=MACHINE names another",
    )


def _usual_machine(meta: TraceMeta) -> tuple[Cluster | None, str]:
    """The machine that a trace's GPUs usually are part of, or why it is not known."""
    names = sorted(set(meta.devices))
    if not names:
        return None, "does not say on what GPUs it was recorded"
    name = bundled.aliases("device").get(bundled.plain(names[0])) if len(names) == 1 else None
    machine = None if name is None else bundled.usual_machine(name)
    if machine is None:
        return None, f"was recorded on {', '.join(names)}, of which no machine is known"
    return bundled.machine(machine), ""


def _device(meta: TraceMeta) -> Device | None:
    """The bundled GPU that a trace was recorded on; None: it is of several kinds, or not known."""
    names = sorted(set(meta.devices))
    name = bundled.aliases("device").get(bundled.plain(names[0])) if len(names) == 1 else None
    return None if name is None else bundled.device(name)


def _with_ranks(machine: Cluster, ranks: int) -> Cluster:
    """The machine, as often as the ranks need it."""
    if ranks <= machine.ranks:
        return machine
    if machine.ranks_per_host is None:
        raise InputError(f"{ranks} ranks do not fit on {machine.name}: it has {machine.ranks} devices")
    return machine.with_hosts(-(-ranks // machine.ranks_per_host))


def without_profiler(recorded: RecordedSteps, step_us: float) -> tuple[RecordedSteps, float]:
    """The recorded steps with the work of host threads scaled, and by what.

    Parameters
    ----------
    step_us
        A step of the same job, measured without a profiler.

    Raises
    ------
    InputError
        The step is as short as no work of the host could make it, or longer than its profile, or the trace has no such work.
    """
    recorded_us = RecordedReplay(steps=recorded).iteration_us
    setting = f"measured={time_text(step_us)}"
    if not recorded.categories.host.any():
        raise InputError(f"{setting}: the trace shows no work of host threads that kernels wait for; there is nothing to scale")
    if step_us > recorded_us * (1 + _ALIKE):
        raise InputError(
            f"{setting}: the profiled step takes {time_text(recorded_us)}, and no profiler makes a step shorter; "
            "is it the same job?"
        )
    if step_us >= recorded_us * (1 - _ALIKE):
        return recorded, 1.0
    least_us = RecordedReplay(steps=_at_host_speed(recorded, 0.0)).iteration_us
    if step_us < least_us * (1 - _ALIKE):
        raise InputError(f"{setting}: kernels alone take {time_text(least_us)} in the profile; is it the same job?")
    low, high = 0.0, 1.0
    while high - low > _PRECISION:
        middle = (low + high) / 2
        is_slower = RecordedReplay(steps=_at_host_speed(recorded, middle)).iteration_us > step_us
        low, high = (low, middle) if is_slower else (middle, high)
    return _at_host_speed(recorded, high), high


def _at_host_speed(recorded: RecordedSteps, factor: float) -> RecordedSteps:
    ops = recorded.ops
    by = np.where(recorded.categories.host, factor, 1.0)
    return recorded.with_ops(replace(ops, duration_us=ops.duration_us * by, loading_us=ops.loading_us * by))
