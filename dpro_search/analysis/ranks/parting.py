"""The first collective of a group that not all of its ranks enqueued, which is how a hang looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dpro_search.analysis.ranks.answer import Parting
from dpro_search.analysis.ranks.matching import groups_of, part_of
from dpro_search.collect.readers.stamps import RankStamps
from dpro_search.collect.readers.stamps.nccl_ras import RasCommunicator, RasReport


def parting_of(stamps: Sequence[RankStamps]) -> Parting | None:
    """The earliest parting among the last records of all ranks; None if they went together up to the end."""
    partings = []
    for group, numbers in groups_of(stamps).items():
        parts = {stamps[place].rank: part_of(stamps[place], number) for place, number in numbers.items()}
        operations = {stamps[place].rank: stamps[place].operations for place in numbers}
        last = {
            rank: (operations[rank][int(part["operation"][-1])].strip("_"), int(part["sequence"][-1]))
            for rank, part in parts.items()
        }
        at_ns = max(int(part["enqueue_ns"][-1]) for part in parts.values())
        common = min(number for _, number in last.values())
        differs = _first_difference([part[part["sequence"] <= common] for part in parts.values()])
        if differs is not None:
            partings.append((at_ns, Parting(group=group.name, sequence=differs, behind=(), last=last)))
        elif any(number > common for _, number in last.values()):
            behind = tuple(rank for rank, (_, number) in last.items() if number == common)
            partings.append((at_ns, Parting(group=group.name, sequence=common + 1, behind=behind, last=last)))
    return min(partings, key=lambda each: each[0])[1] if partings else None


def _first_difference(parts: Sequence[np.ndarray]) -> int | None:
    """Sequence number from which on the ranks' operations differ."""
    count = min(map(len, parts))
    if count == 0:
        return None
    operations = np.stack([part["operation"][-count:] for part in parts])
    sizes = np.stack([part["size_bytes"][-count:] for part in parts])
    differing = np.flatnonzero((operations != operations[0]).any(axis=0) | (sizes != sizes[0]).any(axis=0))
    return int(parts[0]["sequence"][-count:][differing[0]]) if len(differing) else None


def parting_of_counts(reports: Sequence[RasReport]) -> Parting | None:
    """The parting that reports of NCCL's RAS show; None if all ranks of each communicator called as many collectives.

    Ranks of a running job are a few calls apart for moments. With several reports only ranks count that are behind in the last one
    and have not moved since the one before.
    """
    *before, last = reports
    for communicator in last.communicators:
        counts = {each.rank: each.collective_counts for each in communicator.ranks}
        earlier = _counts_before(before[-1] if before else None, communicator)
        for name in sorted({name for each in counts.values() for name in each}):
            calls = {rank: each.get(name, 0) for rank, each in counts.items()}
            most = max(calls.values())
            behind = [rank for rank, number in calls.items() if number < most and earlier.get(rank, counts[rank]) == counts[rank]]
            behind += communicator.missing
            if behind:
                least = min((calls[rank] for rank in behind if rank in calls), default=most)
                return Parting(
                    group=communicator.hash,
                    sequence=least + 1,
                    behind=tuple(sorted(behind)),
                    last={rank: (name, number) for rank, number in calls.items()},
                )
    return None


def _counts_before(report: RasReport | None, communicator: RasCommunicator) -> dict[int, Mapping[str, int]]:
    """Counts of each rank of a communicator in an earlier report; empty: there is none."""
    if report is None:
        return {}
    same = (each for each in report.communicators if each.hash == communicator.hash)
    return {each.rank: each.collective_counts for one in same for each in one.ranks}
