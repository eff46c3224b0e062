"""Warnings about what Kineto profiles lack: ranks, steps, communication; each says what can still be asked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from dpro_search._text import numbers_text, shortened
from dpro_search.collect.readers.kineto.rank import RankRecords
from dpro_search.collect.recorded_names import computes_too
from dpro_search.collect.trace import CollectiveKind, EventKind

_COUNT = re.compile(r"\d+ ")
_TRAINS = ("autograd::engine", "Optimizer.step", "optimizer.step")
_TRAINING = re.compile(r"Backward\d*$|_backward")
_WHOLE_STEP = 0.5  # of the usual number of device ops: a step at an end of the recording with fewer was cut off
_MOST_RANKS = 1 << 20


def of_ranks(ranks: Sequence[RankRecords], numbers: Sequence[int]) -> list[str]:
    """Warnings of single ranks; those that differ in their count only are one."""
    rows_of_text: dict[str, list[tuple[int, int]]] = {}
    for r, number in zip(ranks, numbers, strict=True):
        for text in r.warnings:
            count = _COUNT.match(text)
            uncounted = _COUNT.sub("", text, count=1) if count else text
            rows_of_text.setdefault(uncounted, []).append((number, int(count[0]) if count else 0))
    return [_of_some(text, rows) for text, rows in rows_of_text.items()]


def of_job(ranks: Sequence[RankRecords], numbers: Sequence[int]) -> list[str]:
    """Warnings about what the profiles lack of the job as a whole."""
    return [*_missing_devices(ranks, numbers), *_missing_ranks(ranks, numbers), *_communication(ranks), *_inference(ranks)]


def leave_out_cut_steps(r: RankRecords) -> None:
    """Leave out the first and the last recorded step if they have far fewer device ops than the others."""
    device = r.step[r.on_device & (r.step >= 0)]
    steps, counts = np.unique(device, return_counts=True)
    if len(steps) < 3:
        return
    start_us = dict(zip(r.step_number[::-1].tolist(), r.step_start_us[::-1].tolist(), strict=True))  # of two of a number, the first
    order = np.argsort([start_us[step] for step in steps.tolist()])
    usual = float(np.median(counts))
    for place in (order[0], order[-1]):
        if counts[place] < _WHOLE_STEP * usual:
            step = int(steps[place])
            r.step[r.step == step] = -1
            r.warnings.append(
                f"step {step} has {counts[place]} device ops, the others {usual:.0f}: it was cut off, and is left out; "
                "the other steps can be asked everything"
            )


def _of_some(text: str, rows: Sequence[tuple[int, int]]) -> str:
    counts = [count for _, count in rows]
    least, most = min(counts), max(counts)
    counted = "" if not most else f"{least} " if least == most else f"{least} to {most} "
    if len(rows) == 1:
        return f"rank {rows[0][0]}: {counted}{text}"
    return f"{len(rows)} ranks ({numbers_text(number for number, _ in rows)}): {counted}{text}"


def _missing_devices(ranks: Sequence[RankRecords], numbers: Sequence[int]) -> Iterator[str]:
    missing = [number for r, number in zip(ranks, numbers, strict=True) if r.unrecorded_launches]
    if missing:
        launches = sum(r.unrecorded_launches for r in ranks)
        yield (
            f"the profile of rank {numbers_text(missing)} has {launches} launches of kernels, but no record of the device that ran "
            "them: what the device did is unknown, and no what-if can be answered; record again with permission to profile the "
            "device (CUPTI needs NVreg_RestrictProfilingToAdminUsers=0 or CAP_SYS_ADMIN) and with ProfilerActivity.CUDA"
        )


def _missing_ranks(ranks: Sequence[RankRecords], numbers: Sequence[int]) -> Iterator[str]:
    world = max((r.world_size or 0 for r in ranks), default=0)
    missing = sorted(set(range(min(world, _MOST_RANKS))) - set(numbers))
    if missing:
        here = f"rank{'s' if len(numbers) > 1 else ''} {numbers_text(numbers)}"
        gone = f"rank{'s' if len(missing) > 1 else ''} {numbers_text(missing)}"
        yield (
            f"the job has {world} ranks, but only {here} {'were' if len(numbers) > 1 else 'was'} imported: how long collectives "
            f"wait for {gone} is not known, so that these waits do not change in what-ifs"
        )


def _communication(ranks: Sequence[RankRecords]) -> Iterator[str]:
    collectives = [collective for r in ranks for collective in r.collectives.values()]
    several = len(ranks) > 1 or max((r.world_size or 1 for r in ranks), default=1) > 1
    if several and not collectives:
        yield (
            "the profile has no kernel of a known communication library: what the ranks exchange is unknown; kernels, launches, "
            "input and the host can be asked about"
        )
    yield from _unknown_kernels(ranks)
    unknown = Counter(collective.label for collective in collectives if collective.kind is CollectiveKind.UNKNOWN)
    if unknown:
        names = ", ".join(name for name, _ in unknown.most_common(3)) + (", ..." if len(unknown) > 3 else "")
        number = sum(unknown.values())
        yield (
            f"{number} {'collective is' if number == 1 else 'collectives are'} of an unknown type ({names}): communication as a "
            "whole can be asked about (communication=0, bandwidth=2), collectives.TYPE=0 leaves them out"
        )


def _unknown_kernels(ranks: Sequence[RankRecords]) -> Iterator[str]:
    """Kernels of which it is not known whether, or how long, they communicate."""
    names = Counter(r.names[name] for r in ranks for name in r.name[r.kind == EventKind.UNKNOWN].tolist())
    for mixed, what in (
        (True, "compute and communicate in one"),
        (False, "were launched by ops of communication, but belong to no known library"),
    ):
        some = {name: number for name, number in names.items() if computes_too(name) == mixed}
        if some:
            shown = ", ".join(shortened(name, 60) for name in list(some)[:3]) + (", ..." if len(some) > 3 else "")
            yield (
                f"{sum(some.values())} kernels {what} ({shown}): how much of their time is communication is unknown; it counts as "
                "unknown, not as compute, and the intervals of what-ifs cover both"
            )


def _inference(ranks: Sequence[RankRecords]) -> Iterator[str]:
    has_device = any((r.kind == EventKind.KERNEL).any() for r in ranks)
    names = {r.names[i] for r in ranks for i in np.unique(r.name).tolist()}
    trains = any(name.startswith(_TRAINS) or _TRAINING.search(name) for name in names)
    if has_device and not trains:
        yield (
            "no backward pass and no optimizer were recorded: the iteration is one of inference (or the profile has no ops of the "
            "host); everything but training settings can be asked"
        )
