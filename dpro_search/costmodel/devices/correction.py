"""Correction of the predictor on a device by a few measured ops: the covariance of its `residual` over ops.

Errors of one device resemble each other the more the ops do: all share a part (the device as a whole), ops of a kind another,
near shapes a third. How much each part counts is fitted to errors on devices that were left out (Rasmussen and Williams 2006,
chapters 2 and 5). Far from every measurement the correction falls back to the shared parts, and the variance grows to that of an
unknown device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
PARTS = ("device", "kind", "category", "wide", "narrow", "noise")
WINSOR = 4.0
"""Standard deviations beyond which a measured error counts no more: an op of which a library picked a bad kernel says nothing of
others."""


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """Covariance of errors of ops on a device.

    Attributes
    ----------
    deviations : array [6]
        Of the parts of an error, of its logarithm: `PARTS`.
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
        device, kind, category, wide, narrow, _ = map(float, self.deviations)  # numpy's own would make singles doubles
        squared = _squared(_singles(left.at / self.lengths), _singles(right.at / self.lengths))
        same_kind = left.kind[:, None] == right.kind[None, :]
        same = left.category[:, None] == right.category[None, :]
        near = wide**2 * np.exp(-0.5 * squared) * same_kind
        nearer = narrow**2 * np.exp(-self.roughness * np.sqrt(squared)) * same
        return np.asarray(device**2 + kind**2 * same_kind + category**2 * same + near + nearer)

    @property
    def variance(self) -> float:
        """Variance of an error on a device of which nothing was measured, noise included."""
        return float((self.deviations**2).sum())

    @property
    def noise(self) -> float:
        """Variance of the part of an error that no other op shares."""
        return float(self.deviations[5] ** 2)

    def residual(self, points: OpPoints, errors: Floats) -> Residual[OpPoints]:
        """Errors of k measured ops, log(measured / predicted), each at most `WINSOR` deviations."""
        limit = WINSOR * np.sqrt(self.variance)
        return Residual(covariance=self.covariance, points=points, errors=np.clip(errors, -limit, limit), noise=self.noise)

    def correction(self, measured: Residual[OpPoints], points: OpPoints) -> tuple[Floats, Floats]:
        """Expected error of the logarithm, within the errors that were measured, and its standard deviation, [n] each."""
        expected, explained = measured.expected_and_explained(points)
        low, high = min(float(measured.errors.min()), 0.0), max(float(measured.errors.max()), 0.0)
        return np.clip(expected, low, high), np.sqrt(np.maximum(self.variance - explained, self.noise))


@dataclass(frozen=True, kw_only=True)
class OpPoints:
    """Ops as a correction sees them, [n]."""

    at: Floats  # `COORDINATES`, [n, coordinates].
    kind: Floats
    category: Floats  # Kind, precision, pass and what distinguishes ops within a kind.

    def __getitem__(self, chosen: npt.NDArray[Any]) -> OpPoints:
        return OpPoints(at=self.at[chosen], kind=self.kind[chosen], category=self.category[chosen])

    @staticmethod
    def of(ops: Ops, features: Singles) -> OpPoints:
        """Points of n ops and their `features` on the device."""
        category = ops.kind + 16 * ops.precision + 256 * ops.backward + 512 * ops.special + 65536 * (ops.flops > 0) * ops.transposes
        return OpPoints(at=features[:, _PLACES].astype(np.float64), kind=ops.kind, category=category)


def _singles(values: Floats) -> Singles:
    return values.astype(np.float32)


def _squared(left: Singles, right: Singles) -> Singles:
    size = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :]
    return np.asarray(np.maximum(size - 2 * left @ right.T, 0.0))
