"""Boosted trees whose sum over the leaves of a program gives its latency.

A tree sees one leaf. The latency of a program is the sum of exp(prediction) over its leaves, and the loss is that of the sum, so
that leaves of ops that no fitted model runs are priced like similar leaves of other ops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xgboost

from experiments.tensor_programs.leaves import LeafRows

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How trees are boosted."""

    rounds: int = 200
    depth: int = 6
    rate: float = 0.1
    columns: float = 0.3
    samples: float = 0.7
    regularization: float = 1.0
    huber: float = 0.5  # Errors of log(us) beyond that count linearly.
    relative: bool = True  # The loss is the relative error itself instead of that of the logarithm.


@dataclass(frozen=True, kw_only=True)
class AdditiveTrees:
    """Fitted trees of leaves."""

    model: xgboost.Booster

    @staticmethod
    def fit(rows: LeafRows, log_us: Floats, chosen: npt.NDArray[np.bool_], seed: int, settings: Settings) -> AdditiveTrees:
        """log_us: logarithms of times, [targets * programs]; chosen: which of them are fitted."""
        leaves = np.flatnonzero(chosen[rows.program])
        program = np.unique(rows.program[leaves], return_inverse=True)[1]
        measured = log_us[np.flatnonzero(chosen)]
        data = xgboost.QuantileDMatrix(rows.columns[leaves].astype(np.float32), max_bin=64, nthread=1)
        data.set_base_margin(rows.base[leaves])

        def gradients(margin: Floats, _: xgboost.DMatrix) -> tuple[Floats, Floats]:
            share = np.exp(np.minimum(margin.astype(float), 30.0))
            total = np.bincount(program, share)
            share /= total[program]
            error = np.log(total) - measured
            if settings.relative:
                over = np.expm1(np.clip(error, -5, 1.0))
                slope = over / np.sqrt(0.05 + over**2) * np.exp(np.clip(error, -1.5, 0.7))
                curve = np.maximum(np.abs(slope) / np.maximum(np.abs(error), 0.2), 0.3)
            else:
                curve = 1 / np.sqrt(1 + (error / settings.huber) ** 2)
                slope = error * curve
            return slope[program] * share, curve[program] * share + 1e-4

        parameters = {
            "max_depth": settings.depth, "eta": settings.rate, "colsample_bynode": settings.columns, "subsample": settings.samples,
            "lambda": settings.regularization, "min_child_weight": 1.0, "seed": seed, "nthread": 1, "tree_method": "hist",
            "max_bin": 64, "disable_default_eval_metric": True, "base_score": 0.0,
        }  # fmt: skip
        return AdditiveTrees(model=xgboost.train(parameters, data, settings.rounds, obj=gradients))

    def us(self, rows: LeafRows, chosen: npt.NDArray[np.bool_]) -> Floats:
        """Latencies of the chosen targets * programs, in their order."""
        leaves = np.flatnonzero(chosen[rows.program])
        program = np.unique(rows.program[leaves], return_inverse=True)[1]
        data = xgboost.DMatrix(rows.columns[leaves].astype(np.float32), nthread=1)
        data.set_base_margin(rows.base[leaves])
        return np.bincount(program, np.exp(self.model.predict(data).astype(float)))
