"""Operation-level recordings of pipeline- and data-parallel jobs, as StragglerAnalysis publishes them: one Parquet table a job.

A row is an operation of one rank in one step: computing a microbatch forward or backward, sending or receiving its activations or
gradients, a collective among data-parallel peers, or the optimizer. Times are seconds from the start of the step; the steps are
samples of a long job, so the distance between two of them is not known: here they follow each other end to end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpro_search.collect.assemble.described import described
from dpro_search.collect.readers._bytes import read_whole
from dpro_search.collect.readers.event_table import EventTable, clocks_as_recorded
from dpro_search.collect.readers.importers import Importer
from dpro_search.collect.recorded_names import collective_kind_of
from dpro_search.collect.trace import CollectiveKind, DependencyKind, EventKind, Role, Trace
from dpro_search.errors import InputError, MissingCapabilityError, TraceFormatError

FORMAT = "straggler-analysis"

_MAGIC = b"PAR1"
_COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id")
_MESSAGES = ("forward-send", "forward-recv", "backward-send", "backward-recv")
_STREAMS = {optype: number for number, optype in enumerate(_MESSAGES, start=1)}  # 0: everything else
_STAGE_PEERS = ("params-all-gather", "grads-reduce-scatter")
_COLLECTIVES = (*_STAGE_PEERS, "embedding-grads-all-reduce", "layernorm-grads-all-reduce", "optimizer-clip-main-grad")
_ROLES = {"forward-compute": Role.FORWARD, "backward-compute": Role.BACKWARD}  # other computation is the optimizer's
_MOST_STEP_S = 86_400.0  # a longer step is a damaged number


class _Row(NamedTuple):
    rank: int
    step: int
    start_s: float
    end_s: float
    optype: str
    seq: int
    chunk: int
    microbatch: int
    stage: int
    dp_rank: int

    @property
    def name(self) -> str:
        """Unique among a rank's operations in a step, and the same in all steps."""
        chunk = f" chunk {self.chunk}" if self.chunk > 0 else ""
        return f"{self.optype} {self.microbatch if self.microbatch >= 0 else self.seq}{chunk}"


def recognise(head: bytes, path: Path) -> bool:
    """Whether a file that begins with `head` is a Parquet table."""
    return head.startswith(_MAGIC)


def read(paths: Sequence[Path]) -> Trace:
    """Read the table of one job.

    Events are in the order of rank, step and start. Compute, collectives and the optimizer are on stream 0 of a rank, each kind of
    message on a stream of its own. The two ends of a message, and the parts of a collective, share a number. Sizes are not
    recorded. Dependencies express that a rank went on when what it had started before had ended.

    Raises
    ------
    InputError
        The file cannot be read, or there are several.
    MissingCapabilityError
        pyarrow is not installed.
    TraceFormatError
        Not such a table, damaged, or without rows.
    """
    if len(paths) != 1:
        raise InputError(f"{paths[0]} and {len(paths) - 1} more: one table holds a whole job; import one at a time")
    path = paths[0]
    dropped: Counter[str] = Counter()
    rows = _rows(_table(path), path, dropped)
    numbers = _collectives(rows, dropped)
    origin_us = _origins_us(rows)
    events = EventTable()
    for first, last in _rank_steps(rows):
        before: list[int] = []
        for batch in _batches(rows, first, last):
            now = [
                events.add(
                    rows[i].name,
                    _kind(rows[i].optype),
                    rank=rows[i].rank,
                    stream=_STREAMS.get(rows[i].optype, 0),
                    start_us=origin_us[rows[i].step] + rows[i].start_s * 1e6,
                    end_us=origin_us[rows[i].step] + rows[i].end_s * 1e6,
                    step=rows[i].step,
                    collective=numbers.get(i, -1),
                    collective_kind=_collective_kind(rows[i].optype),
                    role=_role(rows[i].optype),
                )
                for i in batch
            ]
            for source in before:
                for target in now:
                    events.need(source, target, DependencyKind.EVENT)
            before = now
    ranks = max(row.rank for row in rows) + 1
    lengths = _lengths_us(rows)
    steps = [
        (rank, step, origin_us[step], origin_us[step] + lengths[step]) for rank, step in {(row.rank, row.step) for row in rows}
    ]
    missing = sorted(set(range(ranks)) - {row.rank for row in rows})
    return described(
        events.trace(
            format=FORMAT,
            framework="megatron",
            comm=f"pipeline {len({row.stage for row in rows})} x data {len({row.dp_rank for row in rows})}",
            clock=clocks_as_recorded(ranks, "the publisher aligned them within each step"),
            steps=steps,
            dropped=dropped,
            warnings=(f"rank {rank} has no rows" for rank in missing),
        )
    )


def _table(path: Path) -> dict[str, list[Any]]:
    data = read_whole(path)
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingCapabilityError(f"{path}: reading Parquet needs pyarrow; pip install 'dpro-search[parquet]'") from error
    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(data))
        absent = [name for name in _COLUMNS if name not in table.column_names]
        if absent:
            raise TraceFormatError(
                f"{path}: a Parquet table without the columns {', '.join(absent)}; expected operations of StragglerAnalysis"
            )
        return {name: table.column(name).to_pylist() for name in _COLUMNS}
    except TraceFormatError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        line = str(error).partition("\n")[0]
        raise TraceFormatError(f"{path}: not a whole Parquet table ({line}); copy the file again") from error


