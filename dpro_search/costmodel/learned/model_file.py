"""Trained cost models as a folder of data: ``model.json`` and the trees in XGBoost's JSON. Nothing in it is run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import xgboost

import dpro_search
from dpro_search.collect._files import written_folder
from dpro_search.collect.clusters.table import ClusterTable, MeasuredCluster, TableHeader
from dpro_search.costmodel.learned.domain import Domain
from dpro_search.costmodel.learned.features import FEATURES, feature_matrix
from dpro_search.costmodel.learned.regressor import TREE_FEATURES, FusedTimeRegressor
from dpro_search.costmodel.learned.scores import ALL, Score, left_out_scores
from dpro_search.errors import InputError, TraceFormatError, TraceVersionError

MODEL_VERSION = 1
_TREES = "xla-fusion.trees.json"


class FusionModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What `model.json` says: provenance, scores, and what the trees need beside them."""

    version: int = MODEL_VERSION
    name: str = "xla-fusion"
    rows: int
    scores: tuple[Score, ...]
    sources: tuple[TableHeader, ...]  # where the rows were measured
    trained_at: str
    versions: dict[str, str]
    parameters: dict[str, float]
    features: tuple[str, ...]
    trees_digest: str  # of the file of the trees
    base: tuple[float, ...]
    residuals: tuple[float, ...]
    domain_centre: tuple[float, ...]
    domain_spread: tuple[float, ...]
    domain_points: tuple[tuple[float, ...], ...]
    domain_usual: float

    @property
    def overall(self) -> Score:
        """The score over all left-out models."""
        return next(score for score in self.scores if score.model == ALL)


@dataclass(frozen=True, kw_only=True)
class FusionModel:
    """A trained model and what is known about it."""

    info: FusionModelInfo
    estimator: FusedTimeRegressor

    @staticmethod
    def train(tables: Sequence[ClusterTable], estimator: FusedTimeRegressor | None = None) -> FusionModel:
        """Train on measured clusters, each distinct one counted once.

        Raises
        ------
        InputError
            There are too few clusters, they are of one model only, or they were measured on different machines.
        """
        headers = tuple(table.header for table in tables)
        machines = sorted({header.machine for header in headers})
        if len(machines) > 1:
            raise InputError(f"the tables are of different machines ({'; '.join(machines)}): durations do not carry over")
        distinct: dict[str, MeasuredCluster] = {}
        for table in tables:
            for row in table.measured:
                distinct.setdefault(row.cluster.fingerprint, row)
        rows = tuple(distinct.values())
        estimator = estimator or FusedTimeRegressor()
        fused = np.array([row.fused_us for row in rows])
        estimator.fit(feature_matrix([row.cluster for row in rows]), fused, np.array([row.model for row in rows]))
        domain = estimator.domain_
        info = FusionModelInfo(
            rows=len(rows),
            scores=left_out_scores(rows, estimator),
            sources=headers,
            trained_at=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={"dpro-search": dpro_search.__version__, "xgboost": xgboost.__version__},
            parameters=estimator.get_params(),
            features=FEATURES,
            trees_digest=_digest(_trees(estimator)),
            base=tuple(estimator.base_.tolist()),
            residuals=tuple(estimator.scores_.tolist()),
            domain_centre=tuple(domain.centre.tolist()),
            domain_spread=tuple(domain.spread.tolist()),
            domain_points=tuple(map(tuple, domain.points.tolist())),
            domain_usual=domain.usual,
        )
        return FusionModel(info=info, estimator=estimator)

    def save(self, folder: Path) -> None:
        """Write the folder; raises `InputError` if it exists already."""
        with written_folder(folder) as tmp:
            (tmp / "model.json").write_bytes(msgspec.json.encode(self.info) + b"\n")
            (tmp / _TREES).write_bytes(_trees(self.estimator))

    @staticmethod
    def load(folder: Path) -> FusionModel:
        """Read a folder written by `save`.

        Raises
        ------
        InputError
            A file is missing, or the model was trained on other features than this program computes.
        TraceVersionError
            Written by another version.
        TraceFormatError
            A file is damaged.
        """
        path = folder / "model.json"
        info = _decoded(path, _read(path))
        if info.features != FEATURES:
            missing = sorted(set(info.features) - set(FEATURES)) + sorted(set(FEATURES) - set(info.features))
            what = f"other features ({', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''})" if missing else "another order"
            raise InputError(
                f"{path}: the model was trained on {what} than this program has; train it again with 'dpro-search fit'"
            )
        trees = _read(folder / _TREES)
        # XGBoost ends the process on some damaged files, so that none may reach it.
        if _digest(trees) != info.trees_digest:
            raise TraceFormatError(f"{folder / _TREES}: damaged or of another model; train it again with 'dpro-search fit'")
        booster = xgboost.Booster({"nthread": 1})
        try:
            booster.load_model(bytearray(trees))
        except (xgboost.core.XGBoostError, ValueError, UnicodeDecodeError) as error:
            raise TraceFormatError(f"{folder / _TREES}: damaged or cut off; train it again with 'dpro-search fit'") from error
        if booster.num_features() != len(TREE_FEATURES):
            raise InputError(f"{folder / _TREES}: {booster.num_features()} features, expected {len(TREE_FEATURES)}; train it again")
        estimator = FusedTimeRegressor()
        estimator.base_, estimator.booster_, estimator.scores_ = np.array(info.base), booster, np.array(info.residuals)
        estimator.domain_ = Domain(
            centre=np.array(info.domain_centre),
            spread=np.array(info.domain_spread),
            points=np.array(info.domain_points),
            usual=info.domain_usual,
        )
        if estimator.domain_.points.ndim != 2 or estimator.domain_.points.shape[1] != len(FEATURES):
            raise TraceFormatError(f"{path}: the domain does not fit the features; train it again with 'dpro-search fit'")
        return FusionModel(info=info, estimator=estimator)


def _trees(estimator: FusedTimeRegressor) -> bytes:
    return bytes(estimator.booster_.save_raw("json"))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class _Version(msgspec.Struct):
    version: int


def _decoded(path: Path, data: bytes) -> FusionModelInfo:
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version != MODEL_VERSION:
            raise TraceVersionError(f"{path}: model version {version}, this program reads {MODEL_VERSION}; train it again")
        return msgspec.json.decode(data, type=FusionModelInfo)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceFormatError(f"{path}: damaged or no cost model ({error})") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); name a folder made by 'dpro-search fit'") from error
