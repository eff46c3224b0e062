"""The table of ops while `recorded_ops` makes it: rows, blocks of rows in columns, and numbers for rows that are alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt

from dpro_search.collect.trace import Ints
from dpro_search.graph.dataflow import OpKind


class TableOp(NamedTuple):
    """One op, as a row of the table that becomes `RecordedOps`."""

    device: int
    duration_us: float
    kind: OpKind
    step: int
    role: int
    name: int  # Index into the trace's names.
    about: int = -1  # Event that it is, launches, or ends before.
    event: int = -1
    on_device: bool = False
    collective: int = -1
    known: bool = True
    unexplained_us: float = 0.0
    lead_us: float = 0.0
    loading_us: float = 0.0
    end_us: float = math.nan  # Recorded end of a stretch of a host thread.


Block = dict[str, npt.NDArray[Any]]
_TYPES = {int: np.int64, OpKind: np.int8, float: np.float64, bool: np.bool_}
COLUMNS = {name: np.dtype(_TYPES[kind]) for name, kind in get_type_hints(TableOp).items()}


def block_of(rows: Sequence[TableOp]) -> Block:
    """The rows in columns."""
    columns = zip(TableOp._fields, zip(*rows, strict=True), strict=True)
    return {name: np.array(column, COLUMNS[name]) for name, column in columns}


def empty_block(rows: int) -> Block:
    """So many rows, whose fields have their defaults, or 0 where they have none."""
    return {name: np.full(rows, TableOp._field_defaults.get(name, 0), dtype) for name, dtype in COLUMNS.items()}


def codes(*columns: Ints) -> Ints:
    """A number for each row, equal where all columns are, [n]; they increase in the order of the columns."""
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        _, value = np.unique(column, return_inverse=True)
        _, code = np.unique(code * (int(value.max()) + 1) + value, return_inverse=True)
    return code


def occurrences(codes: Ints) -> Ints:
    """How many of the same code came before each, [n]."""
    order = np.argsort(codes, kind="stable")
    first = np.searchsorted(codes[order], codes[order])
    number_of_row = np.empty(len(codes), np.int64)
    number_of_row[order] = np.arange(len(codes)) - first
    return number_of_row
