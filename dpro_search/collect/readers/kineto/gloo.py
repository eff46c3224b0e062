"""Collectives of a profile without a device, which Gloo's threads carry out: their enqueues, the waits for them, and their groups.

The profiler marks each collective on the thread that ran it (``gloo:all_reduce``) and the operator that enqueued it (``c10d::``).
Gloo takes collectives in the order in which they were enqueued. Nothing records a wait: a thread that ran nothing when a collective
ended, and went on right after it, waited for it. Gloo's thread wakes it before it notes the end, which may seem to be later then.

Messages (stages of a pipeline send them) have no thread: a span lasts from the enqueue to the end of the wait, and those of one
peer and direction follow each other. Who the peer is `dpro-search collect` notes; of two ranks it is the other one.

Profiles do not name process groups. A note of `dpro-search collect` around an enqueue does (``dpro_search.group 0,2``). Without
notes, the job lists the groups of each rank (``pg_config`` of its distributedInfo), and shapes tell how many ranks take part: the
result of an all-gather is as many times as large as its input, and so is the input of a reduce-scatter. Where several groups fit,
the job is taken to be one of FSDP2: parameters are shared by the innermost dimension of the mesh, and the all-reduce with which a
unit's gradients are reduced (HSDP) is among the ranks with the same shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search.collect.readers.kineto.rank import EVENT_COLUMNS, RankRecords
from dpro_search.collect.readers.kineto.records import ITEM_BYTES, NotedCollective
from dpro_search.collect.recorded_names import ENQUEUE, GLOO_RUN, collective_kind_of
from dpro_search.collect.trace import CollectiveKind, Dependencies, DependencyKind, EventKind, Ints, ProcessGroup, Shapes

_MESSAGES = (CollectiveKind.SEND, CollectiveKind.RECV)
_BLOCKED_US = 20.0  # a thread that ran nothing for less did not wait
_AFTER_US = 1000.0  # between the noted end of a collective and the next span of the thread that waited for it, on a busy core


@dataclass(frozen=True)
class _Gap:
    """A stretch of a thread in which nothing ran but what encloses it."""

    start_us: float
    end_us: float


def find_gloo_collectives(r: RankRecords) -> None:
    """Make spans of Gloo collectives on streams, what enqueued them their launches, and add the waits of threads.

    Does nothing to a rank with a device, or without such spans.
    """
    if r.on_device.any():
        return
    spans = np.flatnonzero(r.named(lambda name: name.startswith(GLOO_RUN)))
    kinds = np.array([_kind_of(name) for name in r.names])[r.name]
    posts = np.flatnonzero(r.named(lambda name: name.startswith(ENQUEUE)) & (kinds >= 0))
    pairs: list[tuple[int, int]] = []
    for ways in (_MESSAGES[:1], _MESSAGES[1:], [kind for kind in CollectiveKind if kind not in _MESSAGES]):
        pairs += _paired(r, posts[np.isin(kinds[posts], ways)].tolist(), spans[np.isin(kinds[spans], ways)].tolist())
    if not pairs:
        return
    pairs.sort()
    marks = PeerMarks(r)
    streams: dict[object, int] = {}
    for span in spans.tolist():
        if kinds[span] not in _MESSAGES:
            streams.setdefault(int(r.stream[span]), len(streams))
    waits = _waits(r, pairs, int(r.stream[pairs[0][0]]))
    groups, names = GlooGroups(r), dict[str, int]()
    for post, span in pairs:
        way = CollectiveKind(int(kinds[post]))
        ends = marks.ends(post, way) if way in _MESSAGES else None
        r.kind[post], r.kind[span] = EventKind.RUNTIME, EventKind.COLLECTIVE
        stream_key = (way, ends) if way in _MESSAGES else int(r.stream[span])
        r.stream[span] = streams.setdefault(stream_key, len(streams))
        r.launch[span], r.step[span] = post, r.step[post]
        if ends is not None:
            peer = f"to rank {ends[1]}" if way is CollectiveKind.SEND else f"from rank {ends[0]}"
            r.name[span] = names.setdefault(f"{r.names[r.name[span]]} {peer}", len(r.names) + len(names))
        collective = _message(r, post, span, way, ends) if way in _MESSAGES else _collective(r, post, span, groups)
        r.collectives[span] = collective
        r.size_bytes[span] = collective.size_bytes
    r.names = (*r.names, *names)
    if groups.assumed:
        r.warnings.append(groups.assumed)
    _add_waits(r, waits)


def without_impossible_waits(needs: Dependencies, events: Mapping[str, npt.NDArray[Any]], residual_us: float) -> Dependencies:
    """The dependencies of all ranks without waits for a collective that ended before its last rank had enqueued it.

    On a busy core a thread pauses for other reasons than a wait. No rank's part completes before all ranks have enqueued theirs.
    Where devices work, waits are recorded and none is dropped.

    Parameters
    ----------
    events
        Columns of all ranks' events, one clock: `start_us`, `end_us`, and the number of the `collective`, -1 for none.
    residual_us
        What the alignment of the clocks leaves open.
    """
    launched = np.flatnonzero((needs.kind == DependencyKind.LAUNCH) & (events["collective"][needs.target] >= 0))
    if not len(launched) or np.isin(events["kind"], (EventKind.KERNEL, EventKind.COPY)).any():
        return needs
    collective = events["collective"][needs.target[launched]]
    last_us = np.full(int(collective.max()) + 1, -np.inf)
    np.maximum.at(last_us, collective, events["start_us"][needs.source[launched]])
    waited = (needs.kind == DependencyKind.SYNC) & (events["collective"][needs.source] >= 0)
    waited &= events["kind"][needs.source] == EventKind.COLLECTIVE
    waits = np.flatnonzero(waited)
    early = events["end_us"][needs.target[waits]] < last_us[events["collective"][needs.source[waits]]] - residual_us
    kept = np.ones(len(needs.kind), np.bool_)
    kept[waits[early]] = False
    return Dependencies(source=needs.source[kept], target=needs.target[kept], kind=needs.kind[kept])


def _kind_of(name: str) -> CollectiveKind:
    prefix = next((prefix for prefix in (ENQUEUE, GLOO_RUN) if name.startswith(prefix)), None)
    return CollectiveKind.UNKNOWN if prefix is None else collective_kind_of(name.removeprefix(prefix))


def _paired(r: RankRecords, posts: list[int], spans: list[int]) -> Iterator[tuple[int, int]]:
    """Each enqueue with the first span in order that did not begin before it."""
    at = 0
    for post in posts:
        while at < len(spans) and r.start_us[spans[at]] < r.start_us[post]:
            at += 1
        if at == len(spans):
            return
        yield post, spans[at]
        at += 1


def _collective(r: RankRecords, post: int, span: int, groups: GlooGroups) -> NotedCollective:
    """Size: that of the largest tensor, which is the whole of what an all-gather or a reduce-scatter is about."""
    kind = _kind_of(r.names[r.name[post]])
    group = groups.of(kind, post, _shapes(r, post))
    size_bytes, dtype = _size(r, post, span)
    if group is None:
        return NotedCollective(label=kind.label, kind=kind, size_bytes=size_bytes, dtype=dtype)
    return NotedCollective(
        label=kind.label,
        kind=kind,
        group=group.name,
        process_group=group,
        group_ranks=group.ranks,
        size_bytes=size_bytes,
        dtype=dtype,
    )


def _shapes(r: RankRecords, event: int) -> Shapes:
    """Shapes of an event's inputs; empty where they were not recorded."""
    return r.shape_table[r.shapes[event]] if r.shapes[event] >= 0 else ()


