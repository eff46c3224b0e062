"""Recorded ops on other GPUs and links: ``moved_ops(trace, ops, recorded, target)``.

The graph stays as it was recorded. Transfers take the time that was measured times model(target) / model(recorded), of the cost
model of NCCL's collectives (`costmodel.collectives.nccl`), so that what a trace shows of its own machine stays. Kernels take
their time times the ratio of what their op is predicted to take on both devices (`costmodel.devices.ratios`) where its shapes were
recorded, else that of the devices' peaks (`costmodel.roofline`). Host threads, launches and copies take what they took.

Where the recorded links are not known, transfers take model(target). Where the recorded GPU is not known either, kernels take what
they took, and the interval holds for any of the bundled GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dpro_search.cluster import Cluster, Device, bundled
from dpro_search.collect.trace import CollectiveKind, EventKind, Floats, Ints, Trace
from dpro_search.costmodel.collectives.nccl import bytes_in, collective_us, interval_factor, paths, placement_of
from dpro_search.costmodel.devices import OpSpec
from dpro_search.costmodel.devices.ratios import KernelPredictor, OpLatency, known_gpus
from dpro_search.costmodel.devices.recorded import RecordedSpecs
from dpro_search.costmodel.roofline import dtype_of_kernel
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.space.recorded.ops import RecordedOps

_NAMES = {
    CollectiveKind.ALL_REDUCE: "all_reduce",
    CollectiveKind.ALL_GATHER: "all_gather",
    CollectiveKind.REDUCE_SCATTER: "reduce_scatter",
    CollectiveKind.BROADCAST: "broadcast",
    CollectiveKind.REDUCE: "reduce",
    CollectiveKind.ALL_TO_ALL: "all_to_all",
    CollectiveKind.SEND: "send_recv",
    CollectiveKind.RECV: "send_recv",
    CollectiveKind.BARRIER: "all_reduce",
    CollectiveKind.GATHER: "reduce",
    CollectiveKind.SCATTER: "broadcast",
}
_NEARLY_ALL = 0.995


@dataclass(frozen=True, kw_only=True)
class Placed:
    """So many ranks on the first devices of a cluster, in order."""

    cluster: Cluster
    ranks: int

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= self.cluster.ranks:
            raise InputError(f"{self.ranks} ranks do not fit on {self.cluster.name}: it has {self.cluster.ranks} devices")


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The cluster on which a job was recorded, with the ranks of which there is no profile.

    Attributes
    ----------
    cluster
        None: it is not known.
    device
        The GPU, which may be known where the cluster is not; None: it is that of the cluster, or not known.
    """

    cluster: Cluster | None
    ranks: int
    device: Device | None = None

    @property
    def known_device(self) -> Device | None:
        """The GPU that a profile was recorded on."""
        return self.cluster.devices[0] if self.device is None and self.cluster is not None else self.device


@dataclass(frozen=True, kw_only=True)
class MovedOps:
    """Ops with the durations of another cluster."""

    middle: RecordedOps
    # low, high: The ends of a 90 % interval, all durations at once.
    low: RecordedOps
    high: RecordedOps
    assumed: tuple[str, ...]  # Assumptions, a sentence each.


def moved_ops(trace: Trace, ops: RecordedOps, recorded: Recorded, target: Placed) -> MovedOps:
    """Recorded ops as they would run elsewhere.

    Raises
    ------
    InputError
        A group of ranks does not fit on the target, a device's rates are not known, or neither the recorded cluster nor the size
        of a collective is.
    """
    assumed: list[str] = []
    # Idle time of the stream stays, with the op that follows it; unknown time is an op of its own.
    fixed_us = np.where(ops.kind == OpKind.UNKNOWN, 0.0, np.minimum(ops.unexplained_us, ops.duration_us))
    recorded_us = ops.duration_us - fixed_us
    moved_us = np.tile(recorded_us, (3, 1))
    _kernels(trace, ops, recorded_us, recorded, target, moved_us, assumed)
    _transfers(trace, ops, recorded_us, recorded, target, moved_us, assumed)
    _unknown(ops, recorded_us, moved_us, assumed)
    if target.ranks > recorded.ranks:
        assumed.append(f"{target.ranks} ranks compute like the {trace.meta.ranks} recorded ones")
    middle, low, high = (
        replace(ops, duration_us=np.where(us == recorded_us, ops.duration_us, us + np.where(us > 0, fixed_us, 0.0)))
        for us in moved_us
    )
    return MovedOps(middle=middle, low=low, high=high, assumed=tuple(assumed))


