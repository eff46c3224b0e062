"""Collectives: what is known of a rank's part, which parts of several ranks are of one collective, and the clocks that follow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from dpro_search._text import numbers_text
from dpro_search.collect.clock import CommSpans, align_clocks
from dpro_search.collect.readers.kineto.columns import KinetoFile, rows_named
from dpro_search.collect.readers.kineto.rank import RankRecords
from dpro_search.collect.readers.kineto.records import NotedCollective, collective_of
from dpro_search.collect.recorded_names import is_communication_op, is_named_after_collective, may_communicate
from dpro_search.collect.trace import ClockReport, EventKind, Floats, Ints
from dpro_search.errors import InputError

_MOST_PAIRED = 32  # ranks of a group

_Key = tuple[Any, ...]


def find_collectives(r: RankRecords, file: KinetoFile, rows: Ints) -> None:
    """Describe a rank's collectives: kind, group and size, from the op's own record, else from the host span around its launch.

    `rows` are the events' rows of the file.
    """
    noted = np.array(sorted(file.notes), np.int64)
    noted = noted[np.isin(noted, rows)]
    noted_start, noted_thread = file.start_us[noted], file.thread[noted]
    noted_end = noted_start + file.duration_us[noted]
    for event in np.flatnonzero(r.kind == EventKind.COLLECTIVE).tolist():
        notes = [file.notes[int(rows[event])]] if int(rows[event]) in file.notes else []
        launch = int(r.launch[event])
        if launch >= 0:
            time_us = r.start_us[launch]
            around = (noted_start <= time_us) & (noted_end >= time_us) & (noted_thread == file.thread[rows[launch]])
            notes += [file.notes[int(row)] for row in noted[around]]
        r.collectives[event] = collective_of(r.names[r.name[event]], notes)
        r.size_bytes[event] = r.collectives[event].size_bytes
    _find_unknown_communication(r)


def _find_unknown_communication(r: RankRecords) -> None:
    """Kernels of no known library that ops of communication launched: with the name of a collective they communicate, else it is
    unknown what they do. What such an op computes or copies beside it stays what it is."""
    launched = (r.kind == EventKind.KERNEL) & (r.op >= 0) & rows_named(r.names, r.op, is_communication_op)
    for event in np.flatnonzero(launched & r.named(may_communicate)).tolist():
        kernel = r.names[r.name[event]]
        r.kind[event] = EventKind.UNKNOWN
        if is_named_after_collective(kernel):
            r.kind[event] = EventKind.COLLECTIVE
            r.collectives[event] = collective_of(kernel, [])


@dataclass(frozen=True, kw_only=True)
class Match:
    """A collective of several ranks: its event on each (by position in the list of ranks)."""

    label: str
    size_bytes: int
    event: Mapping[int, int]


def match_collectives(ranks: Sequence[RankRecords]) -> list[Match]:
    """Collectives that every recorded member of their group enqueued, at least two.

    Within a group and a kind, parts of one sequence number belong together; where there are no numbers, parts of one step in their
    order; and where a step has more parts on some rank than on another, those that agree in their sizes, in order.
    """
    parts: dict[_Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for position, r in enumerate(ranks):
        for event, collective in r.collectives.items():
            if collective.one_sided:
                continue
            parts[_group_of(collective, r, event)][position].append(event)
    members: dict[_Key, set[int]] = defaultdict(set)
    for key, of_rank in parts.items():
        members[key[:2]] |= set(of_rank)
    known = {r.rank for r in ranks}
    matches = []
    for key, of_rank in parts.items():
        expected = members[key[:2]]
        group_ranks = key[0] if isinstance(key[0], tuple) else None
        if group_ranks and (set(group_ranks) - known):
            continue  # a member's profile is missing: it is unknown when it enqueued
        if len(expected) < 2 or set(of_rank) != expected:
            continue
        matches += _matched(ranks, of_rank)
    matches.sort(key=lambda match: min(ranks[p].start_us[e] + ranks[p].origin_ns / 1e3 for p, e in match.event.items()))
    return matches


def _group_of(collective: NotedCollective, r: RankRecords, event: int) -> _Key:
    """The key that all parts of one collective share: group, kind, and sequence number or step."""
    group = collective.group_ranks or collective.group or ""
    if collective.sequence is not None and collective.sequence >= 0:
        return (group, collective.label, "sequence", collective.sequence)
    return (group, collective.label, "step", int(r.step[event]))


def _matched(ranks: Sequence[RankRecords], of_rank: Mapping[int, list[int]]) -> list[Match]:
    """Parts in order; where their numbers differ, those of equal size that come in the same order on all ranks."""
    counts = {len(events) for events in of_rank.values()}
    if len(counts) == 1:
        rows = list(zip(*of_rank.values(), strict=True))
        return [_match(ranks, dict(zip(of_rank, row, strict=True))) for row in rows]
    if len(next(iter(of_rank.values()))) > 10_000:
        return []
    shortest = min(of_rank, key=lambda position: len(of_rank[position]))
    partners: list[dict[int, int]] = [{shortest: event} for event in of_rank[shortest]]
    sizes = {p: [int(ranks[p].size_bytes[event]) for event in events] for p, events in of_rank.items()}
    if len({size for column in sizes.values() for size in column}) == 1:
        return []  # all alike: which one is missing is unknown
    for position, events in of_rank.items():
        if position == shortest:
            continue
        matcher = SequenceMatcher(None, sizes[shortest], sizes[position], autojunk=False)
        for block in matcher.get_matching_blocks():
            for i in range(block.size):
                partners[block.a + i][position] = events[block.b + i]
    return [_match(ranks, event) for event in partners if len(event) == len(of_rank)]


def _match(ranks: Sequence[RankRecords], event: dict[int, int]) -> Match:
    sizes = [int(ranks[p].size_bytes[e]) for p, e in event.items()]
    label = next(ranks[p].collectives[e].label for p, e in event.items())
    return Match(label=label, size_bytes=max(sizes), event=event)


def align(ranks: Sequence[RankRecords], matches: Sequence[Match], hosts: tuple[str, ...]) -> tuple[ClockReport, list[str]]:
    """Offset of each rank's clock (see `align_clocks`), and warnings.

    Ranks that share no collective with rank 0 are aligned by way of others; each such way adds its residual.
    """
    count = len(ranks)
    origin_us = np.array([(r.origin_ns - ranks[0].origin_ns) / 1e3 for r in ranks])
    of_all = [match for match in matches if len(match.event) == count]
    if of_all and len(set(hosts)) > 1:
        try:
            return align_clocks(_spans(ranks, of_all, range(count), origin_us), hosts), []
        except InputError as error:
            return _unaligned(ranks, hosts, str(error))
    if len(set(hosts)) == 1:
        return align_clocks(_spans(ranks, [], range(count), origin_us), hosts), []
    return _aligned_by_pairs(ranks, matches, hosts, origin_us)


def _aligned_by_pairs(
    ranks: Sequence[RankRecords], matches: Sequence[Match], hosts: tuple[str, ...], origin_us: Floats
) -> tuple[ClockReport, list[str]]:
    shared: dict[tuple[int, int], list[Match]] = defaultdict(list)
    for match in matches:
        members = sorted(match.event)
        bases = members if len(members) <= _MOST_PAIRED else members[:1]  # of large groups, pairs with the first connect all
        for a in bases:
            for b in members:
                if a < b:
                    shared[a, b].append(match)
    offset, residual = {0: 0.0}, {0: 0.0}
    method = ""
    pairs = sorted(shared, key=lambda pair: -len(shared[pair]))
    before = 0
    while len(offset) > before:  # the ranks that became known may lead to others
        before = len(offset)
        for pair in pairs:
            known = [rank for rank in pair if rank in offset]
            if len(known) != 1:
                continue
            base, new = known[0], pair[1] if known[0] == pair[0] else pair[0]
            try:
                report = align_clocks(_spans(ranks, shared[pair], (base, new), origin_us), ("known", "new"))
            except InputError:
                continue
            offset[new], residual[new] = offset[base] + report.offset_us[1], residual[base] + report.residual_us[1]
            method = report.method
    lost = [position for position in range(len(ranks)) if position not in offset]
    if lost:
        names = numbers_text(p if (number := ranks[p].rank) is None else number for p in lost)
        return _unaligned(ranks, hosts, f"ranks {names} share no matched collective with rank 0")
    positions = range(len(ranks))
    return ClockReport(
        offset_us=tuple(offset[p] for p in positions),
        residual_us=tuple(residual[p] for p in positions),
        method=f"by way of pairs: {method}",
    ), []


def _unaligned(ranks: Sequence[RankRecords], hosts: tuple[str, ...], why: str) -> tuple[ClockReport, list[str]]:
    """Clocks as recorded; the residual is as long as the recording, for nothing bounds it."""
    longest = max((float(r.end_us.max() - r.start_us.min()) for r in ranks if len(r)), default=0.0)
    residual = tuple(0.0 if host == hosts[0] else longest for host in hosts)
    report = ClockReport(offset_us=(0.0,) * len(ranks), residual_us=residual, method="none: clocks as recorded")
    return report, [f"clocks are not aligned: {why}"]


def _spans(ranks: Sequence[RankRecords], matches: Sequence[Match], members: Sequence[int], origin_us: Floats) -> CommSpans:
    """Starts and ends of matched collectives on some ranks, relative to rank 0's origin."""
    shape = (len(matches), len(members))
    rows = [[match.event[p] for p in members] for match in matches]
    enqueue = np.array([[ranks[p].start_us[e] for p, e in zip(members, row, strict=True)] for row in rows]).reshape(shape)
    end = np.array([[ranks[p].end_us[e] for p, e in zip(members, row, strict=True)] for row in rows]).reshape(shape)
    shift = origin_us[list(members)]
    families = {key: number for number, key in enumerate(sorted({(m.label, m.size_bytes) for m in matches}))}
    family = np.array([families[m.label, m.size_bytes] for m in matches], np.int64)
    return CommSpans(enqueue_us=enqueue + shift, end_us=end + shift, family=family)
