"""Profiles of PyTorch's Kineto, of one rank a file or of several ranks merged into one: ``read(paths) -> Trace``.

Ranks are read one after the other, or in processes of their own where the files are large: memory grows with the records of one
rank and with the columns of all. A rank's number is what its ``distributedInfo`` has, else what distinguishes the files' names.

Iterations are measured where the device ends: step k lasts from the last end of step k - 1 on any device of the rank to its own.
The host may be far ahead of its device, so that its own marks give no information on an iteration. Where no device worked, they
count.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dpro_search.collect._memory import give_back
from dpro_search.collect.described import described
from dpro_search.collect.readers.importers import Importer
from dpro_search.collect.readers.kineto.collectives import Match, align, match_collectives
from dpro_search.collect.readers.kineto.columns import Category, KinetoFile, read_kineto_file
from dpro_search.collect.readers.kineto.dependencies import find_dependencies
from dpro_search.collect.readers.kineto.gloo import find_gloo_collectives, without_impossible_waits
from dpro_search.collect.readers.kineto.limits import leave_out_cut_steps, of_job, of_ranks, other_job, two_jobs
from dpro_search.collect.readers.kineto.origins import find_origins
from dpro_search.collect.readers.kineto.rank import CLOCK_SLACK_US, RankRecords, find_unknown_communication, rank_records
from dpro_search.collect.recorded_names import dtype_of, library_of
from dpro_search.collect.trace import (
    DESCRIPTIONS,
    Codes,
    Dependencies,
    EventKind,
    Events,
    Floats,
    Ints,
    MemorySamples,
    ProcessGroup,
    Shapes,
    Steps,
    TensorInfo,
    Trace,
    TraceMeta,
)
from dpro_search.collect.trace_meta import WORLD_SIZE
from dpro_search.errors import InputError, TraceFormatError

_CATEGORIES = re.compile(
    rb'"cat"\s*:\s*"(?:[Kk]ernel|cpu_op|Operator|(?:\w+_)?(?:[Rr]untime|driver|[Mm]emcpy|[Mm]emset)|user_annotation|ac2g)"'
)
_HEADER = re.compile(rb'^\s*\{\s*(?:"[\w ]+"\s*:\s*[^,\[{]*,\s*)*"(?:schemaVersion|deviceProperties|distributedInfo)"\s*:')
_RANK_IN_NAME = re.compile(r"(?:rank|worker|gpu|node)[-_. ]?(\d+)", re.IGNORECASE)
_ORIGINS = ("op", "module", "source")  # columns that index the table of names
_LEAST_SHARE = 0.05  # of another rank's calls: a process with fewer is no rank
_WORTH_PROCESSES = 64 << 20  # bytes of all files

_Entry = TypeVar("_Entry", bound=Hashable)
_Rank = tuple[RankRecords, Dependencies]


def recognise(head: bytes, path: Path) -> bool:
    """Records of Kineto's categories, or the fields with which its files begin."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return text[:1] in (b"{", b"[") and bool(_CATEGORIES.search(text) or _HEADER.search(text))


def read(paths: Sequence[Path]) -> Trace:
    """The trace of a job's profiles.

    Raises
    ------
    InputError
        A file cannot be read, two files are of the same rank at the same time, or of jobs of different size.
    TraceFormatError
        A file is no Kineto profile or holds no event.
    """
    ranks, dropped = _distinct_ranks(paths, _sharing(_read_files(paths)))
    for r, _ in ranks:
        dropped += r.dropped
    records = [r for r, _ in ranks]
    matches = match_collectives(records) if len(records) > 1 else []
    numbers = tuple(_shown(r, position) for position, r in enumerate(records))
    if why := two_jobs(records, matches, numbers):
        raise InputError(f"{paths[0].parent}: {why}: the profiles are of several jobs; import one job at a time")
    # Ranks whose host is unknown are taken to have clocks of their own.
    clock, warnings = align(records, matches, tuple(r.host or f"rank {number}" for r, number in zip(records, numbers, strict=True)))
    warnings += [*of_ranks(records, numbers), *of_job(records, numbers)]
    offsets = np.array(clock.offset_us) - [(r.origin_ns - records[0].origin_ns) / 1e3 for r in records]
    about, tables = _descriptions(records)
    tensors, tensor = _tensors(records, matches)
    steps = _steps(records, offsets)
    libraries = _libraries(records)
    names, events, dependencies = _joined(ranks, matches, offsets)
    dependencies = without_impossible_waits(dependencies, events, max(clock.residual_us))
    trace = Trace(
        meta=TraceMeta(
            framework="pytorch",
            comm=libraries,
            ranks=len(records),
            hosts=tuple(r.host for r in records),
            cores=(-1,) * len(records),
            format="kineto",
            clock=clock,
            versions={"files": str(len(paths))},
            knobs={WORLD_SIZE: str(world)} if (world := _world_size(records)) else {},
            machine=records[0].host,
            devices=tuple(r.device for r in records) if all(r.device for r in records) else (),
            dropped={reason: number for reason, number in sorted(dropped.items()) if number > 0},
            warnings=tuple(warnings),
            rank_numbers=() if numbers == tuple(range(len(records))) else numbers,
            world_size=_world_size(records),
            unrecorded_devices=tuple(place for place, r in enumerate(records) if r.unrecorded_launches),
        ),
        names=names,
        events=Events(**events, **about, tensor=tensor),
        steps=steps,
        tensors=tensors,
        graphs=(),
        graph_of_rank=(-1,) * len(records),
        dependencies=dependencies,
        memory=_memory(records, offsets),
        **tables,
    )
    whole = all(r.world_size == len(records) for r in records)
    return described(trace, numbers) if whole else trace