def _size(r: RankRecords, post: int, span: int) -> tuple[int, str]:
    """Bytes of the largest tensor, float32 if no type was recorded, and its type; -1 and "" where no shape was."""
    elements = max((math.prod(shape) for event in (post, span) for shape in _shapes(r, event) if shape), default=0)
    if not elements:
        return -1, ""
    dtype = next((r.dtypes[r.dtype[event]] for event in (post, span) if r.dtype[event] >= 0), "float32")
    return elements * ITEM_BYTES.get(dtype, 4), dtype


def _message(r: RankRecords, post: int, span: int, way: CollectiveKind, ends: tuple[int, int] | None) -> NotedCollective:
    """One end of a message; one whose peer is not known has no other end."""
    size_bytes, dtype = _size(r, post, span)
    if ends is None:
        return NotedCollective(label=way.label, kind=way, group=f"messages of rank {r.rank}", size_bytes=size_bytes, dtype=dtype)
    return NotedCollective(label="message", kind=way, group_ranks=ends, size_bytes=size_bytes, dtype=dtype)


def _waits(r: RankRecords, pairs: list[tuple[int, int]], thread: int) -> list[tuple[int, _Gap]]:
    """Spans of collectives, and the gap of the enqueueing thread that ended with each."""
    posts = np.array([post for post, _ in pairs])
    spans = np.array([span for _, span in pairs])
    ends_us, posted_us = r.end_us[spans], r.end_us[posts]
    waits = []
    for gap in _gaps(r, np.flatnonzero(r.stream == thread)):
        late_us = gap.end_us - ends_us  # by which the thread went on after each end
        # A thread that went on before an end was noted waited for it only if it paused for longer than that.
        early = min(gap.end_us - gap.start_us, _AFTER_US)
        possible = (ends_us > gap.start_us) & (posted_us <= gap.start_us + 1.0) & (late_us <= _AFTER_US) & (late_us >= -early)
        if possible.any():
            distance_us = np.where(late_us >= 0, late_us, _AFTER_US - late_us)  # the last that had ended, else the next to end
            waits.append((int(spans[np.argmin(np.where(possible, distance_us, np.inf))]), gap))
    return waits


