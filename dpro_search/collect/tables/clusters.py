"""Measured clusters of ops, as a table on disk: one JSON object a line; the first states where the rows come from.

Rows are only ever appended, so that a killed collection continues where it stopped. A row holds the cluster itself (op types,
wiring, shapes, times of its ops), not features of it: features can change without measuring again.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dpro_search._regular_files import read_regular
from dpro_search.collect._files import write_file
from dpro_search.collect.readers._bytes import MOST_TABLE_BYTES
from dpro_search.collect.tables.json_lines import Head, as_lines, read_header, read_rows
from dpro_search.errors import InputError, MissingCapabilityError, TraceFormatError

TABLE_VERSION = 2
_READ_VERSIONS = (1, 2)  # 1: ops without `ran_as`, constants without values, fewer attributes
_MOST_ELEMENTS = 2**40  # of a tensor; a thousand times what a device holds
ROLES = ("in", "const", "variable", "inner", "out")
_SAMPLES = Path(__file__).parent.parent.parent / "samples"
TABLE_NAME, MODEL_NAME = "xla-clusters.jsonl.gz", "xla-fusion-model"


class ClusterOp(msgspec.Struct, frozen=True, array_like=True):
    """An op of a cluster."""

    type: str  # TensorFlow's, as the step's graph has it before it is optimized.
    # inputs, outputs: Tensors, in the order of the op's arguments and results.
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    # All that are not as the op's definition has them, but types, shapes and names: strides, padding, transposed operands, an
    # einsum's equation, kept axes.
    attributes: dict[str, str] = {}
    # Type under which the framework ran it in isolation: of a fused or replaced op, the new one's. Empty where it did not run in
    # isolation, or where that was not written (version 1).
    ran_as: str = ""


class ClusterTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that ops of a cluster read or write.

    `role`: "in" (made outside), "const", "variable" (read or written in place), "inner", or "out" (needed outside). `value`: the
    elements of a small constant, such as the axes of a reduction; empty for anything else.
    """

    dtype: str
    shape: tuple[int, ...]
    role: str
    value: tuple[int | float, ...] = ()


class OpCluster(msgspec.Struct, frozen=True, kw_only=True):
    """Ops that run, or would run, as one: k of them, in topological order."""

    ops: tuple[ClusterOp, ...]
    tensors: tuple[ClusterTensor, ...]
    # Least time of each op in isolation, in a function of these ops alone, [k]; 0 where another op did its work.
    op_us: tuple[float, ...]
    # Median time of each in a whole training step, as a trace of a job has it, [k]; empty where that was not measured.
    step_op_us: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.ops or len(self.op_us) != len(self.ops):
            raise ValueError(f"{len(self.ops)} ops with {len(self.op_us)} times")
        if len(self.step_op_us) not in (0, len(self.ops)):
            raise ValueError(f"{len(self.ops)} ops with {len(self.step_op_us)} times of a step")
        if not all(0 <= us < float("inf") for us in self.op_us + self.step_op_us):
            raise ValueError("a time of an op is negative or not finite")
        used = [number for op in self.ops for number in op.inputs + op.outputs]
        if used and not 0 <= min(used) <= max(used) < len(self.tensors):
            raise ValueError(f"an op names a tensor outside of the {len(self.tensors)}")
        if any(tensor.role not in ROLES or min(tensor.shape, default=0) < 0 for tensor in self.tensors):
            raise ValueError("a tensor has an unknown role or a negative size")
        if any(math.prod(tensor.shape) > _MOST_ELEMENTS for tensor in self.tensors):
            raise ValueError(f"a tensor has more than {_MOST_ELEMENTS:,} elements")

    @property
    def left_out(self) -> tuple[bool, ...]:
        """Whether each op did not run unfused, because only updates of variables need it although the cluster has results.

        TensorFlow's optimizer takes such updates for dead code where no result waits for them. Collectors did not always let one
        wait, so that older tables have such rows; the compiled cluster does the updates.
        """
        users: dict[int, list[int]] = {}
        for i, op in enumerate(self.ops):
            for number in op.inputs:
                users.setdefault(number, []).append(i)
        left_out = [False] * len(self.ops)
        if any(tensor.role == "out" for tensor in self.tensors):
            for i in range(len(self.ops) - 1, -1, -1):
                needed = (
                    self.tensors[number].role == "out" or not all(left_out[user] for user in users.get(number, ()))
                    for number in self.ops[i].outputs
                )
                left_out[i] = self.op_us[i] == 0 and not any(needed)
        return tuple(left_out)

    @property
    def fingerprint(self) -> str:
        """Equal for clusters of equal ops, shapes and wiring, whatever the times and names."""
        made: dict[int, bytes] = {}
        leaves = Counter(number for op in self.ops for number in op.inputs)
        parts = []
        for op in self.ops:
            inputs = [made.get(number) or repr((self.tensors[number], leaves[number])).encode() for number in op.inputs]
            outputs = [repr((self.tensors[number], leaves[number])).encode() for number in op.outputs]
            kind = repr((op.type, sorted(op.attributes.items()))).encode()
            digest = hashlib.blake2b(b"\0".join([kind, *inputs, b"->", *outputs]), digest_size=12).digest()
            parts.append(digest)
            made |= {number: digest + bytes([port % 256]) for port, number in enumerate(op.outputs)}
        return hashlib.blake2b(b"".join(sorted(parts)), digest_size=12).hexdigest()


