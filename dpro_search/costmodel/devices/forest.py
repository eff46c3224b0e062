"""`Forest`: boosted trees as arrays of one shape, which a file holds in a few hundred kB and a loop without branches evaluates."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.costmodel.devices.ops import Floats, Singles


@dataclass(frozen=True, kw_only=True)
class Forest:
    """t complete binary trees of depth d. Node i has the children 2 i + 1 (the feature is below the threshold) and 2 i + 2.

    Attributes
    ----------
    feature : array [t, 2^d - 1]
        Column that a node looks at.
    threshold : array [t, 2^d - 1]
        Infinite where a tree ends earlier: what follows is its left part.
    leaf : array [t, 2^d]
    base : float
        What the leaves add to.
    """

    feature: npt.NDArray[np.uint8]
    threshold: Singles
    leaf: Singles
    base: float

    def predict(self, features: Singles) -> Floats:
        """The sum of the leaves that n rows of features reach, [n]."""
        return np.asarray(_sums(np.ascontiguousarray(features), self.feature, self.threshold, self.leaf)) + self.base

    @staticmethod
    def of(booster: Any, depth: int, columns: tuple[int, ...]) -> Forest:
        """The trees of an XGBoost booster, none deeper than `depth`, that was fitted to some columns of the features."""
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
                    feature[number, place] = columns[splits[node]]
                    threshold[number, place] = values[node]
                    stack += [(left[node], 2 * place + 1), (right[node], 2 * place + 2)]
                    continue
                while place < nodes:
                    place = 2 * place + 1
                leaf[number, place - nodes] = values[node]
        base = float(str(learner["learner_model_param"]["base_score"]).strip("[]"))
        return Forest(feature=feature, threshold=threshold, leaf=leaf, base=base)


@njit(nogil=True)
def _sums(rows: Singles, feature: npt.NDArray[np.uint8], threshold: Singles, leaf: Singles) -> Floats:
    trees, nodes = feature.shape
    levels = 0
    while 2**levels - 1 < nodes:
        levels += 1
    found = np.zeros(len(rows))
    for tree in range(trees):
        of, above, made = feature[tree], threshold[tree], leaf[tree]
        for row in range(len(rows)):
            values = rows[row]
            place = np.uint32(0)
            for _ in range(levels):
                place = np.uint32(2) * place + np.uint32(1) + np.uint32(values[of[place]] >= above[place])
            found[row] += made[place - np.uint32(nodes)]
    return found
