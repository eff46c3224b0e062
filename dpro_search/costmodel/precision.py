"""Change of the time of ops by bfloat16: ratios by type, kind and family of ops, and casts, from models run in both precisions.

    model = PrecisionModel.fit(table)
    model.ratio("_MklNativeFusedConv2D", 2500.0)    # (0.47, 0.41, 0.54); None: an op of no known family
    model.cast_us(1_000_000)                        # of so many elements, in either direction

An op's ratio is that of its type in one more model, pooled with those of its kind and its family (`pooling.Pools`), and changes
with its time in float32 as ops of the family do. Casts are ops of their own: how many elements are cast follows from a plan, not
from the ops' types. Intervals hold the ratio of all such ops of one more model in 9 of 10 cases.
"""

from __future__ import annotations

import gzip
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from scipy.optimize import nnls

from dpro_search.collect._files import DAMAGED, write_file
from dpro_search.collect.readers._bytes import MOST_TABLE_BYTES, read_whole
from dpro_search.collect.trace import Floats
from dpro_search.costmodel.fused.op_classes import kind_of
from dpro_search.costmodel.pooling import Pooled, Pools
from dpro_search.errors import InputError, TraceFormatError, TraceVersionError

TABLE_VERSION = 2
BUNDLED_TABLE = Path(__file__).parent.parent / "samples" / "bfloat16-times.json.gz"
BUNDLED_TORCH_TABLE = BUNDLED_TABLE.with_name("bfloat16-times-torch.json.gz")
_CALLED = {"tensorflow": ("TensorFlow", BUNDLED_TABLE), "torch": ("PyTorch", BUNDLED_TORCH_TABLE)}  # as a table's versions have it
COVERAGE = 0.9
# Families by how a processor computes them: products have instructions of their own, arithmetic is converted on the way, moves save
# bytes.
_FAMILIES = {
    "products": "conv conv_input_grad conv_filter_grad depthwise depthwise_input_grad depthwise_filter_grad matmul batch_matmul",
    "arithmetic": "elementwise transcendental softmax reduction norm norm_grad",
    "moves": "layout movement gather pool pool_grad",
}
_FAMILY_OF = {kind: family for family, kinds in _FAMILIES.items() for kind in kinds.split()}
_LEAST_SHARE = 0.005  # of a model's time: ops that take less say little
_LEAST_US = 5.0  # the time of shorter ops is that of reading a clock


class PrecisionRow(msgspec.Struct, frozen=True, array_like=True):
    """An op of a model: its time in float32 and in bfloat16, without casts."""

    workload: str
    type: str  # as it ran in float32
    float32_us: float
    bfloat16_us: float


class CastRow(msgspec.Struct, frozen=True, array_like=True):
    """A cast that only the run in bfloat16 has."""

    workload: str
    elements: int
    us: float


class WorkloadTime(msgspec.Struct, frozen=True, array_like=True):
    """A whole step of a model: all ops in both precisions, and what of the float32 time is not in the rows."""

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
    casts: tuple[CastRow, ...]

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
        data = read_whole(path, MOST_TABLE_BYTES)
        try:
            version = msgspec.json.decode(data, type=_TableVersion).version
            if version != TABLE_VERSION:
                raise TraceVersionError(f"{path}: table version {version}, this program reads {TABLE_VERSION}; measure it again")
            table = msgspec.json.decode(data, type=PrecisionTable)
        except DAMAGED as error:
            raise TraceFormatError(f"{path}: not a table of times in two precisions ({error})") from error
        numbers = [number for row in table.rows for number in (row.float32_us, row.bfloat16_us)]
        numbers += [number for row in table.casts for number in (row.elements, row.us)]
        if not all(0 <= number < math.inf for number in numbers):
            raise TraceFormatError(f"{path}: a time or size is negative or not finite")
        return table


@dataclass(frozen=True, kw_only=True)
class SizeEffect:
    """Change of a ratio with an op's time in float32: as a power of it, between the shortest and the longest measured."""

    exponent: float
    usual_us: float
    least_us: float
    most_us: float

    def factor(self, float32_us: float | None) -> float:
        """Factor of the ratio; 1 for an op of usual or unknown time."""
        if float32_us is None:
            return 1.0
        return float((min(max(float32_us, self.least_us), self.most_us) / self.usual_us) ** self.exponent)


