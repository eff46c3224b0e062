"""The ranks of a job: which records belong to which, which files are of one job, and warnings about what the profiles lack."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpro_search._text import numbers_text, shortened
from dpro_search.collect.readers.kineto.collectives import Match
from dpro_search.collect.readers.kineto.columns import Category, KinetoFile
from dpro_search.collect.readers.kineto.rank import CLOCK_SLACK_US, RankRecords
from dpro_search.collect.recorded_names import computes_too
from dpro_search.collect.trace import CollectiveKind, Dependencies, EventKind, Ints
from dpro_search.errors import InputError

Rank = tuple[RankRecords, Dependencies]

_RANK_IN_NAME = re.compile(r"(?:rank|worker|gpu|node)[-_. ]?(\d+)", re.IGNORECASE)
_LEAST_SHARE = 0.05  # a process with a smaller share of the calls of the busiest process is no rank
_SAME_BYTES = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.BROADCAST)
_SAME_JOB = ("backend", "nccl_version")  # keys of distributedInfo that have one value in a job
_COUNT = re.compile(r"\d+ ")
_TRAINS = ("autograd::engine", "Optimizer.step", "optimizer.step")
_TRAINING = re.compile(r"Backward\d*$|_backward")
_WHOLE_STEP = 0.5  # of the usual number of device ops: a step at an end of the recording with fewer was cut off
_MOST_RANKS = 1 << 20


def rows_of_ranks(file: KinetoFile) -> list[Ints]:
    """Rows of each rank: one rank, unless several processes of the host launched work (merged profiles).

    A device's records belong to the process whose calls have their correlation ids and began before them, at the steadiest
    distance: ids alone collide. As long as there are processes, each gets a device.
    """
    from scipy.optimize import linear_sum_assignment  # merged profiles are rare, and it takes long to import

    everything = np.arange(len(file), dtype=np.int64)
    on_device = np.isin(file.category, (Category.KERNEL, Category.COPY, Category.DEVICE_SYNC))
    calls = np.flatnonzero((file.category == Category.RUNTIME) & (file.correlation > 0))
    hosts, counts = np.unique(file.process[calls], return_counts=True)
    hosts = hosts[counts >= _LEAST_SHARE * counts.max()] if len(hosts) else hosts
    devices = np.unique(file.process[on_device]).tolist()
    if len(hosts) < 2 or not devices:
        return [everything]
    calls_of_host = {int(host): calls[file.process[calls] == host] for host in hosts}
    ops_of_device = [everything[on_device & (file.process == device) & (file.correlation > 0)] for device in devices]
    cost = np.array([[_misfit(file, ops, calls) for calls in calls_of_host.values()] for ops in ops_of_device])
    host_of_device = {device: list(calls_of_host)[int(row.argmin())] for device, row in zip(devices, cost, strict=True)}
    for row, column in zip(*linear_sum_assignment(cost), strict=True):
        host_of_device[devices[row]] = list(calls_of_host)[column]
    used_hosts = [host for host in calls_of_host if host in host_of_device.values()]
    if len(used_hosts) < 2:
        return [everything]
    rows = []
    for host in used_hosts:
        its_devices = [device for device in devices if host_of_device[device] == host]
        rows.append(everything[(~on_device & (file.process == host)) | (on_device & np.isin(file.process, its_devices))])
    lost = len(file) - sum(map(len, rows))
    if lost:
        file.dropped["records of processes that launched no work"] = lost
    return rows


def _misfit(file: KinetoFile, ops: Ints, calls: Ints) -> float:
    """How badly a host's calls fit device ops: ops without a call of their id before them, then how much the distance varies."""
    order = np.argsort(file.correlation[calls], kind="stable")
    ids = file.correlation[calls][order]
    at = np.minimum(np.searchsorted(ids, file.correlation[ops]), len(ids) - 1)
    same = ids[at] == file.correlation[ops]
    lag_us = file.start_us[ops] - file.start_us[calls[order[at]]]
    fits = lag_us[same & (lag_us >= -CLOCK_SLACK_US)]
    spread_us = float(np.median(np.abs(fits - np.median(fits)))) if len(fits) else 0.0
    return 1e6 * (len(ops) - len(fits)) + min(spread_us, 1e6)


