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
from dpro_search.collect.assemble.described import described
from dpro_search.collect.readers.importers import Importer
from dpro_search.collect.readers.kineto.collectives import Match, align, find_collectives, match_collectives
from dpro_search.collect.readers.kineto.columns import read_kineto_file
from dpro_search.collect.readers.kineto.dependencies import find_dependencies
from dpro_search.collect.readers.kineto.gloo import find_gloo_collectives, without_impossible_waits
from dpro_search.collect.readers.kineto.job import (
    Rank,
    distinct_ranks,
    leave_out_cut_steps,
    process_of,
    rows_of_ranks,
    two_jobs,
    warnings_of_job,
)
from dpro_search.collect.readers.kineto.rank import RankRecords, rank_records
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
_ORIGINS = ("op", "module", "source")  # columns that index the table of names
_WORTH_PROCESSES = 64 << 20  # bytes of all files

_Entry = TypeVar("_Entry", bound=Hashable)


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
    ranks, dropped = distinct_ranks(paths, _sharing(_read_files(paths)))
    for r, _ in ranks:
        dropped += r.dropped
    records = [r for r, _ in ranks]
    matches = match_collectives(records) if len(records) > 1 else []
    numbers = tuple(position if r.rank is None else r.rank for position, r in enumerate(records))
    world_size = max((r.world_size for r in records if r.world_size is not None), default=None)
    if why := two_jobs(records, matches, numbers):
        raise InputError(f"{paths[0].parent}: {why}: the profiles are of several jobs; import one job at a time")
    # Ranks whose host is unknown are taken to have clocks of their own.
    clock, warnings = align(records, matches, tuple(r.host or f"rank {number}" for r, number in zip(records, numbers, strict=True)))
    warnings += warnings_of_job(records, numbers)
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
            knobs={WORLD_SIZE: str(world_size)} if world_size else {},
            machine=records[0].host,
            devices=tuple(r.device for r in records) if all(r.device for r in records) else (),
            dropped={reason: number for reason, number in sorted(dropped.items()) if number > 0},
            warnings=tuple(warnings),
            rank_numbers=() if numbers == tuple(range(len(records))) else numbers,
            world_size=world_size,
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


def _read_files(paths: Sequence[Path]) -> Iterator[list[Rank]]:
    """Read the files, in processes of their own where that is worth it; yield the ranks of each file."""
    workers = min(len(paths), os.cpu_count() or 1)
    large = sum(path.stat().st_size for path in paths if path.exists()) > _WORTH_PROCESSES
    # Processes are forked, for that runs no script twice; with threads about, or elsewhere than on Linux, that is not safe.
    if workers > 1 and large and sys.platform == "linux" and threading.active_count() == 1:
        with ProcessPoolExecutor(workers, mp_context=get_context("fork"), max_tasks_per_child=None) as pool:
            yield from pool.map(_read_file, paths)
    else:
        yield from map(_read_file, paths)


def _read_file(path: Path) -> list[Rank]:
    file = read_kineto_file(path)
    if not len(file):
        raise TraceFormatError(f"{path}: the Kineto profile has no events{_what_was_dropped(file.dropped)}")
    ranks = []
    for number, rows in enumerate(rows_of_ranks(file)):
        r, row_of_event = rank_records(file, rows)
        r.process = process_of(file, rows)
        find_collectives(r, file, row_of_event)
        find_gloo_collectives(r)
        leave_out_cut_steps(r)
        if number:
            r.dropped.clear()  # counted for the file
        ranks.append((r, find_dependencies(r)))
        r.reduce()
    if len(ranks) > 1:
        for number, (r, _) in enumerate(ranks):
            r.rank = number
    return ranks


def _sharing(files: Iterable[list[Rank]]) -> list[list[Rank]]:
    """The ranks of all files; names and shapes that are equal, as those of most ranks are, take their memory once."""
    known: dict[Any, Any] = {}
    ranks_of_files = []
    for ranks in files:
        for r, _ in ranks:
            r.names = tuple(known.setdefault(name, name) for name in r.names)
            r.shape_table = tuple(known.setdefault(shapes, shapes) for shapes in r.shape_table)
        ranks_of_files.append(ranks)
    give_back()  # what they were sent in
    return ranks_of_files


def _what_was_dropped(dropped: dict[str, int]) -> str:
    return f" (left out: {', '.join(f'{number} {reason}' for reason, number in dropped.items())})" if dropped else ""


def _memory(ranks: Sequence[RankRecords], offsets: Floats) -> MemorySamples:
    """Memory samples of all ranks, also of times outside the steps."""
    return MemorySamples(
        rank=np.repeat(np.arange(len(ranks)), [len(r.memory_us) for r in ranks]),
        time_us=np.concatenate([r.memory_us - by for r, by in zip(ranks, offsets.tolist(), strict=True)]),
        allocated_bytes=np.concatenate([r.memory_bytes for r in ranks]),
    )


def _joined(
    ranks: Sequence[Rank], matches: Sequence[Match], offsets: Floats
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


def _renumbered(column: Codes, entries: Sequence[_Entry], table: dict[_Entry, int]) -> Codes:
    """A column that indexes a rank's own table, for the common one, which gets the entries that it lacks."""
    number = np.full(len(entries) + 1, -1, np.int32)  # the last is for -1
    used = np.unique(column[column >= 0]).tolist()
    number[used] = [table.setdefault(entries[i], len(table)) for i in used]
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