def _gaps(r: RankRecords, rows: Ints) -> Iterator[_Gap]:
    """Stretches of a thread between two spans in which none but annotations, autograd's and collectives' spans are open."""
    waits_within = r.named(lambda name: not name.startswith("aten::"))
    rows = rows[np.lexsort((-r.end_us[rows], r.start_us[rows]))]
    open_spans: list[tuple[float, bool]] = []
    boundary_us = -np.inf
    for row in rows.tolist():
        start_us = float(r.start_us[row])
        while open_spans and open_spans[-1][0] <= start_us:
            end_us, may_wait = open_spans.pop()
            if may_wait and end_us - boundary_us > _BLOCKED_US:
                yield _Gap(boundary_us, end_us)
            boundary_us = max(boundary_us, end_us)
        if start_us - boundary_us > _BLOCKED_US and (not open_spans or open_spans[-1][1]) and np.isfinite(boundary_us):
            yield _Gap(boundary_us, start_us)
        boundary_us = max(boundary_us, start_us)
        open_spans.append((float(r.end_us[row]), bool(waits_within[row])))


def _add_waits(r: RankRecords, waits: list[tuple[int, _Gap]]) -> None:
    """Append an event for each wait, and put all events back in the order of their starts."""
    count = len(r)
    r.names = (*r.names, "wait for a collective")
    step = [int(r.step[np.searchsorted(r.start_us, gap.start_us, side="right") - 1]) for _, gap in waits]
    thread = int(r.stream[r.launch[waits[0][0]]]) if waits else -1
    with_waits = r.with_events(
        name=len(r.names) - 1,
        kind=EventKind.SYNC,
        stream=thread,
        start_us=[gap.start_us for _, gap in waits],
        end_us=[gap.end_us for _, gap in waits],
        annotation=False,
        step=step,
    )
    order = np.argsort(with_waits.start_us, kind="stable")
    place = np.argsort(order)
    for name in EVENT_COLUMNS:
        setattr(r, name, getattr(with_waits, name)[order])
    r.launch = np.where(r.launch >= 0, place[np.maximum(r.launch, 0)], -1)
    r.collectives = {int(place[event]): collective for event, collective in r.collectives.items()}
    r.host_waits = tuple((int(place[span]), int(place[count + number])) for number, (span, _) in enumerate(waits))


GROUP_MARK = "dpro_search.group "  # and the group's ranks; of a message the sender and the receiver
_SHARDS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
_NESTED = 64  # notes that are looked at before an enqueue
_REDUCTION = "FSDP::post_backward_reduce"
_SHARED, _COPIED = "shard", "replicate"  # in the descriptions of groups of a mesh with named dimensions
_SAID = (
    "Gloo's collectives do not name their process groups: where several listed groups fit, the innermost shares FSDP's parameters, "
    "and the others average its gradients"
)


