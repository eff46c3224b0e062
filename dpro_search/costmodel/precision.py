"""What bfloat16 does to the time of ops: ratios by kind of op, from workloads that were run in both precisions on one machine.

    model = PrecisionModel.fit(table)
    model.ratio("_MklNativeFusedConv2D")    # (0.55, 0.43, 0.70); None: not known

A ratio holds the casts that bfloat16 needs: of parameters on their way in, of gradients on their way out. Its interval is that of
the ratio of all such ops of one more workload (Student's t over the logarithms of the measured workloads' ratios).
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from scipy.stats import t as student

from dpro_search.collect._files import write_file
from dpro_search.costmodel.learned.op_classes import OTHER, kind_of
from dpro_search.errors import InputError, TraceFormatError, TraceVersionError

TABLE_VERSION = 1
BUNDLED_TABLE = Path(__file__).parent.parent / "samples" / "bfloat16-times.json.gz"
COVERAGE = 0.9
_FEWEST_WORKLOADS = 3
_LEAST_SPREAD = 0.03  # of the logarithm: no ratio is known better than runs repeat
_LEAST_SHARE = 0.005  # of a workload's time: ops that take less say little


class PrecisionRow(msgspec.Struct, frozen=True, array_like=True):
    """An op of a workload: its time in float32 and in bfloat16, and that of the casts around it, which only bfloat16 has."""

    workload: str
    type: str  # as it ran in float32
    float32_us: float
    bfloat16_us: float
    cast_us: float


class WorkloadTime(msgspec.Struct, frozen=True, array_like=True):
    """A whole step of a workload: all ops in both precisions, and what of the float32 time is not in the rows."""

    workload: str
    batch: int
    float32_us: float
    bfloat16_us: float
    unchanged_us: float


class PrecisionTable(msgspec.Struct, frozen=True, kw_only=True):
    """Measured ops with where they come from."""

    version: int = TABLE_VERSION
    kind: str = "bfloat16-times"
    machine: str
    versions: dict[str, str]
    measured_at: str
    workloads: tuple[WorkloadTime, ...]
    rows: tuple[PrecisionRow, ...]

    def save(self, path: Path) -> None:
        """Write a compressed file; the same table gives the same bytes."""
        write_file(path, gzip.compress(msgspec.json.encode(self), mtime=0))

    @staticmethod
    def load(path: Path) -> PrecisionTable:
        """Read a file written by `save`.

        Raises
        ------
        InputError
            It cannot be read.
        TraceVersionError
            Written by another version.
        TraceFormatError
            It is no such table, or damaged.
        """
        try:
            data = gzip.decompress(path.read_bytes())
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceFormatError(f"{path}: not a compressed table, or damaged ({error})") from error
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        try:
            version = msgspec.json.decode(data, type=_Version).version
            if version != TABLE_VERSION:
                raise TraceVersionError(f"{path}: table version {version}, this program reads {TABLE_VERSION}; measure it again")
            table = msgspec.json.decode(data, type=PrecisionTable)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise TraceFormatError(f"{path}: not a table of times in two precisions ({error})") from error
        times = [us for row in table.rows for us in (row.float32_us, row.bfloat16_us, row.cast_us)]
        if not all(0 <= us < math.inf for us in times):
            raise TraceFormatError(f"{path}: a time is negative or not finite")
        return table


@dataclass(frozen=True, kw_only=True)
class PrecisionModel:
    """Ratios of kinds of ops, and of types that make up enough of their kind.

    Attributes
    ----------
    machine
        Where they were measured; they hold for no other processor.
    ratios
        (ratio, lower end, upper end) by kind (`op_classes.KINDS`) or by type.
    """

    machine: str
    ratios: Mapping[str, tuple[float, float, float]]

    @staticmethod
    def fit(table: PrecisionTable, *, without: str | None = None) -> PrecisionModel:
        """The ratios of a table, if wanted without one workload's rows."""
        totals: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
        for row in table.rows:
            if row.workload != without and kind_of(row.type) != OTHER:
                for name in (kind_of(row.type), row.type):
                    both = totals[name][row.workload]
                    both[0] += row.float32_us
                    both[1] += row.bfloat16_us + row.cast_us
        whole: dict[str, float] = defaultdict(float)
        for row in table.rows:
            whole[row.workload] += row.float32_us
        found = {}
        for name, by_workload in totals.items():
            telling = [both for workload, both in by_workload.items() if both[0] > _LEAST_SHARE * whole[workload] and both[1] > 0]
            ratio = _ratio(telling)
            if ratio is not None:
                found[name] = ratio
        return PrecisionModel(machine=table.machine, ratios=found)

    @staticmethod
    def bundled(machine: str) -> PrecisionModel:
        """What the package has measured on a machine's processor; no ratio for another one.

        Parameters
        ----------
        machine
            As `TraceMeta.machine` has it.
        """
        if BUNDLED_TABLE.is_file():
            model = PrecisionModel.fit(PrecisionTable.load(BUNDLED_TABLE))
            if _processor(model.machine) == _processor(machine):
                return model
        return PrecisionModel(machine=machine, ratios={})

    def ratio(self, op_type: str) -> tuple[float, float, float] | None:
        """Time in bfloat16 over that in float32, casts included, and its 90 % interval; None where it is not known."""
        return self.ratios.get(op_type) or self.ratios.get(kind_of(op_type))