def _kernels(
    trace: Trace, ops: RecordedOps, recorded_us: Floats, recorded: Recorded, target: Placed, moved_us: Floats, assumed: list[str]
) -> None:
    """Sets the durations of kernels: middle, low, high."""
    before, after = recorded.known_device, target.cluster.devices[0]
    if before == after:
        return
    events = trace.events
    kernels = np.flatnonzero((ops.event >= 0) & (events.kind[ops.event] == EventKind.KERNEL))
    columns = (events.name, events.dtype, events.op, events.shapes)
    described = np.stack([column[ops.event[kernels]].astype(np.int64) for column in columns])
    kinds, place = np.unique(described, axis=1, return_inverse=True)
    order = np.argsort(place.reshape(-1), kind="stable")
    starts = np.searchsorted(place.reshape(-1)[order], np.arange(kinds.shape[1] + 1))
    specs = _specs(trace, kinds)
    latency = OpLatency(before, after)
    latency.ratios(spec for spec in specs if spec is not None)  # all at once
    predicted_us = dict.fromkeys(KernelPredictor, 0.0)
    for number, (name, dtype, _, _) in enumerate(kinds.T.tolist()):
        of_kind = kernels[order[starts[number] : starts[number + 1]]]
        element = trace.dtypes[dtype] if dtype >= 0 else ""
        moved_us[:, of_kind], predictor = latency.kernel_us(trace.names[name], element, specs[number], recorded_us[of_kind])
        predicted_us[predictor] += float(recorded_us[of_kind].sum())
    if before is None:
        assumed.append(
            "kernels, host threads, launches and copies take as long as recorded, because the recorded GPU is not known; the "
            f"interval holds for any of the {len(known_gpus())} bundled GPUs, and recorded_on=MACHINE narrows it"
        )
        return
    whole_us = max(float(recorded_us[kernels].sum()), 1e-9)
    by_op, by_similar_op = (predicted_us[predictor] / whole_us for predictor in (KernelPredictor.OP, KernelPredictor.SIMILAR_OP))
    assumed += _said_of_kernels(before.name, after.name, by_op, by_similar_op)
    assumed.append("host threads, launches and copies between host and device take as long as recorded")


def _unknown(ops: RecordedOps, recorded_us: Floats, moved_us: Floats, assumed: list[str]) -> None:
    """Sets the ends of time that nothing in the recording explains: it may stay, or change like any op whose kind is known."""
    unknown = (ops.kind == OpKind.UNKNOWN) & (recorded_us > 0)
    known = (ops.kind != OpKind.UNKNOWN) & (recorded_us > 0)
    if not unknown.any() or not known.any():
        return
    least, most = (moved_us[row, known] / recorded_us[known] for row in (1, 2))
    moved_us[1, unknown], moved_us[2, unknown] = (
        recorded_us[unknown] * min(1.0, least.min()),
        recorded_us[unknown] * max(1.0, most.max()),
    )
    assumed.append(
        "time that nothing in the recording explains takes as long as recorded; the interval also holds if it changes as much as "
        "any other op"
    )


def _said_of_kernels(before: str, after: str, predicted: float, guessed: float) -> Iterator[str]:
    """Factors of the parts of the kernels' time, and of the rest of it."""
    if predicted:
        yield (
            f"GEMMs, convolutions and norms whose shapes were recorded ({predicted * 100:.0f} % of the kernels' time) are scaled "
            f"by the ratio of their predicted latencies on {before} and {after}"
        )
    if guessed:
        yield (
            f"GEMMs and attention whose shapes were not recorded, or that are hardly longer than their launch "
            f"({guessed * 100:.0f} % of the kernels' time), are scaled like square GEMMs, and like attention over one sequence, "
            f"that take as long on {before}; a profile with record_shapes=True narrows the interval"
        )
    if predicted + guessed < _NEARLY_ALL:
        yield (
            f"{'other kernels' if predicted or guessed else 'kernels'} are scaled by the ratio of the data sheets of {before} and "
            f"{after}: of peak FLOP/s for GEMMs, convolutions and attention, of memory rates for all others; their interval is an "
            "estimate, which a profile with record_shapes=True narrows"
        )