def process_of(file: KinetoFile, rows: Ints) -> int | str | None:
    """The process that called the runtime, or else the operators, most often."""
    for category in (Category.RUNTIME, Category.HOST_OP):
        calls = rows[file.category[rows] == category]
        if len(calls):
            return file.processes[int(np.bincount(file.process[calls]).argmax())]
    return None


def distinct_ranks(paths: Sequence[Path], files: list[list[Rank]]) -> tuple[list[Rank], Counter[str]]:
    """The ranks of a job's files in order, and what was left out: copies of a rank's file.

    Raises
    ------
    InputError
        A rank has no number, several files are of one rank, or files are of different jobs or times.
    """
    _require_one_cycle(paths, files)
    dropped: Counter[str] = Counter()
    by_rank: dict[int, tuple[Path, Rank]] = {}
    sizes: dict[int, Path] = {}
    for path, ranks, number_in_name in zip(paths, files, _ranks_from_names(paths), strict=True):
        for r, dependencies in ranks:
            if r.rank is None:
                r.rank = 0 if number_in_name is None and len(paths) == 1 else number_in_name
            if r.rank is None:
                raise InputError(
                    f"{path}: neither its distributedInfo nor its name has the rank's number; name it rank0.json, rank1.json"
                )
            if r.world_size is not None:
                other = next((p for size, p in sizes.items() if size != r.world_size), None)
                sizes.setdefault(r.world_size, path)
                if other is not None:
                    raise InputError(f"{path}: of a job with {r.world_size} ranks, but {other} is not; import one job at a time")
            if by_rank:
                first_path, (first, _) = next(iter(by_rank.values()))
                if difference := _difference_of_jobs(first, r):
                    raise InputError(f"{path}: {difference} than in {first_path}; import one job at a time")
            if r.rank in by_rank:
                earlier_path, (earlier, _) = by_rank[r.rank]
                if not _same_records(earlier, r):
                    raise InputError(f"{path}: rank {r.rank} again, after {earlier_path}; import one file of each rank")
                dropped["copies of a rank's file"] += 1
                continue
            by_rank[r.rank] = (path, (r, dependencies))
    return [by_rank[rank][1] for rank in sorted(by_rank)], dropped


def two_jobs(ranks: Sequence[RankRecords], matches: Sequence[Match], numbers: Sequence[int]) -> str:
    """Why ranks cannot be of one job: most collectives that they would have taken part in differ in bytes; empty: they can."""
    sizes = [
        [int(ranks[position].size_bytes[event]) for position, event in match.event.items()]
        for match in matches
        if all(ranks[position].collectives[event].kind in _SAME_BYTES for position, event in match.event.items())
    ]
    known = [of_match for of_match in sizes if min(of_match) > 0]
    different = [of_match for of_match in known if min(of_match) != max(of_match)]
    if 2 * len(different) <= len(known):
        return ""
    return f"{len(different)} of {len(known)} collectives of ranks {numbers_text(numbers)} differ in bytes between the ranks"


def _difference_of_jobs(first: RankRecords, other: RankRecords) -> str:
    """Entry of the distributedInfo in which two ranks differ, so that they are not of one job; empty: none."""
    for key in _SAME_JOB:
        value, other_value = first.job.get(key), other.job.get(key)
        if value is not None and other_value is not None and value != other_value:
            return f"distributedInfo has another {key} ({other_value})"
    group, other_group = _group_of_all(first.job), _group_of_all(other.job)
    if group is not None and other_group is not None and group != other_group:
        return "distributedInfo has another process group of all ranks"
    return ""