@dataclass(frozen=True, kw_only=True)
class PrecisionModel:
    """Ratios of ops, and what casts take."""

    machine: str  # Machine that they were measured on; they hold for no other processor.
    logarithms: Pools  # Logarithms of the ratios of types, kinds and families, at the family's usual time.
    sizes: Mapping[str, SizeEffect]  # Change of a ratio with the op's time, by family.
    # call_us, element_us: A cast, and each of its elements.
    call_us: float = 0.0
    element_us: float = 0.0
    # Time of casts in mixed bfloat16 over the float32 time of the ops that changed, on average: where sizes are not known.
    cast_share: float = 0.0

    @staticmethod
    def fit(table: PrecisionTable, *, without: str | None = None, by_size: bool = True) -> PrecisionModel:
        """The ratios of a table, if wanted without one model's rows, and the same for ops of any time."""
        rows = [row for row in table.rows if row.workload != without and row.bfloat16_us > 0 and family_of(row.type) is not None]
        by_family: dict[str, list[PrecisionRow]] = defaultdict(list)
        for row in rows:
            by_family[_FAMILY_OF[kind_of(row.type)]].append(row)
        sizes = {family: _size_effect(rows) for family, rows in by_family.items()}
        if not by_size:
            sizes = {family: replace(size, exponent=0.0) for family, size in sizes.items()}
        values, parent = _logarithms(rows, sizes)
        casts = [cast for cast in table.casts if cast.workload != without]
        call_us, element_us = _cast_costs(casts)
        changed_us = sum(row.float32_us for row in rows)
        return PrecisionModel(
            machine=table.machine,
            logarithms=Pools.fit(values, parent),
            sizes=sizes,
            call_us=call_us,
            element_us=element_us,
            cast_share=sum(cast.us for cast in casts) / changed_us if changed_us else 0.0,
        )

    def ratio(self, op_type: str, float32_us: float | None = None) -> tuple[float, float, float] | None:
        """Time in bfloat16 over that in float32, without casts, and its 90 % interval; None where nothing like it was measured."""
        family = family_of(op_type)
        if family is None:
            return None
        kind = kind_of(op_type)
        pooled = self.logarithms.of(op_type) or self.logarithms.unseen(kind) or self.logarithms.unseen(family)
        return None if pooled is None else _interval(pooled, self.sizes[family].factor(float32_us))

    def ratio_of_kind(self, kind: str) -> tuple[float, float, float] | None:
        """Ratio of all ops of a kind (`op_classes.KINDS`), at the usual time of its family."""
        family = _FAMILY_OF.get(kind)
        pooled = None if family is None else self.logarithms.of(kind) or self.logarithms.unseen(family)
        return None if pooled is None else _interval(pooled, 1.0)

    def knows(self, op_type: str) -> bool:
        """Whether ops of that kind were measured, not only of its family."""
        return self.logarithms.of(kind_of(op_type)) is not None

    def cast_us(self, elements: float) -> float:
        """Time of a cast between float32 and bfloat16."""
        return self.call_us + self.element_us * elements


@dataclass(frozen=True, kw_only=True)
class PrecisionScore:
    """A model predicted from all others."""

    workload: str
    # float32_us, bfloat16_us, predicted_us: Its ops in both precisions, and as predicted in bfloat16; what the plan casts is known.
    float32_us: float
    bfloat16_us: float
    predicted_us: float
    interval_us: tuple[float, float]  # Interval of the prediction; ratios of kinds are taken for independent of each other.
    error_pct: float  # Error of the prediction.
    # casts_us, predicted_casts_us: Its casts.
    casts_us: float
    predicted_casts_us: float
    # inside, kinds: How many of its kinds of ops have a ratio inside the interval, of how many.
    inside: int
    kinds: int
    known: float  # Share of the float32 time of its changed ops that is of kinds which the others have.


def named_model(table: Path | None, framework: Literal["tensorflow", "torch"]) -> PrecisionModel:
    """The ratios of a table that a user names; raises `InputError` if none is named, or one of another framework's ops."""
    if table is None:
        raise InputError(f"precision: {no_table(framework)}")
    measured = PrecisionTable.load(table)
    if framework not in measured.versions:
        raise InputError(f"{table}: the table is not of {_CALLED[framework][0]}'s ops; {no_table(framework)}")
    return fit_torch(measured) if framework == "torch" else PrecisionModel.fit(measured)


def no_table(framework: Literal["tensorflow", "torch"]) -> str:
    """Advice where no table says how bfloat16 changes the time of a framework's ops."""
    name, bundled = _CALLED[framework]
    return (
        f"name a table of what bfloat16 does to {name}'s ops on the job's processor (--precision-table; the package has "
        f"dpro_search/samples/{bundled.name}, of an AMD EPYC with AVX512-BF16)"
    )


def fit_torch(table: PrecisionTable, *, without: str | None = None) -> PrecisionModel:
    """The ratios of PyTorch's ops, which do not change with an op's time: models left out are predicted worse if they do."""
    return PrecisionModel.fit(table, without=without, by_size=False)


def family_of(op_type: str) -> str | None:
    """Family of an op type for a processor, one of "products", "arithmetic", "moves"; None: no work, or not known."""
    return _FAMILY_OF.get(kind_of(op_type))


def left_out_scores(table: PrecisionTable) -> tuple[PrecisionScore, ...]:
    """Each model as predicted from the others; an op of unknown ratio counts with its float32 time."""
    return tuple(_score(table, whole) for whole in table.workloads)


