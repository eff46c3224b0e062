"""Correction of the predictor on a device by a few measured ops: the covariance of its `residual` over ops.

Errors of one device resemble each other the more the ops do: all share a part (the device as a whole), ops of a kind another,
near shapes a third. Two parts come from trees: ops that end in the same leaves of the predictor's trees resemble each other, and a
device may err as families of devices do (`FamilyTrees`): measured ops say which family's libraries it has. How much each part
counts is fitted to errors on devices that were left out (Rasmussen and Williams 2006, chapters 2 and 5). Far from every measurement
the correction falls back to the shared parts, and the variance grows to that of an unknown device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpro_search._compiled import njit
from dpro_search.costmodel.devices.features import FEATURES
from dpro_search.costmodel.devices.ops import Floats, Ops, Singles
from dpro_search.costmodel.residual import Residual

COORDINATES = (
    "log_batch",
    "log_m",
    "log_n",
    "log_k",
    "aligned_m",
    "aligned_n",
    "aligned_k",
    "compute_over_memory",
    "stream_over_rest",
    "log_base_us",
    "memory_over_floor",
    "log_bytes_over_l2",
    "least_waste",
    "log_tiles_over_cores_128x128",
    "wave_share_128x128",
)
_PLACES = [FEATURES.index(name) for name in COORDINATES]
PARTS = ("device", "kind", "category", "wide", "narrow", "noise", "leaves", "families")
NOISE, LEAVES, FAMILIES = (PARTS.index(name) for name in ("noise", "leaves", "families"))
WINSOR = 4.0
"""Standard deviations beyond which a measured error counts no more: an op of which a library picked a bad kernel says nothing of
others."""


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """Covariance of errors of ops on a device.

    Attributes
    ----------
    deviations : array [8]
        Of the parts of an error, of its logarithm: `PARTS`. Of families: of the weight of each.
    roughness : float
        By how much sooner near shapes of a category differ than shapes of a kind.
    lengths : array [coordinates]
        Distances over which errors of a kind resemble each other.
    """

    deviations: Floats
    roughness: float
    lengths: Floats

    def covariance(self, left: OpPoints, right: OpPoints) -> Singles:
        """Between errors of n and m ops, without noise, [n, m]."""
        device, kind, category, wide, narrow, _, leaves, families = map(float, self.deviations)  # numpy's would make doubles
        squared = _squared(_singles(left.at / self.lengths), _singles(right.at / self.lengths))
        same_kind = left.kind[:, None] == right.kind[None, :]
        same = left.category[:, None] == right.category[None, :]
        near = wide**2 * np.exp(-0.5 * squared) * same_kind
        nearer = narrow**2 * np.exp(-self.roughness * np.sqrt(squared)) * same
        of_trees = leaves**2 * shared_leaves(left, right) + families**2 * family_products(left, right)
        return np.asarray(device**2 + kind**2 * same_kind + category**2 * same + near + nearer + of_trees)

    @property
    def variance(self) -> float:
        """Variance of an error on a device of which nothing was measured and that errs as no family does, noise included."""
        return float((self.deviations[:FAMILIES] ** 2).sum())

    @property
    def noise(self) -> float:
        """Variance of the part of an error that no other op shares."""
        return float(self.deviations[NOISE] ** 2)

    def residual(self, points: OpPoints, errors: Floats) -> Residual[OpPoints]:
        """Errors of k measured ops, log(measured / predicted), each at most `WINSOR` deviations."""
        limit = WINSOR * np.sqrt(self.variance)
        return Residual(covariance=self.covariance, points=points, errors=np.clip(errors, -limit, limit), noise=self.noise)

    def correction(self, measured: Residual[OpPoints], points: OpPoints) -> tuple[Floats, Floats]:
        """Expected error of the logarithm, within the errors that were measured, and its standard deviation, [n] each."""
        expected, explained = measured.expected_and_explained(points)
        low, high = min(float(measured.errors.min()), 0.0), max(float(measured.errors.max()), 0.0)
        variance = self.variance + self.deviations[FAMILIES] ** 2 * (points.families**2).sum(axis=1)
        return np.clip(expected, low, high), np.sqrt(np.maximum(variance - explained, self.noise))


@dataclass(frozen=True, kw_only=True)
class OpPoints:
    """Ops as a correction sees them, [n]."""

    at: Floats  # `COORDINATES`, [n, coordinates].
    kind: Floats
    category: Floats  # Kind, precision, pass and what distinguishes ops within a kind.
    leaves: npt.NDArray[np.uint8]  # That ops end in, [n, trees].
    families: Singles  # log(latency by the trees of a family / by all trees), [n, families].

    def __getitem__(self, chosen: npt.NDArray[Any]) -> OpPoints:
        return OpPoints(
            at=self.at[chosen],
            kind=self.kind[chosen],
            category=self.category[chosen],
            leaves=self.leaves[chosen],
            families=self.families[chosen],
        )

    @staticmethod
    def of(ops: Ops, features: Singles, leaves: npt.NDArray[np.uint8] | None = None, families: Singles | None = None) -> OpPoints:
        """Points of n ops and their `features` on the device; without `leaves` and `families` trees tell nothing of them."""
        category = ops.kind + 16 * ops.precision + 256 * ops.backward + 512 * ops.distinction
        category = category + 65536 * (ops.flops > 0) * ops.transposes
        return OpPoints(
            at=features[:, _PLACES].astype(np.float64),
            kind=ops.kind,
            category=category,
            leaves=np.zeros((len(ops), 0), np.uint8) if leaves is None else leaves,
            families=np.zeros((len(ops), 0), np.float32) if families is None else families,
        )


def shared_leaves(left: OpPoints, right: OpPoints) -> Singles:
    """Share of the trees in which ops end in the same leaf, [n, m]: a covariance (Breiman 2000; Scornet 2016)."""
    if not left.leaves.shape[1]:
        return np.zeros((len(left.kind), len(right.kind)), np.float32)
    return np.asarray(_shared(left.leaves, right.leaves))


def family_products(left: OpPoints, right: OpPoints) -> Singles:
    """Covariance of errors for weights of families with variance 1, [n, m]."""
    return np.asarray(left.families @ right.families.T)


@njit(nogil=True)
def _shared(left: npt.NDArray[np.uint8], right: npt.NDArray[np.uint8]) -> Singles:
    shares = np.zeros((len(left), len(right)), np.float32)
    for row in range(len(left)):
        for column in range(len(right)):
            equal = 0
            for tree in range(left.shape[1]):
                equal += left[row, tree] == right[column, tree]
            shares[row, column] = equal / left.shape[1]
    return shares


def _singles(values: Floats) -> Singles:
    return values.astype(np.float32)


def _squared(left: Singles, right: Singles) -> Singles:
    size = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :]
    return np.asarray(np.maximum(size - 2 * left @ right.T, 0.0))
