"""Process groups of Gloo's collectives, which profiles do not name: ``GlooGroups(r).of(...)``; peers of messages: `PeerMarks`.

What `dpro-search collect` notes around an enqueue (``dpro_search.group 0,2``) says it. Else:

The job lists the groups of each rank (``pg_config`` of its distributedInfo), and shapes tell of how many ranks a collective is: the
result of an all-gather is as many times as large as its input, and so is the input of a reduce-scatter. What is left open is taken
to be as FSDP2 makes it: parameters are shared by the innermost dimension of the mesh, and the all-reduce with which a unit's
gradients are reduced (HSDP) is among the ranks with the same shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dpro_search.collect.readers.kineto.rank import RankRecords
from dpro_search.collect.trace import CollectiveKind, ProcessGroup, Shapes

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
        reduces = np.array([name.startswith(_REDUCTION) for name in r.names] or [False])
        self._reductions = np.flatnonzero(reduces[r.name])
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
    """What `dpro-search collect` noted around enqueues: the ranks that each is about."""

    def __init__(self, r: RankRecords) -> None:
        self._r = r
        self._ranks = {number: ranks for number, name in enumerate(r.names) if (ranks := _noted(name)) is not None}
        self._rows = np.flatnonzero(np.isin(r.name, list(self._ranks)))

    def around(self, post: int) -> tuple[int, ...] | None:
        """Ranks of the innermost note around an event; None: there is none."""
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
    found: dict[tuple[int, ...], ProcessGroup] = {}
    groups = r.job.get("pg_config")
    for group in groups if isinstance(groups, list) else ():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if not isinstance(ranks, list) or not all(isinstance(rank, int) and 0 <= rank < 1 << 20 for rank in ranks):
            continue
        members = tuple(ranks)
        if len(set(members)) == len(members) > 1 and r.rank in members:
            name, description = str(group.get("pg_name", "")), str(group.get("pg_desc", ""))
            named = ProcessGroup(name=name, description=description, ranks=members, size=len(members))
            if members not in found or _says_more(description, found[members].description):
                found[members] = named
    return list(found.values())


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