def _specs(trace: Trace, kinds: Ints) -> list[OpSpec | None]:
    """Ops behind classes of kernels, (name, element type, op, shapes) [4, n]; None where the shapes were not recorded."""
    recorded = RecordedSpecs(trace)
    specs: list[OpSpec | None] = []
    for name, dtype, op, shapes in kinds.T.tolist():
        element = trace.dtypes[dtype] if dtype >= 0 else ""
        shaped = op >= 0 and shapes >= 0
        specs.append(recorded.of(trace.names[op], shapes, element or dtype_of_kernel(trace.names[name])) if shaped else None)
    return specs


def _one_device(cluster: Cluster) -> str:
    """The option that predicts a recording of one device on a device of a cluster."""
    device = cluster.groups[0].host.device.name
    known = next((name for name in bundled.names("device") if bundled.device(name).name == device), None)
    names = [alias for alias, name in bundled.aliases("device").items() if name == known]
    return f"--cluster {min(names, key=len)}" if names else "--set ranks=1"


def _transfers(
    trace: Trace, ops: RecordedOps, recorded_us: Floats, recorded: Recorded, target: Placed, moved_us: Floats, assumed: list[str]
) -> None:
    """Sets the durations of collectives: middle, low, high."""
    events = trace.events
    parts = np.flatnonzero((ops.event >= 0) & (events.kind[ops.event] == EventKind.COLLECTIVE))
    if not len(parts):
        if target.ranks != recorded.ranks:
            raise InputError(
                f"ranks={target.ranks} on {target.cluster.name}: the trace has no collective, so that how more ranks than "
                f"{recorded.ranks} would communicate is not known; {_one_device(target.cluster)} predicts it on one device"
            )
        return
    groups = _MovedGroups(trace, recorded, target)
    transfer_us, alone = _transfer_us(ops, parts, recorded_us)
    alike: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for number, part in enumerate(parts.tolist()):
        event = int(ops.event[part])
        kind = CollectiveKind(int(events.collective_kind[event]))
        was, becomes = groups.of(event)
        groups.unknown_kinds += kind not in _NAMES
        alike.setdefault((_NAMES.get(kind, "all_reduce"), was, becomes), []).append(number)
    unsized = 0
    for (collective, was, becomes), numbers in alike.items():
        group = np.array(numbers)
        if len(becomes) == 1:  # there is no other rank to wait for either
            moved_us[:, parts[group]] = 0.0
            continue
        model = _Model(collective, recorded.cluster, was, target.cluster, becomes)
        if model.same:
            continue
        size = events.size_bytes[ops.event[parts[group]]].astype(np.float64)
        unsized += int((size <= 0).sum())
        before_us, after_us, width = model.times_us(size, transfer_us[group])
        waits_us = recorded_us[parts[group]] - transfer_us[group]
        # Where other ranks were not recorded, what exceeds the model may be waiting for them as well.
        surely_us = np.where(alone[group], np.minimum(transfer_us[group], before_us), transfer_us[group])
        ends = [
            recorded_us[parts[group]] - moved + moved * after_us / before_us * by
            for by in (width, 1 / width)
            for moved in (transfer_us[group], surely_us)
        ]
        moved_us[0, parts[group]] = waits_us + transfer_us[group] * after_us / before_us
        moved_us[1, parts[group]] = np.minimum(np.min(ends, axis=0), moved_us[0, parts[group]])
        moved_us[2, parts[group]] = np.maximum(np.max(ends, axis=0), moved_us[0, parts[group]])
    if alone.any():
        assumed.append(
            "of collectives whose other ranks were not recorded, the shortest recorded time of each is taken as the transfer, "
            "the rest as waiting, which stays"
        )
    if unsized:
        assumed.append(f"the sizes of {unsized} collectives were not recorded: they are taken from their transfer times")
    assumed.extend(groups.sentences())