class GlooGroups:
    """The groups that a rank is in, and which of them its collectives are of."""

    def __init__(self, r: RankRecords) -> None:
        self._r = r
        self._listed = _listed(r)
        self._marks = PeerMarks(r)
        self._reductions = np.flatnonzero(r.named(lambda name: name.startswith(_REDUCTION)))
        self.assumed = ""  # what was taken for granted so far

    def of(self, kind: CollectiveKind, post: int, shapes: Shapes) -> ProcessGroup | None:
        """The group of the collective that an event enqueues; None: no group is listed, or none is of as many ranks.

        Parameters
        ----------
        shapes
            Of its inputs.
        """
        noted = self._marks.around(post)
        if noted is not None:
            known = next((group for group in self._listed if group.ranks == noted), None)
            return known or ProcessGroup(ranks=noted, size=len(noted))
        ranks = _ranks_of(kind, shapes)
        fit = [group for group in self._listed if ranks is None or group.size == ranks]
        if len(fit) < 2:
            return fit[0] if fit else None
        if ranks is None and not (kind is CollectiveKind.ALL_REDUCE and self._reduces(post)):
            return max(fit, key=lambda group: group.size)  # of all ranks, unless the script named one
        self.assumed = _SAID
        return self._sharing(fit) if kind in _SHARDS else self._averaging(fit)

    def _reduces(self, post: int) -> bool:
        """Whether FSDP enqueued it to reduce a unit's gradients."""
        r, spans = self._r, self._reductions
        inside = (r.start_us[spans] <= r.start_us[post]) & (r.end_us[spans] >= r.end_us[post]) & (r.stream[spans] == r.stream[post])
        return bool(inside.any())

    def _sharing(self, fit: Sequence[ProcessGroup]) -> ProcessGroup:
        """The group that shares parameters: named so, else that of the nearest ranks."""
        return min(fit, key=lambda group: (_SHARED not in group.description, _stride(group), group.size))

    def _averaging(self, fit: Sequence[ProcessGroup]) -> ProcessGroup:
        """The group that averages gradients: named so, else that of the farthest ranks, but not all."""
        shared = self._sharing([group for group in fit if group.size < self._everyone] or fit)
        others = [group for group in fit if group is not shared]
        return min(others, key=lambda group: (_COPIED not in group.description, group.size == self._everyone, -_stride(group)))

    @property
    def _everyone(self) -> int:
        return max(group.size for group in self._listed)


class PeerMarks:
    """Notes of `dpro-search collect` around enqueues: the ranks that take part in each."""

    def __init__(self, r: RankRecords) -> None:
        self._r = r
        self._ranks = {number: ranks for number, name in enumerate(r.names) if (ranks := _noted(name)) is not None}
        self._rows = np.flatnonzero(np.isin(r.name, list(self._ranks)))

    def around(self, post: int) -> tuple[int, ...] | None:
        """Ranks of the innermost note around an event; None without one."""
        r, rows = self._r, self._rows
        before = rows[: np.searchsorted(rows, post)][-_NESTED:]
        inside = before[(r.end_us[before] >= r.end_us[post]) & (r.stream[before] == r.stream[post])]
        return self._ranks[int(r.name[inside[-1]])] if len(inside) else None

    def ends(self, post: int, way: CollectiveKind) -> tuple[int, int] | None:
        """Sender and receiver of the message that an event enqueues; None: they are not known."""
        noted = self.around(post)
        if noted is not None and len(noted) == 2:
            return noted[0], noted[1]
        rank = self._r.rank
        if self._r.world_size != 2 or rank not in (0, 1):
            return None
        return (rank, 1 - rank) if way is CollectiveKind.SEND else (1 - rank, rank)


def _noted(name: str) -> tuple[int, ...] | None:
    parts = name.removeprefix(GROUP_MARK).split(",") if name.startswith(GROUP_MARK) else []
    return tuple(map(int, parts)) if parts and all(part.isdigit() and len(part) < 8 for part in parts) else None


def _listed(r: RankRecords) -> list[ProcessGroup]:
    """The groups of two ranks or more that a rank is in, each set of ranks once."""
    group_of_members: dict[tuple[int, ...], ProcessGroup] = {}
    groups = r.job.get("pg_config")
    for group in groups if isinstance(groups, list) else ():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if not isinstance(ranks, list) or not all(isinstance(rank, int) and 0 <= rank < 1 << 20 for rank in ranks):
            continue
        members = tuple(ranks)
        if len(set(members)) == len(members) > 1 and r.rank in members:
            name, description = str(group.get("pg_name", "")), str(group.get("pg_desc", ""))
            named = ProcessGroup(name=name, description=description, ranks=members, size=len(members))
            if members not in group_of_members or _says_more(description, group_of_members[members].description):
                group_of_members[members] = named
    return list(group_of_members.values())


def _says_more(description: str, than: str) -> bool:
    return any(word in description and word not in than for word in (_SHARED, _COPIED))


def _stride(group: ProcessGroup) -> int:
    return group.ranks[1] - group.ranks[0]


def _ranks_of(kind: CollectiveKind, shapes: Shapes) -> int | None:
    """How many ranks an all-gather or a reduce-scatter with such inputs is among; None: shapes do not say."""
    sizes = [math.prod(shape) for shape in shapes if shape]
    if kind not in _SHARDS or len(sizes) < 2 or min(sizes) <= 0:
        return None
    if len(sizes) > 2:  # a list of tensors of the group's ranks, and one
        return len(sizes) - 1 if len(set(sizes)) == 1 else None
    whole, part = max(sizes), min(sizes)
    return whole // part if whole % part == 0 and whole > part else None