def _read_files(paths: Sequence[Path]) -> Iterator[list[_Rank]]:
    """The ranks of each file."""
    workers = min(len(paths), os.cpu_count() or 1)
    large = sum(path.stat().st_size for path in paths if path.exists()) > _WORTH_PROCESSES
    # Processes are forked, for that runs no script twice; with threads about, or elsewhere than on Linux, that is not safe.
    if workers > 1 and large and sys.platform == "linux" and threading.active_count() == 1:
        with ProcessPoolExecutor(workers, mp_context=get_context("fork"), max_tasks_per_child=None) as pool:
            yield from pool.map(_read_file, paths)
    else:
        yield from map(_read_file, paths)


def _read_file(path: Path) -> list[_Rank]:
    file = read_kineto_file(path)
    if not len(file):
        raise TraceFormatError(f"{path}: the Kineto profile has no events{_what_was_dropped(file.dropped)}")
    found = []
    for number, rows in enumerate(_rows_of_ranks(file)):
        r, row_of_event = rank_records(file, rows, rank=None)
        r.process = _process_of(file, rows)
        find_origins(r, file, row_of_event)
        find_unknown_communication(r)
        find_gloo_collectives(r)
        leave_out_cut_steps(r)
        if number:
            r.dropped.clear()  # counted for the file
        found.append((r, find_dependencies(r)))
        r.reduce()
    if len(found) > 1:
        for number, (r, _) in enumerate(found):
            r.rank = number
    return found


def _process_of(file: KinetoFile, rows: Ints) -> int | str | None:
    """The process that called the runtime, or else the operators, most often."""
    for category in (Category.RUNTIME, Category.HOST_OP):
        calls = rows[file.category[rows] == category]
        if len(calls):
            return file.processes[int(np.bincount(file.process[calls]).argmax())]
    return None


def _sharing(files: Iterable[list[_Rank]]) -> list[list[_Rank]]:
    """The ranks of all files; names and shapes that are equal, as those of most ranks are, take their memory once."""
    known: dict[Any, Any] = {}
    found = []
    for ranks in files:
        for r, _ in ranks:
            r.names = tuple(known.setdefault(name, name) for name in r.names)
            r.shape_table = tuple(known.setdefault(shapes, shapes) for shapes in r.shape_table)
        found.append(ranks)
    give_back()  # what they were sent in
    return found


def _what_was_dropped(dropped: dict[str, int]) -> str:
    return f" (left out: {', '.join(f'{number} {reason}' for reason, number in dropped.items())})" if dropped else ""