class TableHeader(msgspec.Struct, frozen=True, kw_only=True, tag="header", tag_field="row"):
    """Provenance of all rows of a table."""

    version: int = TABLE_VERSION
    kind: str = "xla-clusters"
    machine: str
    versions: dict[str, str]
    started_at: str


class MeasuredCluster(msgspec.Struct, frozen=True, kw_only=True, tag="measured", tag_field="row"):
    """A cluster of a model's training step, measured. Rounds alternate: unfused, fused, unfused, fused, ..."""

    model: str
    batch: int
    index: int  # which draw of this model and batch
    cluster: OpCluster
    unfused_min_us: tuple[float, ...]  # [rounds] with the call, as all of these
    unfused_median_us: tuple[float, ...]
    fused_min_us: tuple[float, ...]
    fused_median_us: tuple[float, ...]
    call_min_us: tuple[float, ...]  # [rounds] a call with as many arguments and results that computes nothing
    xla_run_us: float  # the compiled cluster alone
    other_us: float  # ops that the framework added to the members
    compile_s: float

    def __post_init__(self) -> None:
        rounds = (self.unfused_min_us, self.fused_min_us, self.call_min_us)
        if not all(rows and all(0 < us < float("inf") for us in rows) for rows in rounds):
            raise ValueError("a measured time is missing, not positive or not finite")

    @property
    def fused_us(self) -> float:
        """Least time of the cluster, without the call; no cluster is faster than a tenth of a microsecond."""
        return max(min(self.fused_min_us) - min(self.call_min_us), 0.1)

    @property
    def unfused_us(self) -> float:
        """Least time of its ops one after the other, without the call."""
        return max(min(self.unfused_min_us) - min(self.call_min_us), 0.1)

    @property
    def noise_us(self) -> float:
        """How far the two best rounds of each kind are apart, summed: a smaller difference of the two kinds is noise."""
        return sum(_spread(rows) for rows in (self.unfused_min_us, self.fused_min_us))

    @property
    def pays(self) -> bool | None:
        """Whether the ops took less time fused; None where the two differ by no more than the noise, or are not of the same ops."""
        if abs(self.unfused_us - self.fused_us) <= self.noise_us or any(self.cluster.left_out):
            return None
        return self.fused_us < self.unfused_us


class FailedCluster(msgspec.Struct, frozen=True, kw_only=True, tag="failed", tag_field="row"):
    """A cluster that could not be measured."""

    model: str
    batch: int
    index: int
    reason: str


Row = MeasuredCluster | FailedCluster


