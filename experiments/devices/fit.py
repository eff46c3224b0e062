"""Fits the predictor of op latencies on devices: trees, similarity of errors, domain and widths of intervals; `save` writes it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import xgboost
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from dpro_search.cluster import Device
from dpro_search.costmodel.devices.correction import (
    COORDINATES,
    PARTS,
    OpPoints,
    Similarity,
    shared_leaves,
)
from dpro_search.costmodel.devices.families import FamilyTrees
from dpro_search.costmodel.devices.features import DEVICE_FEATURES, FEATURES, OP_FEATURES, base_us, features
from dpro_search.costmodel.devices.model import (
    CHECKED_PLACES,
    COVERAGE,
    ELEMENT_PLACE,
    KIND_PLACES,
    LatencyModel,
    OpDomain,
    Trees,
)
from dpro_search.costmodel.devices.model_file import FITS, TREES, LatencyInfo
from dpro_search.costmodel.devices.ops import KINDS, Floats, Ops, Singles
from dpro_search.costmodel.devices.profile import DeviceProfile, UsualShares, probe_places, probes_of
from dpro_search.costmodel.forest import Forest

EVERYTHING = tuple(range(len(FEATURES)))
OF_OPS = tuple(place for place, name in enumerate(FEATURES) if name in OP_FEATURES)
NOT_OF_DEVICES = tuple(place for place, name in enumerate(FEATURES) if name not in DEVICE_FEATURES)


@dataclass(frozen=True, kw_only=True)
class TreeSettings:
    """Settings of boosted trees."""

    trees: int = 200
    depth: int = 7
    learning_rate: float = 0.06
    rows: float = 0.7  # Share of the rows that each tree uses.
    columns: float = 0.5  # Share of the columns that each tree uses.
    leaf_weight: float = 8.0
    slope: float = 0.3  # Errors of the logarithm beyond it count linearly.


BASE = TreeSettings()
SHAPES = TreeSettings(trees=150, depth=9, learning_rate=0.08, leaf_weight=3.0)
"""Deep, for shapes have quirks; these trees see nothing of the device, so that they cannot learn devices by heart."""

FAMILY = TreeSettings(trees=60, depth=6, learning_rate=0.12, leaf_weight=4.0)
FEWEST_OF_FAMILY = 300  # ops
"""Ops of a family that its own trees need."""
_DEVIATIONS = len(PARTS)
START = np.log([0.15, 0.05, 0.1, 0.15, 0.15, 0.08, 0.1, 0.2, 1.0, *(4.0 for _ in COORDINATES)])
"""Start of the search for a similarity: deviations of the parts of an error, roughness, lengths."""
_LOW, _HIGH = np.log(1e-2), np.log(100.0)
_ROUNDING = 1e-9  # Share of a variance that is added to the noise.
_PRIOR = 0.05  # Weight of a length's start: decides only where errors leave a length open.


@dataclass(frozen=True, kw_only=True)
class Measured:
    """n ops on a device.

    Attributes
    ----------
    name, family
        Of the device; devices of a family resemble each other, and are left out together.
    features : array [n, features]
    base_us : array [n]
    probes : array [at most 5]
        Places of the ops that the profile's probes are.
    """

    name: str
    family: str
    profile: DeviceProfile
    ops: Ops
    us: Floats
    features: Singles
    base_us: Floats
    probes: npt.NDArray[np.int64]

    @staticmethod
    def of(name: str, family: str, device: Device, ops: Ops, us: Floats, usual: UsualShares, *, probed: bool = True) -> Measured:
        """The points of measured ops. Those that `probe_places` chooses are the device's probes, unless it is to have none."""
        places = probe_places(ops, device)
        profile = DeviceProfile(device=device)
        if probed:
            profile = DeviceProfile(device=device, probes=probes_of(ops[places], us[places], device))
        return Measured(
            name=name,
            family=family,
            profile=profile,
            ops=ops,
            us=us,
            features=features(ops, profile, usual),
            base_us=base_us(ops, profile, usual),
            probes=places,
        )

    def __len__(self) -> int:
        return len(self.us)

    @property
    def ratio(self) -> Floats:
        """log(latency / base), [n]."""
        return np.asarray(np.log(self.us / self.base_us))

    @cached_property
    def points(self) -> OpPoints:
        """The ops as a correction sees them."""
        return OpPoints.of(self.ops, self.features)

    def __getitem__(self, chosen: npt.NDArray[np.bool_]) -> Measured:
        """Some of the ops; probes that are not among them are left to the profile."""
        places = np.cumsum(chosen) - 1
        return replace(
            self,
            ops=self.ops[chosen],
            us=self.us[chosen],
            features=self.features[chosen],
            base_us=self.base_us[chosen],
            probes=places[self.probes[chosen[self.probes]]],
        )


def fit_trees(parts: Sequence[Measured], seed: int) -> Trees:
    """Trees fitted to devices, each with the same weight, and in each kinds of ops alike."""
    ratio = np.concatenate([part.ratio for part in parts])
    return boosted_trees(np.concatenate([part.features for part in parts]), ratio, tree_weights(parts), seed=seed)


