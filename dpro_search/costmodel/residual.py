"""`Residual`: the error of a formula, learned from measurements of similar things.

Cost models begin with a formula: messages and bytes of an all-reduce, a roofline with trees, the replay of a plan. Its error is
log(measured / formula). Errors of similar things resemble each other, so that the measured ones tell which error to expect at
others, and how uncertain that is: a Gaussian process with mean zero (Rasmussen and Williams 2006, chapter 2). Far from every
measurement the formula alone remains.

Each model has its own covariance: `collectives.cost` over sizes and ranks, `devices.correction` over shapes of ops,
`search.correction` over settings of a job, `analysis.plan_beliefs` over its plans. A file holds measurements and the constants of a
covariance, never matrices: the residual is conditioned on them when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve

from dpro_search.collect.trace import Floats

Points = TypeVar("Points")


@dataclass(frozen=True, kw_only=True, eq=False)
class Residual(Generic[Points]):
    """Errors of a formula at n measured points, and the errors that they let expect at other points.

    Attributes
    ----------
    covariance
        Covariance of the errors at m points with those at k others, without noise, [m, k].
    points
        The n measured points.
    errors
        log(measured / formula), [n].
    noise
        Covariance of the part of the measured errors that no other point shares, [n, n]; a number: the variance of each alone.
    """

    covariance: Callable[[Points, Points], Floats | npt.NDArray[np.float32]]
    points: Points
    errors: Floats
    noise: Floats | float

    @cached_property
    def _factor(self) -> tuple[Floats, bool]:
        covariance = np.asarray(self.covariance(self.points, self.points), dtype=np.float64)
        noise = self.noise * np.eye(len(self.errors)) if np.ndim(self.noise) == 0 else self.noise
        factor: tuple[Floats, bool] = cho_factor(covariance + noise, lower=True)
        return factor

    @cached_property
    def weights(self) -> Floats:
        """Inverse covariance of the errors times the errors, [n]; raises `ValueError` if there is no inverse."""
        return np.asarray(cho_solve(self._factor, self.errors), dtype=np.float64)

    @cached_property
    def _precision(self) -> Floats:
        """Inverse covariance of the errors, [n, n]."""
        return np.asarray(cho_solve(self._factor, np.eye(len(self.errors))), dtype=np.float64)

    def expected(self, points: Points) -> Floats:
        """Expected errors, [points]."""
        across = self.covariance(points, self.points)
        return np.asarray(across @ self.weights.astype(across.dtype, copy=False), dtype=np.float64)

    def expected_and_explained(self, points: Points) -> tuple[Floats, Floats]:
        """Expected errors, and the variance of each error that the measured ones explain, [points] each."""
        across = self.covariance(points, self.points)
        expected = across @ self.weights.astype(across.dtype, copy=False)
        explained = np.einsum("ij,ij->i", across @ self._precision.astype(across.dtype, copy=False), across)
        return np.asarray(expected, dtype=np.float64), np.asarray(explained, dtype=np.float64)

    def explained_covariance(self, points: Points) -> Floats:
        """Covariance of the errors at some points that the measured ones explain, [points, points]."""
        across = np.asarray(self.covariance(points, self.points), dtype=np.float64)
        return np.asarray(across @ cho_solve(self._factor, across.T), dtype=np.float64)
