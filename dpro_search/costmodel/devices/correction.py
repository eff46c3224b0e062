"""What a few measurements of a device say about the predictor's error on its other ops: a Gaussian process over ops.

Errors of one device resemble each other the more the ops do: all share a part (the device as a whole), ops of a kind another,
near shapes a third. How much each part counts is fitted to errors on devices that were left out (Rasmussen and Williams 2006,
chapters 2 and 5). Far from every measurement the correction falls back to the shared parts, and the variance grows to that of an
unknown device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve

from dpro_search.costmodel.devices.features import FEATURES
from dpro_search.costmodel.devices.ops import Floats, Ops, Singles

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
_START = np.log([0.15, 0.05, 0.1, 0.15, 0.15, 0.08, 1.0, *(4.0 for _ in COORDINATES)])
_LOW, _HIGH = np.log(1e-2), np.log(100.0)
_PRIOR = 0.05  # Weight of a length's start: decides only where errors leave a length open.
WINSOR = 4.0
"""Standard deviations beyond which a measured error counts no more: an op of which a library picked a bad kernel says nothing of
others."""


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """How alike errors of ops on a device are.

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
        """Of an error on a device of which nothing was measured, noise included."""
        return float((self.deviations**2).sum())

    @property
    def noise(self) -> float:
        """Variance of the part of an error that no other op shares."""
        return float(self.deviations[5] ** 2)

    @staticmethod
    def fit(groups: Sequence[tuple[OpPoints, Floats]], most: int = 120, seed: int = 0) -> Similarity:
        """The parameters under which errors on left-out devices, a group each, are likeliest; at most `most` of each are used."""
        from scipy.optimize import minimize  # only fits need it

        random = np.random.default_rng(seed)
        picked = [
            (points[chosen], errors[chosen]) for points, errors in groups for chosen in (random.permutation(len(errors))[:most],)
        ]
        spread = np.maximum(np.std(np.concatenate([points.at for points, _ in picked]), axis=0), 0.1)
        limit = 3 * float(np.median([np.sqrt(np.mean(errors**2)) for _, errors in picked]))
        parts = [(_Group.of(points, spread), np.clip(errors, -limit, limit)) for points, errors in picked]

        def cost(logs: Floats) -> tuple[float, Floats]:
            found = [group.negative_log_likelihood(logs, errors) for group, errors in parts]
            prior = _PRIOR * len(parts)
            value = sum(one for one, _ in found) + prior * float(((logs - _START)[6:] ** 2).sum())
            slope = np.sum([one for _, one in found], axis=0)
            slope[6:] += 2 * prior * (logs - _START)[6:]
            return value, slope

        bounds = [(_LOW, _HIGH)] * len(_START)
        found = minimize(cost, _START, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40})
        values = np.exp(found.x)
        return Similarity(deviations=values[:6], roughness=float(values[6]), lengths=values[7:] * spread)


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
        """Of n ops and their `features` on the device."""
        category = ops.kind + 16 * ops.precision + 256 * ops.backward + 512 * ops.special + 65536 * (ops.flops > 0) * ops.transposes
        return OpPoints(at=features[:, _PLACES].astype(np.float64), kind=ops.kind, category=category)


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The error expected on a device of which k ops were measured."""

    similarity: Similarity
    points: OpPoints
    inverse: Floats  # Of their covariance, [k, k].
    weights: Floats  # Its inverse times their errors, [k].
    bounds: tuple[float, float]  # Least and largest error measured.

    @staticmethod
    def fit(similarity: Similarity, points: OpPoints, errors: Floats) -> Correction:
        """Of the log(measured / predicted) of k measured ops."""
        limit = WINSOR * np.sqrt(similarity.variance)
        errors = np.clip(errors, -limit, limit)
        own = similarity.covariance(points, points).astype(np.float64) + similarity.noise * np.eye(len(errors))
        inverse = cho_solve(cho_factor(own, lower=True), np.eye(len(errors)))
        return Correction(
            similarity=similarity,
            points=points,
            inverse=inverse,
            weights=inverse @ errors,
            bounds=(min(float(errors.min()), 0.0), max(float(errors.max()), 0.0)),
        )

    def at(self, points: OpPoints) -> tuple[Floats, Floats]:
        """Expected error of the logarithm, within the errors that were measured, and its standard deviation, [n] each."""
        across = self.similarity.covariance(points, self.points)
        low, high = self.bounds
        variance = self.similarity.variance - np.einsum("ij,ij->i", across @ _singles(self.inverse), across)
        return np.clip(across @ _singles(self.weights), low, high), np.sqrt(np.maximum(variance, self.similarity.noise))


@dataclass(frozen=True)
class _Group:
    """What the likelihood of the errors of a device needs at any parameters."""

    squared: Floats  # By coordinate, [coordinates, n, n].
    same_kind: Floats
    same: Floats

    @staticmethod
    def of(points: OpPoints, spread: Floats) -> _Group:
        at = points.at / spread
        return _Group(
            ((at[:, None, :] - at[None, :, :]) ** 2).transpose(2, 0, 1),
            (points.kind[:, None] == points.kind[None, :]).astype(float),
            (points.category[:, None] == points.category[None, :]).astype(float),
        )

    def negative_log_likelihood(self, logs: Floats, errors: Floats) -> tuple[float, Floats]:
        """And its slope along the logarithms of deviations, roughness and lengths."""
        values = np.exp(logs)
        device, kind, category, wide, narrow, noise, roughness = values[:7]
        inverse = values[7:] ** -2
        total = np.tensordot(inverse, self.squared, axes=1)
        distance = np.sqrt(total + 1e-12)
        near = wide**2 * np.exp(-0.5 * total) * self.same_kind
        nearer = narrow**2 * np.exp(-roughness * distance) * self.same
        covariance = device**2 + kind**2 * self.same_kind + category**2 * self.same + near + nearer
        covariance[np.diag_indices_from(covariance)] += noise**2
        factor = cho_factor(covariance, lower=True)
        weights = cho_solve(factor, errors)
        value = float(0.5 * errors @ weights + np.log(np.diag(factor[0])).sum())
        middle = cho_solve(factor, np.eye(len(errors))) - np.outer(weights, weights)
        along = near + nearer * roughness / distance
        slope = [
            device**2 * middle.sum(),
            kind**2 * (middle * self.same_kind).sum(),
            category**2 * (middle * self.same).sum(),
            (middle * near).sum(),
            (middle * nearer).sum(),
            noise**2 * np.trace(middle),
            -0.5 * roughness * (middle * nearer * distance).sum(),
            *(0.5 * inverse * np.tensordot(self.squared, middle * along, axes=((1, 2), (0, 1)))),
        ]
        return value, np.array(slope)


def _singles(values: Floats) -> Singles:
    return values.astype(np.float32)


def _squared(left: Singles, right: Singles) -> Singles:
    size = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :]
    return np.asarray(np.maximum(size - 2 * left @ right.T, 0.0))