def _rows_of_ranks(file: KinetoFile) -> list[Ints]:
    """Rows of each rank: one, unless several processes of the host launched work (merged profiles).

    A device's records belong to the process whose calls have their correlation ids and began before them, at the steadiest
    distance: ids alone collide. As long as there are processes, each gets a device.
    """
    from scipy.optimize import linear_sum_assignment  # merged profiles are rare, and it takes long to import

    everything = np.arange(len(file), dtype=np.int64)
    device = np.isin(file.category, (Category.KERNEL, Category.COPY, Category.DEVICE_SYNC))
    calls = np.flatnonzero((file.category == Category.RUNTIME) & (file.correlation > 0))
    hosts, counts = np.unique(file.process[calls], return_counts=True)
    hosts = hosts[counts >= _LEAST_SHARE * counts.max()] if len(hosts) else hosts
    processes = np.unique(file.process[device]).tolist()
    if len(hosts) < 2 or not processes:
        return [everything]
    of_process = {int(host): calls[file.process[calls] == host] for host in hosts}
    ops = [everything[device & (file.process == process) & (file.correlation > 0)] for process in processes]
    cost = np.array([[_misfit(file, mine, calls_of_host) for calls_of_host in of_process.values()] for mine in ops])
    owner = {process: list(of_process)[int(row.argmin())] for process, row in zip(processes, cost, strict=True)}
    for row, column in zip(*linear_sum_assignment(cost), strict=True):
        owner[processes[row]] = list(of_process)[column]
    used = [host for host in of_process if host in owner.values()]
    if len(used) < 2:
        return [everything]
    rows = []
    for host in used:
        mine = [process for process, of in owner.items() if of == host]
        rows.append(everything[(~device & (file.process == host)) | (device & np.isin(file.process, mine))])
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


def _distinct_ranks(paths: Sequence[Path], files: list[list[_Rank]]) -> tuple[list[_Rank], Counter[str]]:
    """Ranks in order; several files of one rank are refused, but for copies of one another, which count once."""
    numbers = _ranks_from_names(paths)
    _require_one_cycle(paths, files)
    dropped: Counter[str] = Counter()
    by_rank: dict[int, tuple[Path, _Rank]] = {}
    sizes: dict[int, Path] = {}
    for path, ranks, from_name in zip(paths, files, numbers, strict=True):
        for r, needs in ranks:
            if r.rank is None:
                r.rank = from_name if from_name is not None else (0 if len(paths) == 1 else None)
            if r.rank is None:
                raise InputError(
                    f"{path}: neither its distributedInfo nor its name has the rank's number; name it rank0.json, rank1.json"
                )
            if r.world_size is not None:
                other = next((p for size, p in sizes.items() if size != r.world_size), None)
                sizes.setdefault(r.world_size, path)
                if other is not None:
                    raise InputError(f"{path}: of a job with {r.world_size} ranks, but {other} is not; import one job at a time")
            if (different := other_job(next(iter(by_rank.values()))[1][0], r) if by_rank else "") != "":
                raise InputError(f"{path}: {different} than in {next(iter(by_rank.values()))[0]}; import one job at a time")
            if r.rank in by_rank:
                before = by_rank[r.rank]
                if _same(before[1][0], r):
                    dropped["copies of a rank's file"] += 1
                    continue
                raise InputError(f"{path}: rank {r.rank} again, after {before[0]}; import one file of each rank")
            by_rank[r.rank] = (path, (r, needs))
    return [by_rank[rank][1] for rank in sorted(by_rank)], dropped


def _require_one_cycle(paths: Sequence[Path], files: list[list[_Rank]]) -> None:
    """Raise `InputError` if two files are of one process, one after the other, as `tensorboard_trace_handler` writes them.

    Ranks of a job run at the same time, so that two profiles that do not overlap are no two ranks, unless they say so.
    """
    seen: dict[tuple[object, ...], tuple[Path, RankRecords]] = {}
    said = _ranks_said(paths) is not None
    for path, ranks in zip(paths, files, strict=True):
        r = ranks[0][0]
        if len(ranks) > 1 or r.process is None or not len(r) or (r.rank is None and said):
            continue
        other_path, other = seen.setdefault((r.host, r.process, r.rank), (path, r))
        (first_ns, first_end_ns), (second_ns, second_end_ns) = _span_ns(r), _span_ns(other)
        if first_end_ns < second_ns or second_end_ns < first_ns:
            raise InputError(
                f"{path}: a second profiling cycle of the process of {other_path.name}, not another rank; "
                "import one of the two, or import each and compare them with 'dpro-search diff'"
            )


def _span_ns(r: RankRecords) -> tuple[int, int]:
    return r.origin_ns + int(r.start_us.min() * 1e3), r.origin_ns + int(r.end_us.max() * 1e3)


def _same(a: RankRecords, b: RankRecords) -> bool:
    return a.origin_ns == b.origin_ns and len(a) == len(b) and bool((a.start_us == b.start_us).all())