def _transfer_us(ops: RecordedOps, parts: Ints, recorded_us: Floats) -> tuple[Floats, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """Time of each part of a collective without waiting, and whether other ranks' parts are missing, [parts] each."""
    alone = ops.collective[parts] < 0
    shortest: dict[int, float] = {}
    for part in parts[alone].tolist():
        key = int(ops.key[part])
        shortest[key] = min(shortest.get(key, math.inf), float(recorded_us[part]))
    least_us = np.array([shortest.get(int(ops.key[part]), math.inf) for part in parts.tolist()])
    return np.where(alone, least_us, recorded_us[parts]), alone


class _Model:
    """Times of collectives of one class among their ranks, on the recorded and on the other cluster."""

    def __init__(
        self, name: str, recorded: Cluster | None, was: tuple[int, ...], target: Cluster, becomes: tuple[int, ...]
    ) -> None:
        self._name, self._recorded, self._target = name, recorded, target
        self._there = placement_of(target, becomes)
        self._domains = [paths(target, self._there).domains]
        self.same = False
        if recorded is not None:
            self._here = placement_of(recorded, was)
            before = paths(recorded, self._here)
            self._domains.append(before.domains)
            self.same = before == paths(target, self._there)
        if len(was) == 1 and not self.same:
            raise InputError(
                f"{target.name}: the trace's process group has one rank and exchanges nothing, so that what it would take among "
                f"more is not known; {_one_device(target)} predicts it on one device"
            )

    def times_us(self, size: Floats, transfer_us: Floats) -> tuple[Floats, Floats, Floats]:
        """Times here and there, and by what factor their ratio may be off, [n] each; sizes of 0 or less are not known.

        Where it is not known what the recorded machine is, the recorded time stands for the model's.
        """
        unknown = size <= 0
        if self._recorded is None:
            if unknown.any():
                raise InputError(
                    "the profile has neither the names of its GPUs nor the sizes of its collectives: name the machine that it was "
                    "recorded on (--set recorded_on=hgx-h100), or profile with record_shapes=True"
                )
            before_us = np.maximum(transfer_us, np.finfo(np.float64).tiny)
        else:
            size = np.where(unknown, bytes_in(self._name, transfer_us, self._recorded, self._here), size)
            before_us = collective_us(self._name, size, self._recorded, self._here)
        errors = [np.log([interval_factor(one, domains) for one in size.tolist()]) for domains in self._domains]
        return before_us, collective_us(self._name, size, self._target, self._there), np.exp(np.sqrt(np.square(errors).sum(axis=0)))


class _MovedGroups:
    """Ranks of the groups that communicate, as recorded and on the target."""

    def __init__(self, trace: Trace, recorded: Recorded, target: Placed) -> None:
        self._trace, self._recorded, self._target = trace, recorded, target
        self._members: dict[int, tuple[int, ...]] = {}
        events = trace.events
        parts = np.flatnonzero((events.kind == EventKind.COLLECTIVE) & (events.collective >= 0))
        for number in np.unique(events.collective[parts]).tolist():
            ranks = events.rank[parts[events.collective[parts] == number]]
            self._members[number] = tuple(np.unique(ranks).tolist())
        self._assumed_all = self._assumed_block = self._kept = False
        self.unknown_kinds = 0

    def of(self, event: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ranks of the group of a collective's event, here and there."""
        was = self._recorded_ranks(event)
        if len(was) == self._recorded.ranks:
            return was, tuple(range(self._target.ranks))
        if max(was) >= self._target.ranks:
            raise InputError(
                f"a group of ranks {_shown(was)} does not fit on {self._target.ranks} ranks: only groups of all ranks change"
            )
        self._kept = self._kept or self._target.ranks != self._recorded.ranks
        return was, was

    def sentences(self) -> Sequence[str]:
        """Assumptions, a sentence each."""
        sentences = []
        if self._target.ranks != self._recorded.ranks:
            sentences.append(f"groups of all {self._recorded.ranks} ranks become groups of all {self._target.ranks}")
        if self._kept:
            sentences.append("smaller groups stay as they are, with the ranks that they have")
        if self._assumed_all:
            sentences.append("collectives whose group was not recorded are among all ranks")
        if self._assumed_block:
            sentences.append("groups of which only the size was recorded are neighbouring ranks")
        if self.unknown_kinds:
            sentences.append(f"{self.unknown_kinds} collectives of an unknown type are taken for all-reduces")
        return sentences

    def _recorded_ranks(self, event: int) -> tuple[int, ...]:
        events, everyone = self._trace.events, self._recorded.ranks
        number = int(events.group[event])
        if number >= 0:
            group = self._trace.groups[number]
            size = len(group.ranks) or group.size
            if group.ranks and max(group.ranks) < everyone:
                return group.ranks
            if 0 < size <= everyone:
                self._assumed_block = self._assumed_block or size < everyone
                return tuple(range(size))
        members = self._members.get(int(events.collective[event]), ()) if events.collective[event] >= 0 else ()
        if members and self._trace.meta.ranks == everyone:
            return members
        self._assumed_all = True
        return tuple(range(everyone))


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