def boosted_trees(features: Singles, ratio: Floats, weight: Floats, *, seed: int, threads: int = 1) -> Trees:
    """Trees fitted to log(latency / base), [n], and to its error by the shapes of ops alone.

    Kinds that none of the ops is of are no features: each tree draws from the others.
    """
    unknown = {place for place in KIND_PLACES if not (features[:, place] > 0).any()}
    everything, of_ops = (tuple(place for place in places if place not in unknown) for places in (EVERYTHING, OF_OPS))
    base = _boosted(features, ratio, weight, everything, BASE, seed, threads)
    left = ratio - base.predict(features)
    return Trees(base=base, shapes=_boosted(features, left, weight, of_ops, SHAPES, seed + 1, threads))


def fit_families(parts: Mapping[str, Sequence[Measured]], seed: int) -> tuple[FamilyTrees, tuple[str, ...]]:
    """Trees of each family that has enough ops, from devices by family; and the families' names."""
    names = tuple(name for name, some in parts.items() if sum(map(len, some)) >= FEWEST_OF_FAMILY)
    forests = []
    known = np.zeros((len(names), len(KINDS), 2), dtype=bool)
    for number, name in enumerate(names):
        some = parts[name]
        features, ratio = np.concatenate([part.features for part in some]), np.concatenate([part.ratio for part in some])
        forests.append(_boosted(features, ratio, tree_weights(some), NOT_OF_DEVICES, FAMILY, seed, 1))
        for part in some:
            known[number, part.ops.kind.astype(int), part.ops.backward.astype(int)] = True
    nodes = 2**FAMILY.depth
    none = np.zeros((0, nodes - 1))
    empty = Forest(feature=none.astype(np.uint8), threshold=none.astype(np.float32), leaf=np.zeros((0, nodes), np.float32))
    joint = Forest(
        feature=np.concatenate([empty.feature, *(forest.feature for forest in forests)]),
        threshold=np.concatenate([empty.threshold, *(forest.threshold for forest in forests)]),
        leaf=np.concatenate([empty.leaf, *(forest.leaf for forest in forests)]),
    )
    return FamilyTrees(forest=joint, bases=np.array([forest.base for forest in forests]), known=known), names


def _boosted(
    features: Singles, ratio: Floats, weight: Floats, columns: tuple[int, ...], settings: TreeSettings, seed: int, threads: int
) -> Forest:
    chosen = np.ascontiguousarray(features[:, list(columns)])
    data = xgboost.QuantileDMatrix(chosen, label=ratio, weight=weight, nthread=threads)
    options = {
        "objective": "reg:pseudohubererror",
        "huber_slope": settings.slope,
        "base_score": float(np.median(ratio)),
        "max_depth": settings.depth,
        "eta": settings.learning_rate,
        "subsample": settings.rows,
        "colsample_bytree": settings.columns,
        "min_child_weight": settings.leaf_weight,
        "tree_method": "hist",
        "nthread": threads,
        "seed": seed,
    }
    return Forest.of_booster(xgboost.train(options, data, num_boost_round=settings.trees), settings.depth, columns)


def even_weights(*labels: npt.NDArray[np.generic]) -> Floats:
    """Weights under which each combination of labels counts alike within each value of the first, and these alike; mean 1."""
    numbers = [np.unique(label, return_inverse=True)[1].reshape(-1) for label in labels]
    joint = np.unique(np.stack(numbers), axis=1, return_inverse=True)[1].reshape(-1)
    cell_rows = np.bincount(joint)[joint]
    first = numbers[0]
    cells = np.array([len(np.unique(joint[first == place])) for place in range(first.max() + 1)])[first]
    weight = 1.0 / cell_rows / cells
    return np.asarray(weight * len(weight) / weight.sum())


def tree_weights(parts: Sequence[Measured]) -> Floats:
    """Weights of the ops of devices in a fit, one after the other."""
    return even_weights(
        np.repeat(np.arange(len(parts)), [len(part) for part in parts]), np.concatenate([part.ops.kind for part in parts])
    )


def interval_width(scores: Sequence[Floats]) -> float:
    """Bound that holds 90 % of the scores, [n] for each left-out device. Devices have equal weights, and one more is expected."""
    flat = np.concatenate(list(scores))
    weight = np.concatenate([np.full(len(one), 1 / len(one)) for one in scores])
    order = np.argsort(flat)
    share = np.cumsum(weight[order]) / (len(scores) + 1)
    return float(flat[order][min(int(np.searchsorted(share, COVERAGE)), len(flat) - 1)])


