"""Gains of an iteration from one change of the job. Each answer is a replay of the changed graph.

Gains can be negative. Faster ops never make an iteration longer where devices keep the recorded order or have no bounds; a device
that serves by ready time or priority may then choose another order, which may be worse (anomalies of list scheduling: Graham,
Bounds on Multiprocessing Timing Anomalies, 1969). So may flows that share links otherwise, and ops that slow others at another
time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats, Ints
from dpro_search.errors import InputError
from dpro_search.graph.dataflow import OpKind
from dpro_search.replay.path.critical_path import path_shares
from dpro_search.replay.replayer import replay
from dpro_search.replay.timeline import Timeline
from dpro_search.space.replay_graph import ReplayGraph
from dpro_search.space.scenario import Scale

Bools = npt.NDArray[np.bool_]
Replay = Callable[[ReplayGraph], Timeline]

COMPUTE_KINDS = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE)
_FASTER = 0.9
_MOST_RANKS = 16  # with more, only the slowest are asked about
_SLOWEST_RANKS = 8
_TOP_OPS = 5


class Change(Protocol):
    """A change of a job, as a value."""

    @property
    def text(self) -> str:
        """The what-if as people write it."""

    def apply(self, graph: ReplayGraph) -> ReplayGraph:
        """The graph of the changed job."""


@dataclass(frozen=True, kw_only=True)
class ComputeScaled:
    """Compute (forward, backward, update) of one rank, or of all if None, takes a factor of its time."""

    factor: float
    rank: int | None = None

    @property
    def text(self) -> str:
        """The what-if as people write it."""
        return f"{_of_rank_text(self.rank)}compute={self.factor:g}"

    def apply(self, graph: ReplayGraph) -> ReplayGraph:
        """The graph of the changed job."""
        return _scaled(graph, is_compute(graph) & _of_rank(graph, self.rank), self.factor)


@dataclass(frozen=True, kw_only=True)
class CommunicationScaled:
    """Communication (latency and bytes) of one rank, or of all if None, takes a factor of its time."""

    factor: float
    rank: int | None = None

    @property
    def text(self) -> str:
        """The what-if as people write it."""
        return f"{_of_rank_text(self.rank)}communication={self.factor:g}"

    def apply(self, graph: ReplayGraph) -> ReplayGraph:
        """The graph of the changed job."""
        return _scaled(graph, is_communication(graph) & _of_rank(graph, self.rank), self.factor)


@dataclass(frozen=True, kw_only=True)
class StagesEven:
    """Each rank of a pipeline computes as long as the mean of its pipeline's ranks."""

    pipelines: tuple[tuple[int, ...], ...]  # Ranks of each pipeline.

    @property
    def text(self) -> str:
        """The what-if as people write it."""
        return "stages=even"

    def apply(self, graph: ReplayGraph) -> ReplayGraph:
        """The graph of the changed job."""
        compute = is_compute(graph)
        compute_us = compute_us_of_ranks(graph)
        factor = np.ones(graph.ranks)
        for ranks in self.pipelines:
            stage_us = compute_us[list(ranks)]
            factor[list(ranks)] = np.divide(stage_us.mean(), stage_us, out=np.ones(len(ranks)), where=stage_us > 0)
        return graph.with_durations(np.where(compute, graph.duration_us * factor[graph.rank_of_op], graph.duration_us))


@dataclass(frozen=True, kw_only=True)
class KindScaled:
    """Ops of one kind take a factor of their time, on all ranks."""

    factor: float
    kind: OpKind

    @property
    def text(self) -> str:
        """The what-if as people write it."""
        return f"all {self.kind.name} ops {_faster(self.factor)}"

    def apply(self, graph: ReplayGraph) -> ReplayGraph:
        """The graph of the changed job."""
        return _scaled(graph, graph.op_kind == self.kind, self.factor)


@dataclass(frozen=True, kw_only=True)
class OpScaled:
    """One op takes a factor of its time; of a collective all parts do, for the slowest decides."""

    factor: float
    op: int
    name: str

    @property
    def text(self) -> str:
        """The what-if as people write it."""
        return f"{self.name} {_faster(self.factor)}"

    def apply(self, graph: ReplayGraph) -> ReplayGraph:
        """The graph of the changed job."""
        chosen = np.arange(len(graph)) == self.op
        if len(graph.collective) and graph.collective[self.op] >= 0:
            chosen = graph.collective == graph.collective[self.op]
        return _scaled(graph, chosen, self.factor)


@dataclass(frozen=True, kw_only=True)
class BandwidthScaled:
    """Every link's rate times a factor. Collectives, and without flows all communication, take their time over the factor."""

    factor: float

    @property
    def text(self) -> str:
        """The what-if as people write it."""
        return f"bandwidth={self.factor:g}"

    def apply(self, graph: ReplayGraph) -> ReplayGraph:
        """The graph of the changed job."""
        timed = is_communication(graph)
        if graph.flow_bytes.any():
            timed = graph.collective >= 0 if len(graph.collective) else np.zeros(len(graph), np.bool_)
        return _scaled(replace(graph, link_bytes_per_us=graph.link_bytes_per_us * self.factor), timed, 1 / self.factor)