@dataclass(frozen=True, kw_only=True)
class ClusterTable:
    """A table as read. `dropped`: lines that are no rows, by reason."""

    header: TableHeader
    rows: tuple[Row, ...]
    dropped: dict[str, int]

    @property
    def measured(self) -> tuple[MeasuredCluster, ...]:
        """The rows with times."""
        return tuple(row for row in self.rows if isinstance(row, MeasuredCluster))

    @property
    def failures(self) -> dict[str, int]:
        """How many clusters have no times, by reason."""
        return dict(Counter(row.reason for row in self.rows if isinstance(row, FailedCluster)).most_common())


def read_table(path: Path) -> ClusterTable:
    """Read a table, compressed (``.gz``) or not.

    Lines that are cut off or damaged are left out and counted.

    Raises
    ------
    InputError
        The file cannot be read.
    TraceFormatError
        It does not begin as a table does, or is larger than any.
    TraceVersionError
        It was written by another version.
    """
    try:
        data = read_regular(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    dropped: Counter[str] = Counter()
    if data[:2] == b"\x1f\x8b":
        data, whole = _decompressed(path, data)
        if not whole:
            dropped["the compressed file is cut off or damaged"] += 1
    head, *lines = data.split(b"\n")
    header = read_header(path, head, _ClustersHead, TableHeader, _READ_VERSIONS, "measured clusters")
    rows, reasons = read_rows(lines, Row)
    return ClusterTable(header=header, rows=tuple(rows), dropped=dict(dropped + reasons))


class TableWriter:
    """Appends rows to a table; starts it where none exists, and mends a last line that was cut off."""

    def __init__(self, path: Path, header: TableHeader) -> None:
        self._path = path
        if path.exists():
            if path.suffix == ".gz":
                raise InputError(f"{path}: a compressed table cannot be continued; unpack it first")
            known = read_table(path)
            if (known.header.machine, known.header.versions) != (header.machine, header.versions):
                raise InputError(f"{path}: was collected on another machine or with other versions; choose another --out")
            if known.header.version != TABLE_VERSION:
                raise InputError(f"{path}: table version {known.header.version} cannot be continued; choose another --out")
            self.rows = known.rows
            end = path.read_bytes().rfind(b"\n") + 1
            with path.open("r+b") as file:
                file.truncate(end)
        else:
            self.rows = ()
            write_file(path, msgspec.json.encode(header) + b"\n")

    def append(self, row: Row) -> None:
        """Add a row and hand it to the system at once."""
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(row) + b"\n")
        except OSError as error:
            raise MissingCapabilityError(f"{self._path}: cannot be written ({error.strerror})") from error


def compact(table: ClusterTable, path: Path) -> None:
    """Write a table in one piece, compressed: for shipping. The same rows give the same bytes."""
    write_file(path, as_lines(table.header, table.rows, compressed=True))


class _ClustersHead(Head):
    row: str


def _spread(rows: Sequence[float]) -> float:
    first, second = (sorted(rows) * 2)[:2] if len(rows) == 1 else sorted(rows)[:2]
    return second - first


def _decompressed(path: Path, data: bytes) -> tuple[bytes, bool]:
    """(what can be had, whether that is all)."""
    stream = zlib.decompressobj(wbits=31)
    content = bytearray()
    try:
        for start in range(0, len(data), 1 << 16):
            content += stream.decompress(data[start : start + (1 << 16)])
            if len(content) > MOST_TABLE_BYTES:
                raise TraceFormatError(f"{path}: more than {MOST_TABLE_BYTES / 2**30:g} GiB when unpacked; not a table of clusters")
    except zlib.error:
        return bytes(content), False
    return bytes(content), stream.eof


def bundled_table_path() -> Path:
    """The table; raises `MissingCapabilityError` if the package was built without it."""
    path = _SAMPLES / TABLE_NAME
    if not path.is_file():
        raise MissingCapabilityError(f"{path}: no bundled table in this installation; name a TABLE made by --collect xla")
    return path


def bundled_model_path() -> Path:
    """The trained model's folder; raises `MissingCapabilityError` if the package was built without it."""
    path = _SAMPLES / MODEL_NAME
    if not path.is_dir():
        raise MissingCapabilityError(
            f"{path}: no bundled model of fused ops in this installation; train one with 'dpro-search fit' and name its folder"
        )
    return path