def _ranks_said(paths: Sequence[Path]) -> list[int] | None:
    """Numbers behind "rank" or "worker" in the names of several files; None unless they differ."""
    found = [_RANK_IN_NAME.findall(path.name) for path in paths]
    if len(paths) > 1 and all(found) and len({match[-1] for match in found}) == len(paths):
        return [int(match[-1][:9]) for match in found]
    return None


def _ranks_from_names(paths: Sequence[Path]) -> list[int | None]:
    """The numbers of `_ranks_said`, else the only number in which the names differ."""
    if (said := _ranks_said(paths)) is not None:
        return list(said)
    numbers = [re.findall(r"\d+", path.name) for path in paths]
    if len(paths) > 1 and len({len(n) for n in numbers}) == 1:
        for column in zip(*numbers, strict=True):
            if sorted(map(int, column)) == list(range(len(paths))):
                return [int(value) for value in column]
    return [None] * len(paths)


def _shown(r: RankRecords, position: int) -> int:
    return position if r.rank is None else r.rank


def _world_size(ranks: Sequence[RankRecords]) -> int | None:
    return max((r.world_size for r in ranks if r.world_size is not None), default=None)


def _memory(ranks: Sequence[RankRecords], offsets: Floats) -> MemorySamples:
    """What was counted of all ranks; what lies outside the steps too."""
    return MemorySamples(
        rank=np.repeat(np.arange(len(ranks)), [len(r.memory_us) for r in ranks]),
        time_us=np.concatenate([r.memory_us - by for r, by in zip(ranks, offsets.tolist(), strict=True)]),
        allocated_bytes=np.concatenate([r.memory_bytes for r in ranks]),
    )


def _joined(
    ranks: Sequence[_Rank], matches: Sequence[Match], offsets: Floats
) -> tuple[tuple[str, ...], dict[str, Any], Dependencies]:
    """Names, columns and dependencies of all ranks; ranks are numbered by their place. Their own columns are given up."""
    table: dict[str, int] = {}
    lengths = [len(r) for r, _ in ranks]
    first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    events: dict[str, Any] = {"rank": np.repeat(np.arange(len(ranks)), lengths)}
    events["collective"] = np.full(first[-1], -1, np.int64)
    for number, match in enumerate(matches):
        for position, event in match.event.items():
            events["collective"][first[position] + event] = number
    for position, (r, _) in enumerate(ranks):
        r.name = _renumbered(r.name, r.names, table)
        for name in _ORIGINS:
            setattr(r, name, _renumbered(getattr(r, name), r.names, table))
        r.start_us = r.start_us - offsets[position]
        r.end_us = r.end_us - offsets[position]
    for name in ("name", "kind", "stream", "start_us", "end_us", "step", "size_bytes", *_ORIGINS):
        events[name] = np.empty(first[-1], np.float64 if name.endswith("_us") else np.int32 if name in _ORIGINS else np.int64)
        for position, (r, _) in enumerate(ranks):
            events[name][first[position] : first[position + 1]] = getattr(r, name)
            setattr(r, name, None)
        give_back()
    needs = [needs for _, needs in ranks]
    moved = [np.int64(first[position]) for position in range(len(ranks))]
    dependencies = Dependencies(
        source=np.concatenate([each.source + by for each, by in zip(needs, moved, strict=True)]),
        target=np.concatenate([each.target + by for each, by in zip(needs, moved, strict=True)]),
        kind=np.concatenate([each.kind for each in needs]),
    )
    return tuple(table), events, dependencies


def _libraries(ranks: Sequence[RankRecords]) -> str:
    """The libraries that communicate, by the names of their kernels and records: "nccl"; "unknown" if no name tells."""
    names = {r.names[r.name[event]] for r in ranks for event in r.collectives}
    libraries = sorted({library for name in names if (library := library_of(name))})
    return "+".join(libraries) or ("unknown" if names else "none")