def _group_of_all(job: dict[str, Any]) -> Any:
    """Size and members of the process group of all ranks; None: it is not listed."""
    groups = job.get("pg_config")
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and (group.get("pg_desc") == "default_pg" or group.get("pg_name") == "0"):
            return group.get("pg_size"), group.get("ranks")
    return None


def _require_one_cycle(paths: Sequence[Path], files: list[list[Rank]]) -> None:
    """Raise `InputError` if two files are of one process, one after the other, as `tensorboard_trace_handler` writes them.

    Ranks of a job run at the same time, so that two profiles that do not overlap are no two ranks, unless they say so.
    """
    first_of_process: dict[tuple[object, ...], tuple[Path, RankRecords]] = {}
    names_differ = _ranks_in_names(paths) is not None
    for path, ranks in zip(paths, files, strict=True):
        r = ranks[0][0]
        if len(ranks) > 1 or r.process is None or not len(r) or (r.rank is None and names_differ):
            continue
        other_path, other = first_of_process.setdefault((r.host, r.process, r.rank), (path, r))
        (start_ns, end_ns), (other_start_ns, other_end_ns) = _span_ns(r), _span_ns(other)
        if end_ns < other_start_ns or other_end_ns < start_ns:
            raise InputError(
                f"{path}: a second profiling cycle of the process of {other_path.name}, not another rank; "
                "import one of the two, or import each and compare them with 'dpro-search diff'"
            )


def _span_ns(r: RankRecords) -> tuple[int, int]:
    return r.origin_ns + int(r.start_us.min() * 1e3), r.origin_ns + int(r.end_us.max() * 1e3)


def _same_records(a: RankRecords, b: RankRecords) -> bool:
    return a.origin_ns == b.origin_ns and len(a) == len(b) and bool((a.start_us == b.start_us).all())


def _ranks_in_names(paths: Sequence[Path]) -> list[int] | None:
    """Numbers behind "rank" or "worker" in the names of several files; None unless they differ."""
    numbers = [_RANK_IN_NAME.findall(path.name) for path in paths]
    if len(paths) > 1 and all(numbers) and len({of_name[-1] for of_name in numbers}) == len(paths):
        return [int(of_name[-1][:9]) for of_name in numbers]
    return None


def _ranks_from_names(paths: Sequence[Path]) -> list[int] | list[None]:
    """The numbers of `_ranks_in_names`, else the only number in which the names differ."""
    if (ranks := _ranks_in_names(paths)) is not None:
        return ranks
    numbers = [re.findall(r"\d+", path.name) for path in paths]
    if len(paths) > 1 and len({len(of_name) for of_name in numbers}) == 1:
        for column in zip(*numbers, strict=True):
            if sorted(map(int, column)) == list(range(len(paths))):
                return [int(value) for value in column]
    return [None] * len(paths)


def warnings_of_job(ranks: Sequence[RankRecords], numbers: Sequence[int]) -> list[str]:
    """Warnings about what the profiles lack, each with what can still be asked."""
    return [
        *_of_ranks(ranks, numbers),
        *_missing_devices(ranks, numbers),
        *_missing_ranks(ranks, numbers),
        *_communication(ranks),
        *_inference(ranks),
    ]


def _of_ranks(ranks: Sequence[RankRecords], numbers: Sequence[int]) -> list[str]:
    """Warnings of single ranks; those that differ in their count only are one."""
    rows_of_text: dict[str, list[tuple[int, int]]] = {}
    for r, number in zip(ranks, numbers, strict=True):
        for text in r.warnings:
            count = _COUNT.match(text)
            uncounted = _COUNT.sub("", text, count=1) if count else text
            rows_of_text.setdefault(uncounted, []).append((number, int(count[0]) if count else 0))
    return [_of_some(text, rows) for text, rows in rows_of_text.items()]


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
