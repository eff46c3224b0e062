"""What a few measurements of a device say about the predictor's error on its other ops: a Gaussian process over ops.

Errors of one device resemble each other the more the ops do: all share a part (the device as a whole), ops of a kind another, near
shapes a third. How much each part counts is fitted to errors on devices that were left out (Rasmussen and Williams 2006, chapters 2
and 5). Far from every measurement the correction falls back to the shared parts, and the variance grows to that of an unknown device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve, cholesky
from scipy.optimize import minimize

from dpro_search.costmodel.devices.features import FEATURES
from dpro_search.costmodel.devices.ops import Floats, Ops

COORDINATES = (
    "log_batch",
    "log_m",
    "log_n",
    "log_k",
    "compute_over_memory",
    "log_base_us",
    "memory_over_floor",
    "least_waste",
    "log_tiles_over_cores_128x128",
    "aligned_n",
    "aligned_k",
)
_PLACES = [FEATURES.index(name) for name in COORDINATES]
PARAMETERS = ("device", "kind", "category", "wide", "narrow", "noise", "wide_length", "narrow_length")
_START = np.log([0.1, 0.1, 0.1, 0.15, 0.1, 0.08, 4.0, 1.0])
_LOW, _HIGH = np.log(1e-3), np.log(30.0)
WINSOR = 4.0
"""Standard deviations beyond which a measured error counts no more: an op of which a library picked a bad kernel says nothing of
others."""


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """How alike errors of ops on a device are.

    Attributes
    ----------
    parameters : array [8]
        Standard deviations of the parts of an error, of its logarithm (`PARAMETERS`), and two lengths in `scale`.
    scale : array [coordinates]
        What a distance of 1 is.
    """

    parameters: Floats
    scale: Floats

    def covariance(self, left: OpPoints, right: OpPoints) -> Floats:
        """Between errors of n and m ops, without noise, [n, m]."""
        device, kind, category, wide, narrow, _, wide_length, narrow_length = self.parameters
        squared = _squared(left.at / self.scale, right.at / self.scale)
        same_kind = left.kind[:, None] == right.kind[None, :]
        same = left.category[:, None] == right.category[None, :]
        near = wide**2 * np.exp(-0.5 * squared / wide_length**2) * same_kind
        nearer = narrow**2 * np.exp(-0.5 * squared / narrow_length**2) * same
        return np.asarray(device**2 + kind**2 * same_kind + category**2 * same + near + nearer)

    @property
    def variance(self) -> float:
        """Of an error on a device of which nothing was measured, noise included."""
        return float((self.parameters[:6] ** 2).sum())

    @staticmethod
    def fit(groups: Sequence[tuple[OpPoints, Floats]], most: int = 120, seed: int = 0) -> Similarity:
        """The parameters under which errors on left-out devices, a group each, are likeliest; at most `most` of each are used."""
        random = np.random.default_rng(seed)
        picked = [
            (points[chosen], errors[chosen]) for points, errors in groups for chosen in (random.permutation(len(errors))[:most],)
        ]
        scale = np.maximum(np.std(np.concatenate([points.at for points, _ in picked]), axis=0), 0.1)
        limit = 3 * np.median([np.std(errors) for _, errors in picked])
        parts = [(_Parts.of(points, scale), np.clip(errors, -limit, limit)) for points, errors in picked]

        def cost(logs: Floats) -> float:
            values = np.exp(logs)
            return sum(part.negative_log_likelihood(values, errors) for part, errors in parts)

        found = minimize(cost, _START, method="L-BFGS-B", bounds=[(_LOW, _HIGH)] * len(_START), options={"maxiter": 25})
        return Similarity(parameters=np.exp(found.x), scale=scale)


@dataclass(frozen=True, kw_only=True)
class OpPoints:
    """Ops as a correction sees them, [n]."""

    at: Floats  # `COORDINATES`, [n, coordinates].
    kind: Floats
    category: Floats  # Kind, precision, pass and what distinguishes ops within a kind.

    def __getitem__(self, chosen: Floats) -> OpPoints:
        return OpPoints(at=self.at[chosen], kind=self.kind[chosen], category=self.category[chosen])

    @staticmethod
    def of(ops: Ops, features: Floats) -> OpPoints:
        """Of n ops and their `features` on the device."""
        category = ops.kind + 16 * ops.precision + 256 * ops.backward + 512 * ops.special + 65536 * (ops.flops > 0) * ops.transposes
        return OpPoints(at=features[:, _PLACES].astype(np.float64), kind=ops.kind, category=category)


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The error expected on a device of which k ops were measured."""

    similarity: Similarity
    points: OpPoints
    factor: Floats  # Lower Cholesky factor of their covariance, [k, k].
    weights: Floats  # Its inverse times their errors, [k].
    bounds: tuple[float, float]  # Least and largest error measured.

    @staticmethod
    def fit(similarity: Similarity, points: OpPoints, errors: Floats) -> Correction:
        """Of the log(measured / predicted) of k measured ops."""
        limit = WINSOR * np.sqrt(similarity.variance)
        errors = np.clip(errors, -limit, limit)
        noise = similarity.parameters[5] ** 2
        factor = cholesky(similarity.covariance(points, points) + noise * np.eye(len(errors)), lower=True)
        weights = cho_solve((factor, True), errors)
        return Correction(
            similarity=similarity,
            points=points,
            factor=factor,
            weights=weights,
            bounds=(min(float(errors.min()), 0.0), max(float(errors.max()), 0.0)),
        )

    def at(self, points: OpPoints) -> tuple[Floats, Floats]:
        """Expected error of the logarithm, within the errors that were measured, and its standard deviation, [n] each."""
        across = self.similarity.covariance(points, self.points)
        low, high = self.bounds
        solved = np.linalg.solve(self.factor, across.T)
        variance = self.similarity.variance - (solved**2).sum(axis=0)
        noise = self.similarity.parameters[5] ** 2
        return np.clip(across @ self.weights, low, high), np.sqrt(np.maximum(variance, noise))


@dataclass(frozen=True)
class _Parts:
    """What the likelihood of a group needs at any parameters."""

    squared: Floats
    same_kind: Floats
    same: Floats

    @staticmethod
    def of(points: OpPoints, scale: Floats) -> _Parts:
        return _Parts(
            _squared(points.at / scale, points.at / scale),
            (points.kind[:, None] == points.kind[None, :]).astype(float),
            (points.category[:, None] == points.category[None, :]).astype(float),
        )

    def negative_log_likelihood(self, values: Floats, errors: Floats) -> float:
        device, kind, category, wide, narrow, noise, wide_length, narrow_length = values
        covariance = (
            device**2
            + kind**2 * self.same_kind
            + category**2 * self.same
            + wide**2 * np.exp(-0.5 * self.squared / wide_length**2) * self.same_kind
            + narrow**2 * np.exp(-0.5 * self.squared / narrow_length**2) * self.same
        )
        covariance[np.diag_indices_from(covariance)] += noise**2
        factor = cholesky(covariance, lower=True)
        solved = np.linalg.solve(factor, errors)
        return float(0.5 * (solved**2).sum() + np.log(np.diag(factor)).sum())


def _squared(left: Floats, right: Floats) -> Floats:
    size = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :]
    return np.asarray(np.maximum(size - 2 * left @ right.T, 0.0))