def _descriptions(ranks: Sequence[RankRecords]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns that describe what events are about, and the tables that they index, of all ranks."""
    groups: dict[ProcessGroup, int] = {}
    dtypes: dict[str, int] = {}
    shapes: dict[Shapes, int] = {}
    columns: dict[str, list[Codes]] = {name: [] for name in DESCRIPTIONS if name not in _ORIGINS}
    for r in ranks:
        kind, group = np.full(len(r), -1, np.int8), np.full(len(r), -1, np.int32)
        dtype = _renumbered(r.dtype, r.dtypes, dtypes)
        for event, collective in r.collectives.items():
            kind[event] = collective.kind
            if collective.process_group is not None:
                group[event] = groups.setdefault(collective.process_group, len(groups))
            if name := dtype_of(collective.dtype):
                dtype[event] = dtypes.setdefault(name, len(dtypes))
        described: dict[str, Codes] = {
            "collective_kind": kind,
            "group": group,
            "dtype": dtype,
            "shapes": _renumbered(r.shapes, r.shape_table, shapes),
            "role": r.role,
        }
        for name, column in described.items():
            columns[name].append(column)
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    return joined, {"groups": tuple(groups), "dtypes": tuple(dtypes), "shapes": tuple(shapes)}


def _renumbered(column: Codes, own: Sequence[_Entry], table: dict[_Entry, int]) -> Codes:
    """A column that indexes a rank's own table, for the common one, which gets the entries that it lacks."""
    number = np.full(len(own) + 1, -1, np.int32)  # the last is for -1
    used = np.unique(column[column >= 0]).tolist()
    number[used] = [table.setdefault(own[i], len(table)) for i in used]
    return number[column]


def _tensors(ranks: Sequence[RankRecords], matches: Sequence[Match]) -> tuple[tuple[TensorInfo, ...], Ints]:
    """A tensor for each collective of a step, named by kind, group and place among them: equal on all ranks and in all steps."""
    infos: dict[str, TensorInfo] = {}
    numbers: dict[str, int] = {}
    columns = []
    for r in ranks:
        column = np.full(len(r), -1, np.int64)
        seen: Counter[tuple[int, str]] = Counter()
        for event in sorted(r.collectives):
            collective = r.collectives[event]
            group = f"{collective.label}/{collective.group}" if collective.group else collective.label
            step = int(r.step[event])
            name = f"{group}#{seen[step, group]}"
            seen[step, group] += 1
            column[event] = numbers.setdefault(name, len(numbers))
            if name not in infos or infos[name].size_bytes < collective.size_bytes:
                infos[name] = TensorInfo(name=name, node="", dtype=collective.dtype, shape=(), size_bytes=collective.size_bytes)
        columns.append(column)
    return tuple(infos[name] for name in numbers), np.concatenate(columns)


def _steps(ranks: Sequence[RankRecords], offsets: Floats) -> Steps:
    """Steps by the ends of their device ops."""
    columns: dict[str, list[Any]] = {name: [] for name in ("rank", "index", "start_us", "end_us")}
    for position, r in enumerate(ranks):
        previous_us = None
        order = np.argsort(r.step_number)
        of_step = np.full(len(r), -1)  # place of each event's step among those of the rank
        inside = np.flatnonzero(r.step >= 0)
        of_step[inside] = order[np.searchsorted(r.step_number, r.step[inside], sorter=order)]
        present = np.bincount(of_step[inside], minlength=len(order)) > 0
        device_end_us = np.full(len(order), -np.inf)
        device = np.flatnonzero(r.on_device & (r.kind != EventKind.COLLECTIVE) & (of_step >= 0))
        if len(device):
            device = np.flatnonzero(r.on_device & (of_step >= 0))
        np.maximum.at(device_end_us, of_step[device], r.end_us[device])
        for place in np.flatnonzero(present).tolist():
            start_us, end_us = float(r.step_start_us[place]), float(r.step_end_us[place])
            until_us = float(device_end_us[place]) if np.isfinite(device_end_us[place]) else end_us
            since_us = start_us if previous_us is None else previous_us
            columns["rank"].append(position)
            columns["index"].append(int(r.step_number[place]))
            columns["start_us"].append(min(since_us, until_us) - offsets[position])
            columns["end_us"].append(until_us - offsets[position])
            previous_us = until_us
    count = len(columns["rank"])
    return Steps(
        rank=np.array(columns["rank"], np.int64),
        index=np.array(columns["index"], np.int64),
        start_us=np.array(columns["start_us"], np.float64),
        end_us=np.array(columns["end_us"], np.float64),
        traced=np.ones(count, np.bool_),
        compute_cpu_us=np.full(count, np.nan),
        comm_cpu_us=np.full(count, np.nan),
    )


IMPORTER = Importer(
    name="kineto",
    description="a Kineto profile of PyTorch (JSON with records of categories such as kernel, cpu_op or cuda_runtime)",
    recognise=recognise,
    read=read,
)