@dataclass(frozen=True, kw_only=True)
class PrecisionScore:
    """A workload predicted from all others.

    Attributes
    ----------
    float32_us, bfloat16_us, predicted_us
        Its ops in both precisions, and as predicted in bfloat16.
    error_pct
        Of the prediction.
    inside, kinds
        How many of its kinds of ops have a ratio inside the interval, of how many that have one.
    known
        Share of the float32 time of its changed ops that has a ratio.
    """

    workload: str
    float32_us: float
    bfloat16_us: float
    predicted_us: float
    error_pct: float
    inside: int
    kinds: int
    known: float


def left_out_scores(table: PrecisionTable) -> tuple[PrecisionScore, ...]:
    """Each workload as predicted from the others; an op of unknown ratio counts with its float32 time."""
    return tuple(_score(table, whole) for whole in table.workloads)


def _score(table: PrecisionTable, whole: WorkloadTime) -> PrecisionScore:
    model = PrecisionModel.fit(table, without=whole.workload)
    mine = [row for row in table.rows if row.workload == whole.workload]
    predicted, known = whole.unchanged_us, 0.0
    by_kind: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in mine:
        ratio = model.ratio(row.type)
        predicted += row.float32_us * (ratio[0] if ratio else 1.0)
        known += row.float32_us if ratio else 0.0
        both = by_kind[kind_of(row.type)]
        both[0] += row.float32_us
        both[1] += row.bfloat16_us + row.cast_us
    answered = [(both[1] / both[0], model.ratios[kind]) for kind, both in by_kind.items() if both[0] > 0 and kind in model.ratios]
    changed = sum(row.float32_us for row in mine)
    return PrecisionScore(
        workload=whole.workload,
        float32_us=whole.float32_us,
        bfloat16_us=whole.bfloat16_us,
        predicted_us=predicted,
        error_pct=(predicted / whole.bfloat16_us - 1) * 100,
        inside=sum(low <= ratio <= high for ratio, (_, low, high) in answered),
        kinds=len(answered),
        known=known / changed if changed else 0.0,
    )


def _ratio(both: Sequence[Sequence[float]]) -> tuple[float, float, float] | None:
    """Geometric mean of the workloads' ratios with the interval of one more; None with too few workloads."""
    if len(both) < _FEWEST_WORKLOADS:
        return None
    logs = np.array([math.log(bfloat16 / float32) for float32, bfloat16 in both])
    spread = max(float(logs.std(ddof=1)), _LEAST_SPREAD)
    half = float(student.ppf((1 + COVERAGE) / 2, len(logs) - 1)) * spread * math.sqrt(1 + 1 / len(logs))
    centre = float(logs.mean())
    return math.exp(centre), math.exp(centre - half), math.exp(centre + half)


def _processor(machine: str) -> str:
    """The processor of a machine that is described as "processor, cores, system"."""
    return machine.rsplit(", ", 2)[0]


class _Version(msgspec.Struct):
    version: int