def _rows(columns: dict[str, list[Any]], path: Path, dropped: Counter[str]) -> list[_Row]:
    """The usable rows, sorted by rank, step, start and end."""
    rows: dict[tuple[int, int, str], _Row] = {}
    for dp_rank, stage, rank, step, optype, start_s, length_s, seq, chunk, microbatch in zip(
        *(columns[name] for name in _COLUMNS), strict=True
    ):
        numbers = (rank, step, seq, chunk, microbatch, stage, dp_rank)
        if not (isinstance(optype, str) and all(isinstance(number, int) for number in numbers)):
            dropped["wrong type"] += 1
        elif not (isinstance(start_s, float) and isinstance(length_s, float) and 0 <= length_s < _MOST_STEP_S):
            dropped["without a duration"] += 1
        elif not (abs(start_s) < _MOST_STEP_S and 0 <= rank < 1_000_000 and min(step, stage, dp_rank) >= 0):
            dropped["out of range"] += 1
        else:
            row = _Row(rank, step, start_s, start_s + length_s, optype, seq, chunk, microbatch, stage, dp_rank)
            dropped["twice"] += (rank, step, row.name) in rows
            rows.setdefault((rank, step, row.name), row)
    if not rows:
        raise TraceFormatError(f"{path}: no usable operation ({sum(dropped.values())} rows were left out)")
    return sorted(rows.values())


def _kind(optype: str) -> EventKind:
    if optype in _MESSAGES or optype in _COLLECTIVES:
        return EventKind.COLLECTIVE
    return EventKind.OP if optype == "gc" else EventKind.KERNEL


def _collective_kind(optype: str) -> CollectiveKind:
    moves = _kind(optype) is EventKind.COLLECTIVE
    return collective_kind_of(optype) if moves else CollectiveKind.UNKNOWN


def _role(optype: str) -> Role:
    computes = _kind(optype) is EventKind.KERNEL
    return _ROLES.get(optype, Role.UPDATE) if computes else Role.UNKNOWN


def _collectives(rows: Sequence[_Row], dropped: Counter[str]) -> dict[int, int]:
    """Number of the message or collective of each row that is a part of one; those whose other parts are missing have none."""
    last_stage = max(row.stage for row in rows)
    members: dict[tuple[Any, ...], set[int]] = defaultdict(set)  # who takes part in a kind of collective, anywhere in the recording
    parts: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row.optype not in _MESSAGES and row.optype not in _COLLECTIVES:
            continue
        group = _group(row, last_stage + 1)
        parts[(row.step, *group)].append(i)
        if row.optype in _COLLECTIVES:
            members[group].add(row.rank)
    numbers: dict[int, int] = {}
    for number, ((_, *name), of) in enumerate(parts.items()):
        whole = len(of) == (2 if name[0] == "message" else len(members[tuple(name)]))
        dropped["parts of unmatched collectives (kept, unmatched)"] += 0 if whole else len(of)
        if whole:
            numbers |= dict.fromkeys(of, number)
    return numbers


def _group(row: _Row, stages: int) -> tuple[Any, ...]:
    """The key that all parts of one collective of a step share."""
    if row.optype in _MESSAGES:
        direction, _, end = row.optype.partition("-")
        # Forward, stage s sends to s + 1; the last sends to the first where stages hold several chunks of the model.
        receiver = row.stage if end == "recv" else (row.stage + (1 if direction == "forward" else -1)) % stages
        return "message", direction, receiver, row.dp_rank, row.seq
    if row.optype in _STAGE_PEERS:
        return row.optype, row.stage, row.seq, row.chunk
    if row.optype == "embedding-grads-all-reduce":
        return row.optype, row.dp_rank, row.seq, row.chunk
    if row.optype == "optimizer-clip-main-grad":
        return row.optype, row.seq
    return row.optype, row.rank, row.seq  # among tensor-parallel peers, of which one is recorded


def _lengths_us(rows: Sequence[_Row]) -> dict[int, float]:
    """Length of each step, from its start to the last end of any rank."""
    lengths: dict[int, float] = {}
    for row in rows:
        lengths[row.step] = max(lengths.get(row.step, 0.0), row.end_s * 1e6)
    return lengths


def _origins_us(rows: Sequence[_Row]) -> dict[int, float]:
    """Start of each step in us when the steps follow each other."""
    lengths = _lengths_us(rows)
    steps = sorted(lengths)
    return dict(zip(steps, np.cumsum([0.0] + [lengths[step] for step in steps[:-1]]).tolist(), strict=True))


def _rank_steps(rows: Sequence[_Row]) -> list[tuple[int, int]]:
    """Ranges of rows of one rank in one step."""
    cuts = [i for i in range(1, len(rows)) if rows[i][:2] != rows[i - 1][:2]]
    return list(zip([0, *cuts], [*cuts, len(rows)], strict=True))


def _batches(rows: Sequence[_Row], first: int, last: int) -> list[list[int]]:
    """Rows of a rank in a step, those together that began at one instant: messages enqueued as one batch."""
    batches = [[first]]
    for i in range(first + 1, last):
        together = rows[i].start_s == rows[i - 1].start_s and {rows[i].optype, rows[i - 1].optype} <= set(_MESSAGES)
        if together:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


IMPORTER = Importer(
    name=FORMAT,
    description="a table of operations of StragglerAnalysis (Parquet)",
    recognise=recognise,
    read=read,
)
