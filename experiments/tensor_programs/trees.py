"""Boosted trees over aggregated leaves and loops, and the correction by programs that were timed on a new target."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sklearn.cluster import KMeans
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel
from sklearn.preprocessing import StandardScaler
from xgboost import XGBRegressor

from experiments.tensor_programs.features import aggregated, moved_bytes, of_isas, of_loops, operations
from experiments.tensor_programs.table import Programs

Floats = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """All programs on all targets."""

    leaves: Floats  # [programs, columns].
    loops: Floats
    targets: Floats  # [targets, columns].
    us: Floats  # [programs, targets].
    operations: Floats  # [programs].
    bytes: Floats

    @staticmethod
    def of(programs: Programs) -> Rows:
        """Columns of a table."""
        return Rows(
            leaves=aggregated(programs), loops=of_loops(programs), targets=of_isas(programs.isas), us=programs.us,
            operations=operations(programs), bytes=moved_bytes(programs),
        )  # fmt: skip

    def inputs(self, places: Places, target: int, loops: bool) -> Floats:
        """What trees see."""
        parts = [self.leaves[places], *([self.loops[places]] if loops else []), np.tile(self.targets[target], (len(places), 1))]
        return np.concatenate(parts, axis=1)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """launch + max(operations / rate, bytes / rate), with rates that fitted programs reach: no constant of a machine is in here."""

    launch_us: float
    operations_per_us: float
    bytes_per_us: float

    @staticmethod
    def fit(rows: Rows, places: Places, targets: list[int]) -> Roofline:
        """Rates that the fastest twentieth of the programs reaches."""
        us = rows.us[np.ix_(places, targets)].mean(axis=1)
        return Roofline(
            launch_us=float(us.min()),
            operations_per_us=max(1.0, float(np.quantile(rows.operations[places] / us, 0.95))),
            bytes_per_us=max(1.0, float(np.quantile(rows.bytes[places] / us, 0.95))),
        )

    def us(self, rows: Rows, places: Places) -> Floats:
        """Of programs, [places]."""
        busy = np.maximum(rows.operations[places] / self.operations_per_us, rows.bytes[places] / self.bytes_per_us)
        return np.asarray(self.launch_us + busy)


@dataclass(frozen=True, kw_only=True)
class Trees:
    """Boosted trees of some programs on some targets."""

    model: XGBRegressor
    base: Roofline
    loops: bool
    ratio: bool

    @staticmethod
    def fit(rows: Rows, places: Places, targets: list[int], seed: int, *, loops: bool, ratio: bool) -> Trees:
        """loops: trees see `of_loops`, too. ratio: they learn log(us / roofline) instead of log(us)."""
        base = Roofline.fit(rows, places, targets)
        inputs = np.concatenate([rows.inputs(places, one, loops) for one in targets])
        learned = np.log(np.concatenate([rows.us[places, one] for one in targets]))
        if ratio:
            learned = learned - np.log(np.tile(base.us(rows, places), len(targets)))
        model = XGBRegressor(
            n_estimators=600, learning_rate=0.04, max_depth=8, subsample=0.7, colsample_bytree=0.3, min_child_weight=2,
            random_state=seed, n_jobs=1,
        )  # fmt: skip
        return Trees(model=model.fit(inputs, learned), base=base, loops=loops, ratio=ratio)

    def us(self, rows: Rows, wanted: Places, target: int) -> Floats:
        """Of wanted programs on a target, [wanted]."""
        found = np.asarray(self.model.predict(rows.inputs(wanted, target, self.loops)), dtype=float)
        return np.exp(found + (np.log(self.base.us(rows, wanted)) if self.ratio else 0.0))


def corrected(rows: Rows, predicted_us: Floats, sampled: Places, target: int, seed: int) -> Floats:
    """Predictions for all programs ([programs]) after a Gaussian process saw the errors on those that were timed on the target."""
    columns = np.column_stack([np.log(predicted_us), rows.loops[:, :15], np.log1p(rows.operations), np.log1p(rows.bytes)])
    scaled = StandardScaler().fit_transform(columns)
    error = np.log(rows.us[sampled, target] / predicted_us[sampled])
    kernel = ConstantKernel(0.05) * Matern(3.0, nu=1.5) + WhiteKernel(0.01)
    process = GaussianProcessRegressor(kernel, n_restarts_optimizer=1, random_state=seed, normalize_y=True).fit(
        scaled[sampled], error
    )
    shift = np.clip(process.predict(scaled), error.min(), error.max())  # Nothing beyond what was measured.
    return np.asarray(predicted_us * np.exp(shift))


def by_clusters(rows: Rows, pool: Places, count: int, seed: int) -> Places:
    """The paper's choice of what to time on a new device: the program nearest to each centre of KMeans, largest cluster first."""
    scaled = StandardScaler().fit_transform(rows.leaves[pool])
    means = KMeans(n_clusters=count, n_init=1, random_state=seed).fit(scaled)
    distance = means.transform(scaled)
    chosen: list[int] = []
    for cluster in np.argsort(-np.bincount(means.labels_, minlength=count)):
        chosen.append(next(int(place) for place in np.argsort(distance[:, cluster]) if int(place) not in chosen))
    return pool[np.array(chosen)]