@dataclass(frozen=True, kw_only=True)
class StragglerGone:
    """Ops of one rank take the median time of the same op on the other ranks.

    The same op has the same name but for its ``@rank``; where ops have no names, the same place among its rank's ops of its kind.
    Ops without a counterpart keep their time; those that the others take longer for get slower: the rank becomes an ordinary one.
    """

    rank: int

    @property
    def text(self) -> str:
        """The what-if as people write it."""
        return f"rank {self.rank} no straggler"

    def apply(self, graph: ReplayGraph) -> ReplayGraph:
        """The graph of the changed job; raises `InputError` if no op of the rank has a counterpart."""
        op, other = _counterparts(graph, self.rank)
        if not len(op):
            raise InputError(f"rank {self.rank} has no op in common with another rank: name its ops NAME@RANK")
        duration_us = graph.duration_us.copy()
        of_straggler, usual = _medians(op, duration_us[other])
        duration_us[of_straggler] = usual
        return graph.with_durations(duration_us)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The gain of a change: the iteration time with it, and how much shorter that is, in microseconds and percent."""

    change: Change
    iteration_us: float
    gain_us: float
    gain_pct: float


def graph_change(scale: Scale, ranks: int) -> Change:
    """The change of a replay graph that a scale means; raises `InputError` for a rank that is not there."""
    scale.check_rank(ranks)
    if scale.what == "bandwidth":
        return BandwidthScaled(factor=scale.factor)
    if scale.what == "communication":
        return CommunicationScaled(factor=scale.factor, rank=scale.rank)
    return ComputeScaled(factor=scale.factor, rank=scale.rank)


def questions(graph: ReplayGraph, *, replay: Replay = replay) -> tuple[Change, ...]:
    """Changes to ask about: those that can matter to this graph.

    Compute and communication of all ranks and of each (of more than 16 ranks, of the 8 slowest), each kind of op, bandwidth, free
    communication, the straggler, and the five ops that take most of the critical path. The straggler is the slowest rank: the one
    with the most compute on the critical path, of equals the one with the most compute in all.
    """
    return tuple(_questions(replay(graph)))


def gains(graph: ReplayGraph, changes: Sequence[Change] | None = None, *, replay: Replay = replay) -> list[Gain]:
    """The gain of each change (None: of all `questions`), largest first.

    Parameters
    ----------
    replay
        How iteration times are found, ``functools.partial(replay, iterations=4)`` for instance.
    """
    base = replay(graph)
    gains_of_changes = []
    for change in _questions(base) if changes is None else changes:
        iteration_us = replay(change.apply(graph)).iteration_us
        gain_us = base.iteration_us - iteration_us
        gain_pct = 100 * gain_us / base.iteration_us if base.iteration_us > 0 else 0.0
        gains_of_changes.append(Gain(change=change, iteration_us=iteration_us, gain_us=gain_us, gain_pct=gain_pct))
    return sorted(gains_of_changes, key=lambda gain: -gain.gain_us)


def is_communication(graph: ReplayGraph) -> Bools:
    """Ops that communicate, [n]: COMM ops, parts of collectives and flows."""
    communicates: Bools = graph.op_kind == OpKind.COMM
    if len(graph.collective):
        communicates = communicates | (graph.collective >= 0)
    if len(graph.flow_bytes):
        communicates = communicates | (graph.flow_bytes > 0)
    return communicates


def is_compute(graph: ReplayGraph) -> Bools:
    """Ops of a compute kind that do not communicate, [n]."""
    computes: Bools = np.isin(graph.op_kind, COMPUTE_KINDS) & ~is_communication(graph)
    return computes


def compute_us_of_ranks(graph: ReplayGraph) -> Floats:
    """Compute time of each rank in an iteration, [ranks]."""
    duration_us: Floats = np.where(is_compute(graph), graph.duration_us, 0.0)
    return np.asarray(np.bincount(graph.rank_of_op, duration_us, graph.ranks), np.float64)


def _questions(base: Timeline) -> Iterator[Change]:
    graph = base.graph
    compute, communication = is_compute(graph), is_communication(graph)
    on_path_us = path_shares(base).by_op
    ranks = _slowest_first(graph, compute, on_path_us)
    few = ranks if len(ranks) <= _MOST_RANKS else ranks[:_SLOWEST_RANKS]
    if compute.any():
        yield ComputeScaled(factor=_FASTER)
    if communication.any():
        yield CommunicationScaled(factor=_FASTER)
        yield CommunicationScaled(factor=0)
        yield BandwidthScaled(factor=2)
    if len(ranks) > 1:
        yield from (ComputeScaled(factor=_FASTER, rank=rank) for rank in few if (compute & _of_rank(graph, rank)).any())
        yield from (CommunicationScaled(factor=_FASTER, rank=rank) for rank in few if (communication & _of_rank(graph, rank)).any())
        if len(_counterparts(graph, ranks[0])[0]):
            yield StragglerGone(rank=ranks[0])
    for kind in np.unique(graph.kind).tolist():
        of_kind = graph.kind == kind
        if not (of_kind == compute).all() and not (of_kind == communication).all():  # those are asked already
            yield KindScaled(factor=_FASTER, kind=OpKind(kind))
    for op in itertools.islice(on_path_us, _TOP_OPS):
        yield OpScaled(factor=_FASTER, op=op, name=_shown_name(graph, op))


def _slowest_first(graph: ReplayGraph, compute: Bools, on_path_us: Mapping[int, float]) -> list[int]:
    """Ranks that have ops."""
    path_us = np.zeros(len(graph))
    path_us[list(on_path_us)] = list(on_path_us.values())
    of_path, of_all = (
        np.bincount(graph.rank_of_op, np.where(compute, us, 0.0), graph.ranks) for us in (path_us, graph.duration_us)
    )
    present = np.bincount(graph.rank_of_op, minlength=graph.ranks) > 0
    return [int(rank) for rank in np.lexsort((-of_all, -of_path)) if present[rank]]


def _shown_name(graph: ReplayGraph, op: int) -> str:
    if len(graph.collective) and graph.collective[op] >= 0:
        return f"{_without_rank(graph.name(op), int(graph.rank_of_op[op]))} on all ranks"
    return graph.name(op)


def _of_rank(graph: ReplayGraph, rank: int | None) -> Bools:
    """Ops of a rank, [n]; of all ranks if None."""
    return np.ones(len(graph), np.bool_) if rank is None else graph.rank_of_op == rank


def _scaled(graph: ReplayGraph, chosen: Bools, factor: float) -> ReplayGraph:
    """The graph with a factor on the time and the bytes of some ops, [n]."""
    scaled = graph.with_durations(np.where(chosen, graph.duration_us * factor, graph.duration_us))
    if len(graph.flow_bytes):
        scaled = replace(scaled, flow_bytes=np.where(chosen, graph.flow_bytes * factor, graph.flow_bytes))
    return scaled


def _counterparts(graph: ReplayGraph, rank: int) -> tuple[Ints, Ints]:
    """Pairs (op of the rank, the same op on another rank); empty if they cannot be matched."""
    return _by_name(graph, rank) if len(graph.names) else _by_place(graph, rank)


def _by_name(graph: ReplayGraph, rank: int) -> tuple[Ints, Ints]:
    """Names that a rank has twice match nothing, for they do not say which."""
    of_rank = graph.rank_of_op.tolist()
    op_of_name: dict[str, int] = {}
    twice: set[str] = set()
    for op in np.flatnonzero(graph.rank_of_op == rank).tolist():
        name = _without_rank(graph.names[op], rank)
        if name in op_of_name:
            twice.add(name)
        op_of_name[name] = op
    pairs = [
        (op_of_name[name], op)
        for op, other in enumerate(of_rank)
        if other != rank and (name := _without_rank(graph.names[op], other)) in op_of_name and name not in twice
    ]
    columns = np.array(pairs, np.int64).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def _without_rank(name: str, rank: int) -> str:
    return name.removesuffix(f"@{rank}")


def _by_place(graph: ReplayGraph, rank: int) -> tuple[Ints, Ints]:
    """The k-th op of a kind is the same op on all ranks, if all have equally many of each kind."""
    ranks = np.unique(graph.rank_of_op)
    order = np.lexsort((np.arange(len(graph)), graph.op_kind, graph.rank_of_op))
    none = np.zeros(0, np.int64)
    if len(ranks) < 2 or len(graph) % len(ranks):
        return none, none
    table = order.reshape(len(ranks), -1)
    of_rank, kind = graph.rank_of_op[table], graph.op_kind[table]
    if (of_rank != ranks[:, None]).any() or (kind != kind[0]).any():
        return none, none
    others = table[ranks != rank]
    return np.tile(table[ranks == rank][0], len(others)), others.ravel()


def _medians(key: Ints, value: Floats) -> tuple[Ints, Floats]:
    """Distinct keys, and the median of the values of each."""
    order = np.lexsort((value, key))
    keys, first, count = np.unique(key[order], return_index=True, return_counts=True)
    value = value[order]
    return keys, (value[first + (count - 1) // 2] + value[first + count // 2]) / 2


def _of_rank_text(rank: int | None) -> str:
    return "" if rank is None else f"rank{rank}."


def _faster(factor: float) -> str:
    return f"{100 * (1 - factor):g} % faster"
