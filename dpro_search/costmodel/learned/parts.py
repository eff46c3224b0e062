"""What clusters consist of, as the additive model takes it: terms that a base is linear in, and what trees see.

With shapes, parts are the call and the kernels that XLA makes (`kernels`); without, the call and the ops of each kind.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dpro_search.collect.trace import Floats, Ints
from dpro_search.costmodel.learned.additive import Parts
from dpro_search.costmodel.learned.kernels import CALL, COLUMNS, KERNELS, LOOP, PART_FEATURES, ROWS, SCATTER
from dpro_search.costmodel.learned.op_classes import HEAVY, KINDS, OTHER

TIMED_PARTS = ("class", "us", "count", "largest_us", "members_us", "ops", "inputs", "outputs", "depth", "width")
TIMED_CLASSES = (CALL, *KINDS)
_LIGHT = (LOOP, ROWS, COLUMNS)
_DEPTHWISE = tuple(name for name in HEAVY if name.startswith("depthwise"))
_PRODUCTS = ("matmul", "batch_matmul")
_CONVOLUTIONS = tuple(name for name in HEAVY if name not in (*_DEPTHWISE, *_PRODUCTS))


class _Term(NamedTuple):
    """Of the base: what a unit of a feature ("1": a part) costs in the given classes, one cost for all of them."""

    classes: tuple[str, ...]
    feature: str
    usual_us: float = 0.0


def _each(classes: tuple[str, ...], *features: str) -> tuple[_Term, ...]:
    """A cost of its own for each class; a time counts as it is, until something else was learned."""
    return tuple(_Term((name,), feature, float(feature == "us")) for name in classes for feature in features)


_TERMS = {
    "shapes": (
        *_each((CALL,), "1", "us", "sources", "outputs", "variables", "kernels", "read_bytes", "written_bytes"),
        *_each(_LIGHT, "1", "us", "bytes", "work", "costly"),
        *_each(_DEPTHWISE, "work"),
        *_each(_CONVOLUTIONS, "1", "us", "work", "left", "right", "made"),
        *_each(_PRODUCTS, "1", "us", "far_bytes", "work", "left", "made"),
        *_each(("pool", "pool_grad", SCATTER, OTHER), "1", "us", "bytes", "work"),
        _Term((LOOP, COLUMNS, ROWS), "moved"),
        *_each((ROWS, COLUMNS), "windowed"),
        *(_Term(classes, name) for name in ("strided", "near_misses", "far_misses") for classes in (_CONVOLUTIONS, _PRODUCTS)),
        *(_Term((COLUMNS,), name) for name in ("windowed_near", "windowed_far")),
        *(_Term((LOOP,), name) for name in ("near_misses", "far_misses")),
    ),
    "times": (*_each((CALL,), "1", "inputs", "outputs"), *_each(KINDS, "us", "count")),
}
CLASSES_OF = {"shapes": KERNELS, "times": TIMED_CLASSES}
NAMES_OF = {"shapes": PART_FEATURES, "times": TIMED_PARTS}
# More of these at the same unfused time is more work for the compiled cluster, too.
_GROWING = ("work", "read_bytes", "written_bytes", "work_ratio", "bytes_ratio")
_RATIOS = {"shapes": ("work", "bytes", "elements"), "times": ("members_us", "largest_us")}
_LEAST_US = 0.1
_CACHE_BYTES = 1 << 20  # of a core: what is larger comes from further away


def parts_of(sees: str, values: Floats, of: Ints) -> Parts:
    """Terms and trees' features of parts, whose features are [parts, len(NAMES_OF[sees])]."""
    names = NAMES_OF[sees]
    column = {name: values[:, i] for i, name in enumerate(names)}
    column["1"] = np.ones(len(values))
    if sees == "shapes":
        column["bytes"] = column["read_bytes"] + column["written_bytes"]
        column["far_bytes"] = np.maximum(column["bytes"] - _CACHE_BYTES, 0.0)
        for name in ("near", "far"):
            column[f"windowed_{name}"] = np.minimum(column["windowed"], column[f"{name}_misses"])
    classes = column["class"].astype(np.int64)
    member = np.eye(len(CLASSES_OF[sees]))[classes]
    terms = np.empty((len(_TERMS[sees]), len(values)))
    for row, term in zip(terms, _TERMS[sees], strict=True):
        np.multiply(np.isin(CLASSES_OF[sees], term.classes)[classes], column[term.feature], out=row)
    us = np.maximum(column["us"], _LEAST_US)
    ratios = np.stack([column[name] / us for name in _RATIOS[sees]], axis=1)
    return Parts(terms=terms.T, trees=np.hstack([np.log1p(values[:, 1:]), np.log1p(ratios), member]).astype(np.float32), of=of)


def usual_us(sees: str) -> Floats:
    """What a unit of each term costs where hardly any was measured, us."""
    return np.array([term.usual_us for term in _TERMS[sees]])


def growing(sees: str) -> tuple[int, ...]:
    """Of each of the trees' features: 1 where more of it is never less time, else 0."""
    names = (*NAMES_OF[sees][1:], *(f"{name}_ratio" for name in _RATIOS[sees]), *CLASSES_OF[sees])
    return tuple(int(sees == "shapes" and name in _GROWING) for name in names)


def term_count(sees: str) -> int:
    """Number of the base's coefficients."""
    return len(_TERMS[sees])
