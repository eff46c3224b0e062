"""`Forest`: boosted trees as arrays of one shape, which an npz file holds and a loop without branches evaluates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.collect.trace import Floats

Singles = npt.NDArray[np.float32]

_ARRAYS = ("feature", "threshold", "leaf")
ARRAY_NAME = f"({'|'.join(_ARRAYS)})"
"""Pattern of the arrays' names, behind the name of a forest and ``_``."""
_MOST_TREES, _MOST_DEPTH, _MOST_LEAF = 10_000, 20, 100.0  # beyond any number of a fit, whose leaves are parts of logarithms


@dataclass(frozen=True, kw_only=True)
class Forest:
    """t complete binary trees of depth d. Node i has the children 2 i + 1 (the feature is below the threshold) and 2 i + 2.

    Attributes
    ----------
    feature : array [t, 2^d - 1]
        Column of the features that a node looks at.
    threshold : array [t, 2^d - 1]
        Infinite where a tree ends earlier: the leaf stands at the end of the left branch.
    leaf : array [t, 2^d]
    base : float
        Prediction to which the leaves are added.
    """

    feature: npt.NDArray[np.uint8]
    threshold: Singles
    leaf: Singles
    base: float = 0.0

    def predict(self, features: Singles) -> Floats:
        """Sum of the leaves that n rows of features reach, [n]."""
        return np.asarray(_sum_leaves(np.ascontiguousarray(features), self.feature, self.threshold, self.leaf)) + self.base

    def leaves(self, features: Singles) -> npt.NDArray[np.uint8]:
        """Numbers of the leaves that n rows of features reach, modulo 256, [n, trees]."""
        return np.asarray(_leaves(np.ascontiguousarray(features), self.feature, self.threshold))

    @property
    def digest(self) -> str:
        """A text that distinguishes these trees from any others."""
        content = b"".join(getattr(self, part).tobytes() for part in _ARRAYS)
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def arrays(self, name: str) -> dict[str, npt.NDArray[Any]]:
        """Arrays for an npz file, which `from_arrays` reads with the same name."""
        return {f"{name}_{part}": getattr(self, part) for part in _ARRAYS}

    @staticmethod
    def from_arrays(arrays: Mapping[str, npt.NDArray[Any]], name: str, columns: int, base: float = 0.0) -> Forest:
        """Trees from the arrays of a file, which may come from a stranger: the compiled loop looks at no bounds.

        Parameters
        ----------
        columns
            Number of the features that the trees may look at.

        Raises
        ------
        ValueError
            The arrays are no complete trees over so many features; `KeyError`: one is missing.
        """
        feature, threshold, leaf = (arrays[f"{name}_{part}"] for part in _ARRAYS)
        if feature.dtype != np.uint8 or not threshold.dtype == leaf.dtype == np.float32 or feature.ndim != 2:
            raise ValueError(f"{name}: arrays of other types")
        trees, nodes = feature.shape
        depth = (nodes + 1).bit_length() - 1
        if not 0 < trees <= _MOST_TREES or not 0 < depth <= _MOST_DEPTH or nodes + 1 != 2**depth:
            raise ValueError(f"{name}: no complete trees")
        if threshold.shape != feature.shape or leaf.shape != (trees, nodes + 1):
            raise ValueError(f"{name}: arrays that do not fit")
        if int(feature.max()) >= columns:
            raise ValueError(f"{name}: a feature that does not exist")
        if np.isnan(threshold).any() or not (np.abs(leaf) <= _MOST_LEAF).all() or not abs(base) <= _MOST_LEAF:
            raise ValueError(f"{name}: impossible numbers")
        return Forest(feature=feature, threshold=threshold, leaf=leaf, base=base)

    @staticmethod
    def of_booster(booster: Any, depth: int, columns: tuple[int, ...] | None = None) -> Forest:
        """Trees of an XGBoost booster, none deeper than `depth`.

        Parameters
        ----------
        columns
            Columns of the features that the booster was fitted to, in its order; None: to all.
        """
        learner = json.loads(bytes(booster.save_raw("json")))["learner"]
        trees = learner["gradient_booster"]["model"]["trees"]
        nodes = 2**depth - 1
        feature = np.zeros((len(trees), nodes), dtype=np.uint8)
        threshold = np.full((len(trees), nodes), np.inf, dtype=np.float32)
        leaf = np.zeros((len(trees), nodes + 1), dtype=np.float32)
        for number, tree in enumerate(trees):
            left, right = tree["left_children"], tree["right_children"]
            splits, values = tree["split_indices"], tree["split_conditions"]
            stack = [(0, 0)]
            while stack:
                node, place = stack.pop()
                if left[node] >= 0:
                    feature[number, place] = splits[node] if columns is None else columns[splits[node]]
                    threshold[number, place] = values[node]
                    stack += [(left[node], 2 * place + 1), (right[node], 2 * place + 2)]
                    continue
                while place < nodes:
                    place = 2 * place + 1
                leaf[number, place - nodes] = values[node]
        base = float(str(learner["learner_model_param"]["base_score"]).strip("[]"))
        return Forest(feature=feature, threshold=threshold, leaf=leaf, base=base)


@njit(nogil=True)
def _leaves(rows: Singles, feature: npt.NDArray[np.uint8], threshold: Singles) -> npt.NDArray[np.uint8]:
    trees, nodes = feature.shape
    reached = np.zeros((len(rows), trees), np.uint8)
    for tree in range(trees):
        for row in range(len(rows)):
            place = 0
            while place < nodes:
                place = 2 * place + 1 + (rows[row, feature[tree, place]] >= threshold[tree, place])
            reached[row, tree] = (place - nodes) % 256
    return reached


@njit(nogil=True)
def _sum_leaves(rows: Singles, feature: npt.NDArray[np.uint8], threshold: Singles, leaf: Singles) -> Floats:
    trees, nodes = feature.shape
    levels = 0
    while 2**levels - 1 < nodes:
        levels += 1
    total = np.zeros(len(rows))
    for tree in range(trees):
        column, bound, value = feature[tree], threshold[tree], leaf[tree]
        for row in range(len(rows)):
            values = rows[row]
            place = np.uint32(0)
            for _ in range(levels):
                place = np.uint32(2) * place + np.uint32(1) + np.uint32(values[column[place]] >= bound[place])
            total[row] += value[place - np.uint32(nodes)]
    return total