def fit_similarity(groups: Sequence[tuple[OpPoints, Floats]], most: int = 120, seed: int = 0) -> Similarity:
    """The parameters under which errors on left-out devices, a group each, are likeliest; at most `most` of each are used."""
    random = np.random.default_rng(seed)
    picked = [(points[chosen], errors[chosen]) for points, errors in groups for chosen in (random.permutation(len(errors))[:most],)]
    spread = np.maximum(np.std(np.concatenate([points.at for points, _ in picked]), axis=0), 0.1)
    limit = 3 * float(np.median([np.sqrt(np.mean(errors**2)) for _, errors in picked]))
    parts = [(Group.of(points, spread), np.clip(errors, -limit, limit)) for points, errors in picked]

    def cost(logs: Floats) -> tuple[float, Floats]:
        likelihoods = [group.negative_log_likelihood(logs, errors) for group, errors in parts]
        prior = _PRIOR * len(parts)
        value = sum(one for one, _ in likelihoods) + prior * float(((logs - START)[_DEVIATIONS:] ** 2).sum())
        slope = np.sum([one for _, one in likelihoods], axis=0)
        slope[_DEVIATIONS:] += 2 * prior * (logs - START)[_DEVIATIONS:]
        return value, slope

    bounds = [(_LOW, _HIGH)] * len(START)
    likelihoods = minimize(cost, START, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40})
    values = np.exp(likelihoods.x)
    return Similarity(
        deviations=values[:_DEVIATIONS], roughness=float(values[_DEVIATIONS]), lengths=values[_DEVIATIONS + 1 :] * spread
    )


@dataclass(frozen=True)
class Group:
    """Precomputed terms of the likelihood of a device's errors."""

    squared: Floats  # By coordinate, [coordinates, n, n].
    same_kind: Floats
    same: Floats
    leaves: Floats
    families: Floats

    @staticmethod
    def of(points: OpPoints, spread: Floats) -> Group:
        at = points.at / spread
        # In single precision both may have negative eigenvalues.
        families = points.families.astype(float)
        trees = float(max(points.leaves.shape[1], 1))
        return Group(
            ((at[:, None, :] - at[None, :, :]) ** 2).transpose(2, 0, 1),
            (points.kind[:, None] == points.kind[None, :]).astype(float),
            (points.category[:, None] == points.category[None, :]).astype(float),
            np.round(shared_leaves(points, points).astype(float) * trees) / trees,
            families @ families.T,
        )

    def negative_log_likelihood(self, logs: Floats, errors: Floats) -> tuple[float, Floats]:
        """And its slope along the logarithms of deviations, roughness and lengths."""
        values = np.exp(logs)
        device, kind, category, wide, narrow, noise, leaves, families, roughness = values[: _DEVIATIONS + 1]
        inverse = values[_DEVIATIONS + 1 :] ** -2
        total = np.tensordot(inverse, self.squared, axes=1)
        distance = np.sqrt(total + 1e-12)
        near = wide**2 * np.exp(-0.5 * total) * self.same_kind
        nearer = narrow**2 * np.exp(-roughness * distance) * self.same
        covariance = device**2 + kind**2 * self.same_kind + category**2 * self.same + near + nearer
        covariance = covariance + leaves**2 * self.leaves + families**2 * self.families
        covariance[np.diag_indices_from(covariance)] += noise**2 + _ROUNDING * covariance.diagonal().mean()
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
            leaves**2 * (middle * self.leaves).sum(),
            families**2 * (middle * self.families).sum(),
            -0.5 * roughness * (middle * nearer * distance).sum(),
            *(0.5 * inverse * np.tensordot(self.squared, middle * along, axes=((1, 2), (0, 1)))),
        ]
        return value, np.array(slope)


def fit_domain(parts: Sequence[Singles]) -> OpDomain:
    """The range of the features of all measured ops."""
    everything = np.concatenate(parts).astype(np.float64)
    low = np.full((len(KIND_PLACES), len(CHECKED_PLACES)), np.inf)
    high = np.full((len(KIND_PLACES), len(CHECKED_PLACES)), -np.inf)
    for row, place in enumerate(KIND_PLACES):
        of_kind = everything[everything[:, place] > 0][:, CHECKED_PLACES]
        if len(of_kind):
            low[row], high[row] = of_kind.min(axis=0), of_kind.max(axis=0)
    return OpDomain(low=low, high=high, element_bytes=np.unique(everything[:, ELEMENT_PLACE]))


def save(model: LatencyModel, info: LatencyInfo, path: Path) -> None:
    """Write a fitted model."""
    arrays: dict[str, np.ndarray] = {"info": np.frombuffer(msgspec.json.encode(info), dtype=np.uint8)}
    for name, fit in zip(FITS, (model.training, model.every), strict=True):
        of_fit = {
            "deviations": fit.similarity.deviations,
            "lengths": fit.similarity.lengths,
            "domain_low": fit.domain.low.astype(np.float32),
            "domain_high": fit.domain.high.astype(np.float32),
            "element_bytes": fit.domain.element_bytes,
            "families_base": fit.families.bases,
            "families_known": fit.families.known,
        }
        for part, forest in (*zip(TREES, (fit.trees.base, fit.trees.shapes), strict=True), ("families", fit.families.forest)):
            of_fit |= forest.arrays(part)
        arrays |= {f"{name}_{key}": array for key, array in of_fit.items()}
    data = io.BytesIO()
    np.savez_compressed(data, **arrays)  # type: ignore[arg-type]
    path.write_bytes(data.getvalue())
