"""What the formula of an all-reduce is wrong by, learned from points: a Gaussian process over size, ranks, rate and servers.

Protocols that change with the size, libraries that cut tensors, cores that ranks share: all shift the time of neighbouring sizes
alike, and of neighbouring ranks, rates and servers more or less. How far points correlate, along each axis, and
how much of it is chance, are learned with it (the likelihood's maximum). Between measured points the process runs smoothly, where
trees would have steps; away from them it goes to zero, so that the formula alone carries there.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import msgspec
import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Kernel, Matern, WhiteKernel

from dpro_search.collect.trace import Floats
from dpro_search.costmodel.collectives import Points

_MOST = 500  # points that are kept
FASTEST = 2.0**20  # bytes/us: what a link without a limit counts as
_LARGEST = 64.0  # of any input, an octave of size, ranks, rate or servers; and of any value


class ResidualData(msgspec.Struct, frozen=True, kw_only=True):
    """A learned residual as it is kept."""

    inputs: tuple[tuple[float, float, float, float], ...]  # Octaves of size, ranks, rate and servers of each point, [n][4].
    values: tuple[float, ...]  # log(measured / formula), [n].
    constants: tuple[float, ...]  # Of the kernel, as logarithms: variance, reach along each input, noise.


@dataclass(frozen=True, eq=False)
class Residual:
    """A learned residual, ready to predict."""

    data: ResidualData
    process: GaussianProcessRegressor

    @staticmethod
    def learned(points: Points, values: Floats, seed: int = 0) -> Residual:
        """Learn from n points and their log(measured / formula), [n]; of many points some are drawn at random."""
        few = np.random.default_rng(seed).permutation(len(values))[:_MOST]
        inputs, values = np.round(_inputs(points.select(few)), 9), np.round(values[few], 6)
        process = GaussianProcessRegressor(kernel=_kernel(), random_state=seed)
        with warnings.catch_warnings():
            # A length scale at its bound means that an axis has no influence, or all of it.
            warnings.simplefilter("ignore", ConvergenceWarning)
            process.fit(inputs, values)
        return Residual.of_data(
            ResidualData(
                inputs=tuple((size, ranks, rate, servers) for size, ranks, rate, servers in inputs.tolist()),
                values=tuple(values.tolist()),
                constants=tuple(process.kernel_.theta.tolist()),
            )
        )

    @staticmethod
    def of_data(data: ResidualData) -> Residual:
        """The residual that was kept; raises `ValueError` where it cannot be one."""
        inputs, values, constants = np.array(data.inputs), np.array(data.values), np.array(data.constants)
        kernel = _kernel()
        low, high = kernel.bounds.T
        if inputs.ndim != 2 or not 0 < len(inputs) == len(values) <= _MOST or not (np.abs(inputs) <= _LARGEST).all():
            raise ValueError("points of a residual are missing or impossible")
        if not (np.abs(values) <= _LARGEST).all():
            raise ValueError("errors of a residual are impossible")
        if constants.shape != low.shape or not ((constants >= low - 1e-6) & (constants <= high + 1e-6)).all():
            raise ValueError("constants of a residual are missing or impossible")
        process = GaussianProcessRegressor(kernel=kernel.clone_with_theta(constants), optimizer=None)
        return Residual(data, process.fit(inputs, values))

    def predict(self, points: Points) -> Floats:
        """log(time / formula), [points]."""
        if not len(points):
            return np.zeros(0)
        return np.asarray(self.process.predict(_inputs(points)), dtype=np.float64)


def _kernel() -> Kernel:
    reach = Matern(length_scale=(2.0,) * 4, length_scale_bounds=[(0.5, 20.0)] * 4, nu=1.5)
    return ConstantKernel(0.05, (1e-4, 1.0)) * reach + WhiteKernel(1e-3, (1e-6, 0.1))


def _inputs(points: Points) -> Floats:
    columns = [np.maximum(points.size_bytes, 1.0), points.ranks, np.minimum(points.link_bytes_per_us, FASTEST), points.servers]
    return np.stack([np.log2(column) for column in columns], axis=1)