def _score(table: PrecisionTable, whole: WorkloadTime) -> PrecisionScore:
    model = PrecisionModel.fit(table, without=whole.workload)
    rows_of_workload = [row for row in table.rows if row.workload == whole.workload]
    known = 0.0
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)  # bfloat16; predicted, lower and upper end
    for row in rows_of_workload:
        ratio = model.ratio(row.type, row.float32_us) or (1.0, 1.0, 1.0)
        known += row.float32_us if model.knows(row.type) else 0.0
        row_us = (row.bfloat16_us, *(row.float32_us * end for end in ratio))
        sums[kind_of(row.type)] = [total + us for total, us in zip(sums[kind_of(row.type)], row_us, strict=True)]
    casts = [cast for cast in table.casts if cast.workload == whole.workload]
    predicted_casts_us = sum(model.cast_us(cast.elements) for cast in casts)
    predicted_us = whole.unchanged_us + predicted_casts_us + sum(kind[1] for kind in sums.values())
    below, above = (math.hypot(*(kind[end] - kind[1] for kind in sums.values())) for end in (2, 3))
    changed_us = sum(row.float32_us for row in rows_of_workload)
    return PrecisionScore(
        workload=whole.workload,
        float32_us=whole.float32_us,
        bfloat16_us=whole.bfloat16_us,
        predicted_us=predicted_us,
        interval_us=(predicted_us - below, predicted_us + above),
        error_pct=(predicted_us / whole.bfloat16_us - 1) * 100,
        casts_us=sum(cast.us for cast in casts),
        predicted_casts_us=predicted_casts_us,
        inside=sum(low <= us <= high for us, _, low, high in sums.values()),
        kinds=len(sums),
        known=known / changed_us if changed_us else 0.0,
    )


def _logarithms(rows: Sequence[PrecisionRow], sizes: Mapping[str, SizeEffect]) -> tuple[dict[str, Floats], dict[str, str]]:
    """Logarithms of the ratios of each type, kind and family in each model, at the usual time; and what belongs to what."""
    totals: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))
    whole: dict[str, float] = defaultdict(float)
    parent: dict[str, str] = {}
    for row in rows:
        kind = kind_of(row.type)
        family = _FAMILY_OF[kind]
        usual_us = row.float32_us * sizes[family].factor(row.float32_us)
        whole[row.workload] += row.float32_us
        parent |= {row.type: kind, kind: family}
        for name in (row.type, kind, family):
            row_us = totals[name][row.workload]
            totals[name][row.workload] = [row_us[0] + row.float32_us, row_us[1] + usual_us, row_us[2] + row.bfloat16_us]
    values = {}
    for name, by_workload in totals.items():
        telling = [row_us for workload, row_us in by_workload.items() if row_us[0] > _LEAST_SHARE * whole[workload]]
        if telling:
            values[name] = np.array([math.log(bfloat16_us / usual_us) for _, usual_us, bfloat16_us in telling])
    return values, {name: above for name, above in parent.items() if name in values}


def _size_effect(rows: Sequence[PrecisionRow]) -> SizeEffect:
    """The fit by least squares over the logarithms, each kind of each model around its own mean; every model weighs the same."""
    long = [row for row in rows if row.float32_us >= _LEAST_US]
    whole: dict[str, float] = defaultdict(float)
    groups: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    for row in long:
        whole[row.workload] += row.float32_us
    for row in long:
        point = (math.log(row.float32_us), math.log(row.bfloat16_us / row.float32_us), row.float32_us / whole[row.workload])
        groups[row.workload, kind_of(row.type)].append(point)
    if not groups:
        return SizeEffect(exponent=0.0, usual_us=1.0, least_us=1.0, most_us=1.0)
    together, squares = 0.0, 0.0
    for group in groups.values():
        size, ratio, weight = np.array(group).T
        size_off, ratio_off = (column - np.average(column, weights=weight) for column in (size, ratio))
        together += float((weight * size_off * ratio_off).sum())
        squares += float((weight * size_off**2).sum())
    size, _, weight = np.array([point for group in groups.values() for point in group]).T
    return SizeEffect(
        exponent=together / squares if squares else 0.0,
        usual_us=math.exp(np.average(size, weights=weight)),
        least_us=math.exp(size.min()),
        most_us=math.exp(size.max()),
    )


def _cast_costs(casts: Sequence[CastRow]) -> tuple[float, float]:
    """Time of a cast and of each of its elements, by least squares that meet the sum of all; neither is negative."""
    some = [cast for cast in casts if cast.us > 0]
    if not some:
        return 0.0, 0.0
    us = np.array([cast.us for cast in some])
    elements = np.array([cast.elements for cast in some], dtype=np.float64)
    weight = 1 / np.sqrt(us)  # errors grow with the root of a cast's time
    (call_us, element_us), _ = nnls(np.stack([weight, elements * weight], axis=1), us * weight)
    return float(call_us), float(element_us)


def _interval(pooled: Pooled, factor: float) -> tuple[float, float, float]:
    half = pooled.half_width(COVERAGE)
    centre, low, high = (math.exp(pooled.centre + side * half) * factor for side in (0, -1, 1))
    return centre, low, high


class _TableVersion(msgspec.Struct):
    version: int
