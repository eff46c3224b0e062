"""Parts of clusters for the additive model: terms that a base is linear in, and features of the trees.

With shapes, parts are the call, loops and other ops (`op_parts`); without, the call and the ops of each kind.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.fused.additive import Parts
from dpro_search.costmodel.fused.op_classes import HEAVY, KINDS, OTHER
from dpro_search.costmodel.fused.op_parts import CALL, COMPOSED, LOOP, PART_CLASSES, PART_FEATURES, SCATTER

TIMED_PARTS = ("class", "us", "count", "largest_us", "members_us", "ops", "inputs", "outputs", "depth", "width")
TIMED_CLASSES = (CALL, *KINDS)
_REDUCTIONS = ("row_reduction", "column_reduction", *COMPOSED)
_BY_COLUMNS = ("column_reduction", "norm", "norm_grad")
_DEPTHWISE = tuple(name for name in HEAVY if name.startswith("depthwise"))
_PRODUCTS = ("matmul", "batch_matmul")
_CONVOLUTIONS = tuple(name for name in HEAVY if name not in (*_DEPTHWISE, *_PRODUCTS))


class _Term(NamedTuple):
    """Term of the base: the cost of a unit of a feature ("1": a part) in the given classes, one cost for all of them."""

    classes: tuple[str, ...]
    feature: str
    usual_us: float = 0.0


def _each(classes: tuple[str, ...], *features: str) -> tuple[_Term, ...]:
    """A cost of its own for each class; a time counts as it is, until something else was learned."""
    return tuple(_Term((name,), feature, float(feature == "us")) for name in classes for feature in features)


_TERMS = {
    "shapes": (
        *_each((CALL,), "1", "us", "sources", "outputs", "variables", "kernels", "read_bytes", "written_bytes"),
        *_each((LOOP,), "kernels", "us", "work", "costly"),
        *_each(_REDUCTIONS, "1", "us", "work"),
        _Term((LOOP, *_REDUCTIONS), "bytes"),
        _Term((LOOP,), "moved"),
        _Term(("row_reduction",), "windowed"),
        _Term((*_BY_COLUMNS, "softmax"), "windowed"),
        *_each(_DEPTHWISE, "work"),
        _Term(("depthwise_filter_grad",), "made"),
        *_each(_CONVOLUTIONS, "1", "us", "work", "left", "right", "made"),
        *_each(_PRODUCTS, "1", "us", "far_bytes", "work", "left", "made"),
        *_each(("pool", "pool_grad", SCATTER, OTHER), "1", "us", "bytes", "work"),
        *(_Term(classes, name) for name in ("strided", "near_misses", "far_misses") for classes in (_CONVOLUTIONS, _PRODUCTS)),
        *(_Term(_BY_COLUMNS, name) for name in ("windowed_near", "windowed_far")),
        *(_Term((LOOP,), name) for name in ("near_misses", "far_misses")),
    ),
    "times": (*_each((CALL,), "1", "inputs", "outputs"), *_each(KINDS, "us", "count")),
}
CLASSES_OF = {"shapes": PART_CLASSES, "times": TIMED_CLASSES}
NAMES_OF = {"shapes": PART_FEATURES, "times": TIMED_PARTS}
# Further quantities that a base may be linear in.
_DERIVED = {"shapes": ("1", "bytes", "far_bytes", "windowed_near", "windowed_far"), "times": ("1",)}
# More of these at the same unfused time is more work for the compiled cluster, too.
_GROWING = ("work", "read_bytes", "written_bytes", "work_ratio", "bytes_ratio")
_RATIOS = {"shapes": ("work", "bytes", "elements"), "times": ("members_us", "largest_us")}
_LEAST_US = 0.1
_CACHE_BYTES = 1 << 20  # what is larger counts as far; a definition of features, whatever machine a model is of


def parts_of(sees: str, values: Floats, of: Ints) -> Parts:
    """Terms and trees' features of parts, whose features are [parts, len(NAMES_OF[sees])]."""
    columns = np.hstack([values, np.ones((len(values), len(_DERIVED[sees])))])
    if sees == "shapes":
        column = dict(zip((*NAMES_OF[sees], *_DERIVED[sees]), columns.T, strict=True))
        column["bytes"][:] = column["read_bytes"] + column["written_bytes"]
        column["far_bytes"][:] = np.maximum(column["bytes"] - _CACHE_BYTES, 0.0)
        for name in ("near", "far"):
            column[f"windowed_{name}"][:] = np.minimum(column["windowed"], column[f"{name}_misses"])
    classes = values[:, 0].astype(np.int64)
    term_of, us_at, ratios_at = _places(sees)
    return Parts(
        columns=columns,
        classes=classes,
        term_of=term_of,
        trees=_tree_features(columns, classes, len(NAMES_OF[sees]), len(CLASSES_OF[sees]), us_at, ratios_at),
        of=of,
    )


def usual_us(sees: str) -> Floats:
    """Cost of a unit of each term where hardly any was measured, us."""
    return np.array([term.usual_us for term in _TERMS[sees]])


def growing(sees: str) -> tuple[int, ...]:
    """For each of the trees' features, 1 where more of it is never less time, else 0."""
    names = (*NAMES_OF[sees][1:], *(f"{name}_ratio" for name in _RATIOS[sees]), *CLASSES_OF[sees])
    return tuple(int(sees == "shapes" and name in _GROWING) for name in names)


def term_count(sees: str) -> int:
    """Number of the base's coefficients."""
    return len(_TERMS[sees])


@functools.cache
def _places(sees: str) -> tuple[Ints, int, Ints]:
    """Term of each class and column, -1 where none exists, [classes, columns]; the columns of times and of ratios."""
    columns = (*NAMES_OF[sees], *_DERIVED[sees])
    term_of = np.full((len(CLASSES_OF[sees]), len(columns)), -1)
    for number, term in enumerate(_TERMS[sees]):
        for name in term.classes:
            term_of[CLASSES_OF[sees].index(name), columns.index(term.feature)] = number
    return term_of, columns.index("us"), np.array([columns.index(name) for name in _RATIOS[sees]])


@njit(nogil=True)
def _tree_features(
    columns: Floats, classes: Ints, names: int, class_count: int, us_at: int, ratios_at: Ints
) -> npt.NDArray[np.float32]:
    """Logarithms of the features but the class, then of ratios to the time, then 1 for the class."""
    features = np.zeros((len(columns), names - 1 + len(ratios_at) + class_count), np.float32)
    for row in range(len(columns)):
        for at in range(1, names):
            if columns[row, at] != 0:
                features[row, at - 1] = np.log1p(columns[row, at])
        us = max(columns[row, us_at], _LEAST_US)
        for ratio in range(len(ratios_at)):
            if columns[row, ratios_at[ratio]] != 0:
                features[row, names - 1 + ratio] = np.log1p(columns[row, ratios_at[ratio]] / us)
        features[row, names - 1 + len(ratios_at) + classes[row]] = 1.0
    return features
