"""`FamilyTrees`: latencies as they are on families of devices, one small forest for each family under one way to run ops.

The predictor's trees say what devices have in common. A family's trees say which kernels its libraries pick for which shapes. On a
new device nobody knows which family it resembles: measured ops tell (`correction`), and without them nothing is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpro_search.costmodel.devices.ops import Floats, Ops, Singles
from dpro_search.costmodel.forest import Forest

MOST_APART = 1.0  # of logarithms: a family's trees say nothing where they are off by more


@dataclass(frozen=True, kw_only=True)
class FamilyTrees:
    """f families with the same number of trees each.

    Attributes
    ----------
    forest
        Trees of all families, one family after the other.
    bases : array [f]
        What the leaves of a family's trees are added to.
    known : array [f, kinds, 2]
        Whether ops of a kind and a pass (forward, backward) were measured on the family.
    """

    forest: Forest
    bases: Floats
    known: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.bases)

    def apart(self, ops: Ops, features: Singles, log_ratio: Floats) -> Singles:
        """log(latency on each family / latency by the trees of all), 0 where a family has no such ops, [n, families]."""
        places = ops.kind.astype(int), ops.backward.astype(int)
        columns = []
        for number, base in enumerate(self.bases):
            apart = self._of(number).predict(features) + base - log_ratio
            columns.append(np.where(self.known[number][places], np.clip(apart, -MOST_APART, MOST_APART), 0.0))
        return np.stack(columns, axis=1).astype(np.float32) if columns else np.zeros((len(ops), 0), np.float32)

    def _of(self, number: int) -> Forest:
        trees = len(self.forest.feature) // len(self)
        part = slice(number * trees, (number + 1) * trees)
        return Forest(feature=self.forest.feature[part], threshold=self.forest.threshold[part], leaf=self.forest.leaf[part])

    def chosen(self, kept: npt.NDArray[np.bool_]) -> FamilyTrees:
        """Some of the families."""
        trees = np.repeat(kept, len(self.forest.feature) // max(len(self), 1))
        forest = self.forest
        part = Forest(feature=forest.feature[trees], threshold=forest.threshold[trees], leaf=forest.leaf[trees])
        return FamilyTrees(forest=part, bases=self.bases[kept], known=self.known[kept])
