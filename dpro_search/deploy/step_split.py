"""Breakdown of the time of a paced step, measured beside predicted: `measured_split`, `StepSplit`, `ComparedSplit`.

A rank is *blocked* while it waits for an exchange. On Gloo an exchange moves when the last of its ranks has posted it. Ranks of a
paced job are on one machine and read one clock, so that their files (`runtime/timed/dpro_search_spans.py`) are matched exchange by
exchange: the last post cuts the blocked time of each rank into *waiting* for others and *transfer*. A rank's own clock alone could
not tell them apart. Shares of the step, means over ranks:

* ``compute``: the rank is not blocked. What is beyond its recorded work is Python's, or waits for a core (``beyond_recorded``).
* ``bubble``: it waits for a rank of another pipeline stage, in a message or, at the end of a step, in a collective over all ranks.
* ``exposed_communication``: transfers, and waiting for other ranks of its stage. These three add up to the step.
* ``contention``, which is part of exposed communication: what transfers take longer than with the links to themselves. Of a
  collective that takes `T` from its last post to its last end that is ``min(transfer, T - alone)``, and may be negative; of a
  message the receiver's counts. `alone` is the recorded time of the exchange. All groups of a kind exchanged at a time when it was
  recorded, so that it is less by what the cost model of the links says that costs; the difference between measured and predicted
  contention does not depend on that.

The prediction has the same parts of the replayed step (`parallel/timed/split.py`). It knows nothing of what Python takes beyond
recorded work, nor of contention between exchanges of different kinds, or for cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Floats
from dpro_search.errors import JobError

PARTS = ("bubble", "exposed_communication", "contention")  # that are compared
_AXES = ("other", "world", "pp", "dp_replicate", "dp_shard", "tp")  # of groups; the first one of calls that were not seen
_ACROSS_STAGES = ("world", "pp")
AloneUs = Callable[[str, str, float], float | None]
"""Duration of an exchange on links that nothing else uses, by kind, axis and bytes; None: not known."""

Bools = npt.NDArray[np.bool_]
_Int64s = npt.NDArray[np.int64]


class StepSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of a step, means over ranks; see above.

    Attributes
    ----------
    beyond_recorded
        Of compute, what is beyond recorded work.
    by_axis
        Of exposed communication, by mesh axis: tp, dp, pp, world.
    by_exchange
        The same by axis and kind of exchange (``"tp all_reduce"``) and by axis that ranks of a stage wait for each other in
        (``"tp waiting"``); of what is measured only.
    """

    step_us: float
    compute: float
    bubble: float
    exposed_communication: float
    contention: float
    beyond_recorded: float = 0.0
    by_axis: dict[str, float] = {}
    by_exchange: dict[str, float] = {}


class ComparedSplit(msgspec.Struct, frozen=True, kw_only=True):
    """A measured step beside the predicted one; `points`: predicted less measured shares of `PARTS`, in percent of a step."""

    measured: StepSplit
    predicted: StepSplit
    points: dict[str, float]

    @staticmethod
    def of(measured: StepSplit, predicted: StepSplit) -> ComparedSplit:
        points = {name: (getattr(predicted, name) - getattr(measured, name)) * 100 for name in PARTS}
        return ComparedSplit(measured=measured, predicted=predicted, points=points)

    @staticmethod
    def mean(splits: Sequence[ComparedSplit | None]) -> ComparedSplit | None:
        """The mean over runs of one plan; None if no run has a split."""
        known = [split for split in splits if split is not None]
        return ComparedSplit.of(mean_split([split.measured for split in known]), known[0].predicted) if known else None


def mean_split(splits: Sequence[StepSplit]) -> StepSplit:
    """The mean over several runs, at least one."""
    tables = [msgspec.to_builtins(split) for split in splits]
    return msgspec.convert({name: _mean([table[name] for table in tables]) for name in tables[0]}, StepSplit)


def _mean(values: Sequence[Any]) -> Any:
    if not isinstance(values[0], dict):
        return float(np.mean(values))
    names = dict.fromkeys(name for table in values for name in table)
    return {name: float(np.mean([table.get(name, 0.0) for table in values])) for name in names}


