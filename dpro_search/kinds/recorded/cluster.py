"""Place where a profile was recorded, and predictor elsewhere: ``recorded_place(meta, asked)``, ``elsewhere(...)``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from dpro_search.cluster import Cluster, Device, bundled
from dpro_search.collect.trace import Trace, TraceMeta
from dpro_search.errors import InputError
from dpro_search.kinds.recorded.predictor import RecordedPrediction, RecordedPredictor
from dpro_search.space.recorded.cluster_change import Placed, Recorded, moved_ops
from dpro_search.space.scenario import ClusterChange, Scale


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """Predictors of a recorded job on another cluster."""

    place: Placed
    predictor: RecordedPredictor
    # low, high: With the durations at the ends of their 90 % intervals.
    low: RecordedPredictor
    high: RecordedPredictor
    assumed: tuple[str, ...]  # What was taken for granted, a sentence each.

    def interval_us(self, prediction: RecordedPrediction, scales: tuple[Scale, ...]) -> tuple[float, float]:
        """The interval of a prediction: the spread of steps, and the errors of the cost models."""
        below, above = prediction.iteration_us - prediction.interval_us[0], prediction.interval_us[1] - prediction.iteration_us
        low_us, high_us = (one.predict(scales).iteration_us for one in (self.low, self.high))
        below = math.hypot(below, max(prediction.iteration_us - low_us, 0.0))
        above = math.hypot(above, max(high_us - prediction.iteration_us, 0.0))
        return max(prediction.iteration_us - below, 0.0), prediction.iteration_us + above


def elsewhere(trace: Trace, predictor: RecordedPredictor, change: ClusterChange) -> Elsewhere:
    """A recorded job under a change of its cluster.

    Raises
    ------
    InputError
        The recorded cluster is not known, the ranks do not fit, or the change is of processors.
    """
    if change.cores is not None:
        raise InputError(f"cores={change.cores}: the trace is of GPUs; leave cores out")
    if change.machines is not None and not change.on_gpus:
        raise InputError(f"{change.machines.name} has no GPUs: a profile of kernels says nothing of processors")
    if not predictor.has_launches:
        raise InputError(f"the trace ({trace.meta.format}) has no kernels with launches: no other cluster can be predicted from it")
    recorded, source = recorded_place(trace.meta, change.recorded_on, needed=change.machines is None)
    ranks = change.ranks
    if change.machines is None:
        assert recorded.cluster is not None, "needed"
        ranks = recorded.ranks if ranks is None else ranks
        target = _with_ranks(recorded.cluster, ranks)
    else:
        target = change.machines
    if change.rate_bps is not None:
        target = target.at_nic_rate(None if math.isinf(change.rate_bps) else change.rate_bps, "given as rate=")
    place = Placed(cluster=target, ranks=target.ranks if ranks is None else ranks)
    ops = moved_ops(trace, predictor.ops, recorded, place)
    return Elsewhere(
        place=place,
        predictor=predictor.with_ops(ops.middle),
        low=predictor.with_ops(ops.low),
        high=predictor.with_ops(ops.high),
        assumed=(source, *ops.assumed),
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