class _SplitHead(msgspec.Struct, frozen=True):
    rank: int
    stages: int
    groups: list[tuple[str, list[int]]]
    kinds: list[str]
    steps: list[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class RankSpans:
    """The records that one rank wrote.

    Attributes
    ----------
    stages
        Of the pipeline.
    groups, kinds
        Axis and ranks of each group; names of kinds of exchanges.
    begins_ns, paced_us
        Begin of each step, and the recorded work in it, [steps].
    rows
        Exchanges in the order in which they were posted, [n, 7]: group (-1: not known), kind, peer of a message (-1: a collective),
        bytes, when it was posted, when the rank began to wait for it, and when it had it, in ns (0: it never waited).
    """

    rank: int
    stages: int
    groups: Sequence[tuple[str, Sequence[int]]]
    kinds: Sequence[str]
    begins_ns: _Int64s
    paced_us: Floats
    rows: _Int64s


def read_spans(folder: Path) -> list[RankSpans]:
    """The records that ranks wrote into a folder, by rank; raises `JobError` for a damaged file."""
    return [_read(path) for path in sorted(folder.glob("spans-*"))]


def _read(path: Path) -> RankSpans:
    first, _, rest = path.read_bytes().partition(b"\n")
    try:
        head = msgspec.json.decode(first, type=_SplitHead)
        rows = np.frombuffer(rest, np.int64).reshape(-1, 7)
    except (msgspec.DecodeError, ValueError) as error:
        raise JobError(f"{path.name}: what a rank wrote of its exchanges is damaged ({error})") from error
    return RankSpans(
        rank=head.rank,
        stages=head.stages,
        groups=head.groups,
        kinds=head.kinds,
        begins_ns=np.array([begin for begin, _ in head.steps], np.int64),
        paced_us=np.array([us for _, us in head.steps]),
        rows=rows,
    )


def measured_split(ranks: Sequence[RankSpans], warmup: int, alone_us: AloneUs) -> StepSplit | None:
    """The split of the steps behind `warmup`, each from its begin to that of the next; None: no rank wrote so many.

    Parameters
    ----------
    ranks
        All of them.
    """
    if not ranks or min(len(rank.begins_ns) for rank in ranks) < warmup + 2:
        return None
    last = min(len(rank.begins_ns) for rank in ranks) - 1
    begin_ns, end_ns = (np.array([rank.begins_ns[step] for rank in ranks]) for step in (warmup, last))
    paced_ns = np.array([rank.paced_us[warmup:last].sum() * 1e3 for rank in ranks])
    blocked = _Blocked.of(ranks, begin_ns, end_ns)
    across = np.isin(blocked.axis, _ACROSS_STAGES) & (ranks[0].stages > 1)
    bubble = blocked.share(blocked.waiting_ns, across)
    exposed = _named(blocked, ~across)
    compute = 1.0 - bubble - sum(exposed.values())
    return StepSplit(
        step_us=float((end_ns - begin_ns).mean() / (last - warmup) / 1e3),
        compute=compute,
        bubble=bubble,
        exposed_communication=sum(exposed.values()),
        contention=blocked.share(blocked.contention_ns(alone_us)),
        beyond_recorded=compute - float(np.mean(paced_ns / (end_ns - begin_ns))),
        by_axis=_summed((name.split()[0], share) for name, share in exposed.items()),
        by_exchange=exposed,
    )


def _named(blocked: _Blocked, same_stage: Bools) -> dict[str, float]:
    """Exposed communication by axis and kind of exchange; axes of replicas (dp_replicate, dp_shard) are one."""
    rows: list[tuple[str, float]] = []
    for axis in dict.fromkeys(blocked.axis.tolist()):
        on_axis, short = blocked.axis == axis, axis.partition("_")[0]
        kinds = dict.fromkeys(blocked.kind[on_axis].tolist())
        rows += [(f"{short} {kind}", blocked.share(blocked.transfer_ns, on_axis & (blocked.kind == kind))) for kind in kinds]
        rows.append((f"{short} waiting", blocked.share(blocked.waiting_ns, on_axis & same_stage)))
    return {name: share for name, share in _summed(rows).items() if share}


def _summed(rows: Iterable[tuple[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for name, share in rows:
        totals[name] = totals.get(name, 0.0) + share
    return totals


@dataclass(frozen=True, kw_only=True)
class _Blocked:
    """Exchanges that ranks waited for in the steps that count, [n]."""

    axis: npt.NDArray[np.str_]
    kind: npt.NDArray[np.str_]
    size_bytes: _Int64s
    waiting_ns: Floats
    transfer_ns: Floats
    whole_ns: Floats  # From the last post to the last end.
    shares: Floats  # What a ns of the rank is of a step, in a mean over ranks.

    @staticmethod
    def of(ranks: Sequence[RankSpans], begin_ns: _Int64s, end_ns: _Int64s) -> _Blocked:
        """Time that each rank waited for its posted exchanges between begin and end, [ranks]."""
        keys = np.concatenate([_keys(rank) for rank in ranks])
        kind = np.concatenate([np.array(rank.kinds)[rank.rows[:, 1]] for rank in ranks])
        _, _, _, size, posted, waited, done = np.concatenate([rank.rows for rank in ranks]).T
        exchange = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
        moves, ends = (np.zeros(int(exchange.max(initial=-1)) + 1, np.int64) for _ in range(2))
        np.maximum.at(moves, exchange, posted)
        np.maximum.at(ends, exchange, np.where(kind == "send", 0, done))  # a sender may ask late for what was sent long ago
        moves, ends = moves[exchange], ends[exchange]
        owner = np.repeat(np.arange(len(ranks)), [len(rank.rows) for rank in ranks])
        counts = (done > 0) & (waited >= begin_ns[owner]) & (waited < end_ns[owner])
        return _Blocked(
            axis=np.array(_AXES)[keys[counts, 0]],
            kind=kind[counts],
            size_bytes=size[counts],
            waiting_ns=np.maximum(np.minimum(done, moves) - waited, 0)[counts].astype(float),
            transfer_ns=np.maximum(done - np.maximum(waited, moves), 0)[counts].astype(float),
            whole_ns=(ends - moves)[counts].astype(float),
            shares=1.0 / (len(ranks) * (end_ns - begin_ns)[owner][counts]),
        )

    def share(self, ns: Floats, rows: Bools | None = None) -> float:
        """Share of a step that some times take, as the mean over ranks."""
        return float((ns * self.shares)[slice(None) if rows is None else rows].sum())

    def contention_ns(self, alone_us: AloneUs) -> Floats:
        """The additional duration of each exchange over running alone, within the time that the rank was blocked in it."""
        excess_ns = np.zeros(len(self.kind))
        for kind, axis, size in dict.fromkeys(zip(self.kind.tolist(), self.axis.tolist(), self.size_bytes.tolist(), strict=True)):
            alone = None if kind == "send" else alone_us(kind, axis, size)
            if alone is not None:
                rows = (self.kind == kind) & (self.axis == axis) & (self.size_bytes == size) & (self.transfer_ns > 0)
                excess_ns[rows] = np.minimum(self.transfer_ns, self.whole_ns - alone * 1e3)[rows]
        return excess_ns


def _keys(rank: RankSpans) -> _Int64s:
    """The identity of an exchange on all its ranks, [n, 4]: axis, first rank and -1 (or sender and receiver), and its number."""
    keys = np.full((len(rank.rows), 4), -1, np.int64)
    group, kind, peer = rank.rows[:, 0], rank.rows[:, 1], rank.rows[:, 2]
    keys[:, 0] = np.array([*(_AXES.index(axis) for axis, _ in rank.groups), 0])[group]  # of -1 the last one
    keys[:, 1] = np.array([*(ranks[0] for _, ranks in rank.groups), rank.rank])[group]
    for name, column, other in (("send", 1, 2), ("recv", 2, 1)):
        rows = (peer >= 0) & (kind == list(rank.kinds).index(name))
        keys[rows, 0], keys[rows, column], keys[rows, other] = _AXES.index("pp"), rank.rank, peer[rows]
    label = np.unique(keys[:, :3], axis=0, return_inverse=True)[1].reshape(-1)
    order = np.argsort(label, kind="stable")
    first = np.searchsorted(label[order], label[order])
    keys[order, 3] = np.arange(len(order)) - first
    return keys
